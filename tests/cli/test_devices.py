"""`--devices` from the command line: the same text, a table by device, errors that name the value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from expertly.cli.main import main
from tests.cli.asking import Captured, answer

GENERATE = ("--prompt", "Once upon a time", "--max-new-tokens", "8", "--memory", "60%")


def run(capsys: Captured, *words: object) -> dict[str, Any]:
    return answer(capsys, *words)


def test_text_is_the_same_and_devices_are_told(model: Path, capsys: Captured) -> None:
    one = run(capsys, "generate", str(model), *GENERATE, "--device", "cpu")
    two = run(capsys, "generate", str(model), *GENERATE, "--devices", "cpu:0,cpu:1")
    assert two["token_ids"] == one["token_ids"]
    assert isinstance(two["devices"], list) and isinstance(one["devices"], list)
    assert [device["device"] for device in two["devices"]] == ["cpu:0", "cpu:1"]
    assert two["bytes_loaded"] == sum(device["bytes_loaded"] for device in two["devices"])
    assert [device["device"] for device in one["devices"]] == ["cpu"]


def test_stats_have_a_table_by_device_where_there_are_several(model: Path, capsys: Captured) -> None:
    for devices, lines in (("cpu:0,cpu:1,cpu:2", 6), ("cpu:0", 0)):
        assert main(["generate", str(model), *GENERATE, "--stats", "--devices", devices]) == 0
        out = capsys.readouterr().out
        assert sum(line.startswith("cpu:") for line in out.splitlines()) == lines


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--devices", "cpu:0,cpu:1", "--device", "cpu"), "accepted: one of the two"),
        (("--devices", "cpu:0,tpu"), "devices='tpu': unknown; accepted: cpu, cuda, cuda:N"),
        (("--devices", ",".join(f"cpu:{i}" for i in range(9))), "devices: 9 of them, but a layer has only 8 experts"),
    ],
)
def test_bad_devices(model: Path, arguments: tuple[str, ...], error: str, capsys: Captured) -> None:
    assert main(["generate", str(model), *GENERATE, *arguments]) == 2
    assert error in capsys.readouterr().err
