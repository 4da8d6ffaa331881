"""`--devices` from the command line: the same text, a table by device, errors that name the value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertly.cli.main import main

GENERATE = ("--prompt", "Once upon a time", "--max-new-tokens", "8", "--memory", "60%")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main([*arguments, "--json"]) == 0
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def test_text_is_the_same_and_devices_are_told(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = run(capsys, "generate", str(model), *GENERATE, "--device", "cpu")
    two = run(capsys, "generate", str(model), *GENERATE, "--devices", "cpu:0,cpu:1")
    assert two["token_ids"] == one["token_ids"]
    assert isinstance(two["devices"], list) and isinstance(one["devices"], list)
    assert [device["device"] for device in two["devices"]] == ["cpu:0", "cpu:1"]
    assert two["bytes_loaded"] == sum(device["bytes_loaded"] for device in two["devices"])
    assert [device["device"] for device in one["devices"]] == ["cpu"]


def test_stats_have_a_table_by_device_where_there_are_several(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_bad_devices(model: Path, arguments: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(model), *GENERATE, *arguments]) == 2
    assert error in capsys.readouterr().err


def test_a_trace_is_recorded_over_devices(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What routers choose does not depend on who computes it."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once upon a time"}\n')
    found = []
    for name, where in (("one", ("--device", "cpu")), ("two", ("--devices", "cpu:0,cpu:1"))):
        arguments = (
            "--prompts",
            str(prompts),
            "--max-new-tokens",
            "6",
            "--memory",
            "60%",
            "--out",
            str(tmp_path / name),
        )
        result = run(capsys, "lab", "trace", "record", str(model), *arguments, *where)
        found.append((result["iterations"], result["rows"]))
        shards = sorted((tmp_path / name).glob("*.safetensors"))
        found[-1] += (b"".join(shard.read_bytes() for shard in shards),)  # type: ignore[assignment]
    assert found[0] == found[1]
    arguments = ("--prompts", str(prompts), "--out", str(tmp_path / "no"), "--devices", "cpu:0,cpu:1")
    assert main(["lab", "trace", "record", str(model), *arguments, "--decisions", str(tmp_path / "d.jsonl")]) == 2
    assert "2 devices decide apart; accepted: one device" in capsys.readouterr().err
