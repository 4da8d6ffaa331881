"""`expertly tune`: the whole command, what it prints, what it refuses; and what `--system auto` makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertly.arguments import duration
from expertly.cli.main import main
from tests.cli.asking import Captured
from tests.families import make_checkpoint

SETTINGS = ("--memory", "50%", "--max-new-tokens", "6", "--time-limit", "10s", "--codec", "none")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny", seed=11, tokenizer=True)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Once", "2 + 2 =", "def f", "Dear")))
    return path


def test_what_is_tuned_is_what_auto_runs(model: Path, prompts: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "result.json"
    assert main(["tune", str(model), "--prompts", str(prompts), *SETTINGS, "--out", str(out)]) == 0
    printed, said = capsys.readouterr()
    for words in (
        "50.0% of the experts",
        "on the engine",
        "TPOT",
        "lru",
        "simulated, the best of",
        "requests recorded",
    ):
        assert words in printed
    assert "recording" in printed and "verifying" in printed
    result = json.loads(out.read_text())
    assert result["workload"]["requests"] == 4 and result["workload"]["tried_on"] == 2
    assert result["search"]["tried"] > 10
    assert result["seconds"]["total"] < 60
    rows = result["verification"]["final"] or result["verification"]["heat"]
    assert rows[0]["system"] == "lru" and rows[0]["ratio"] == 1.0
    assert all(row["tpot_s"] > 0 and row["num_turns"] >= 1 for row in rows)
    if result["saved"] is None:  # a machine so busy that nothing could be verified
        assert "nothing saved" in said and not result["is_verified"]
        return
    assert Path(result["saved"]).exists() and "--system auto uses it" in said
    by_name = {row["system"]: row for row in rows}
    if result["system"] != "lru":
        assert by_name[result["system"]]["high"] < 1 and result["gains"]["lru"]["ratio"] < 1
    generate = ["generate", str(model), "--prompt", "Once", "--max-new-tokens", "4", "--memory", "50%"]
    assert main(generate) == 0
    plain = capsys.readouterr().out.split("\n\n")[0]
    assert main([*generate, "--system", "auto", "--json"]) == 0
    printed, said = capsys.readouterr()
    generated = json.loads(printed)
    assert generated["system"] == result["system"] and generated["segments"] == result["choice"]["segments"]
    assert generated["text"] == plain, "whatever is chosen, the text is the same"
    assert f"system auto: {result['system']}" in said and generated["system_reason"] in said


def test_the_demo_model_with_tiny_settings(tmp_path: Path, capsys: Captured) -> None:
    settings = ("--memory", "25%", "--requests", "2", "--max-new-tokens", "8", "--time-limit", "5s", "--codec", "none")
    out = tmp_path / "result.json"
    assert main(["tune", *settings, "--json", "--out", str(out)]) == 0
    printed, said = capsys.readouterr()
    result = json.loads(printed)
    assert json.loads(out.read_text()) == result
    assert "no --prompts: tuned for 2 texts that ship, not for yours" in said
    assert result["model"] == "demo" and result["workload"]["requests"] == 2
    assert result["hardware"]["compute"]["expert_ns"][0] > 0, "the machine was measured"


def test_times_as_people_write_them() -> None:
    assert [duration(text) for text in ("300s", "300", "5m", "1.5m")] == [300.0, 300.0, 300.0, 90.0]
