"""bench/common.py: rows are added to a file only where they can stand beside those that it has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import common


def write(out: Path, row: str, command: str, commit: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """As a benchmark does whose `--out` adds to a file."""
    monkeypatch.setattr(common, "commit_of", lambda checkout: commit)
    monkeypatch.setattr(sys, "argv", command.split()[1:])
    earlier = common.earlier_report(str(out), settings)
    common.print_report("one", [*earlier["results"], {"row": row}], settings, str(out), earlier["command"])


def test_a_file_keeps_every_command_of_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "one.json"
    for row, command in (("a", "python one.py --a"), ("b", "python one.py --b"), ("c", "python one.py --a")):
        write(out, row, command, "393c126", monkeypatch, warm=1)
    report = json.loads(out.read_text())
    assert report["results"] == [{"row": "a"}, {"row": "b"}, {"row": "c"}]
    assert report["command"] == "python one.py --a && python one.py --b"


@pytest.mark.parametrize(
    ("commit", "warm", "told"),
    [
        ("5a9e0ae", 1, "commit='393c126'; accepted: '5a9e0ae'"),
        ("393c126+changes", 1, "commit='393c126+changes' here; accepted: a commit without changes"),
        ("393c126", 2, "warm=1; accepted: 2, as in this run"),
    ],
)
def test_other_rows_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str, warm: int, told: str
) -> None:
    out = tmp_path / "one.json"
    write(out, "a", "python one.py", "393c126", monkeypatch, warm=1)
    before = out.read_text()
    with pytest.raises(SystemExit) as caught:
        write(out, "b", "python one.py", commit, monkeypatch, warm=warm)
    assert told in str(caught.value) and str(out) in str(caught.value)
    assert out.read_text() == before
