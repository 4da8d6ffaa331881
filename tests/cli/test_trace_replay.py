"""`expertly lab trace replay`: what it prints and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertly.cli.main import main
from tests.cli.asking import Captured
from tests.scheduler.test_decisions import record


def test_the_same_decisions_are_said_to_be_so(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "d.jsonl"
    record(path, iterations=20)
    assert main(["lab", "trace", "replay", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("system lru, P = 2: 20 iterations, 60 layers, ")
    assert printed.out.endswith("all decisions identical\n") and not printed.err


def test_as_json(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "d.jsonl"
    record(path, "on-demand", iterations=4)
    assert main(["lab", "trace", "replay", str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["system"] == "on-demand" and result["segments"] == 2
    assert (result["iterations"], result["layers"], result["identical"]) == (4, 12, True)
    assert result["calls"] == len(path.read_text().splitlines()) - 2, "all but the header and the end"


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_changed_decision_ends_with_2_and_names_file_and_line(
    flags: list[str], tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "d.jsonl"
    record(path)
    path.write_text(path.read_text().replace('true,"', 'false,"', 1))
    assert main(["lab", "trace", "replay", str(path), *flags]) == 2
    printed = capsys.readouterr()
    assert "d.jsonl, line " in printed.err and "checksum" in printed.err
    assert "Traceback" not in printed.err
    assert (json.loads(printed.out)["error"]["type"] == "TraceError") if flags else not printed.out
