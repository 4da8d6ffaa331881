"""`expertly bench`: systems run in turns and answer alike, failures have reasons, and --save is what `auto` runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from expertly import api, bench
from expertly.cli.main import main
from expertly.engine.remembered import remembered_path
from expertly.model.packing import pack_cached
from expertly.scheduler.systems import BASE_SYSTEM
from tests.cli.asking import Captured, answer, told

TINY = ("--requests", 2, "--tokens", 4, "--rounds", 2, "--raw")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The systems that were loaded, in order."""
    noted, load = list[str](), api.load

    def noting(model: Any, **options: Any) -> Any:
        noted.append(options["system"])
        return load(model, **options)

    monkeypatch.setattr(api, "load", noting)
    return noted


def test_systems_run_in_turns_and_auto_is_the_saved_one(
    model: Path, tmp_path: Path, loads: list[str], capsys: Captured
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Once", "2 + 2 =", "def f")))
    words = ("bench", model, "--prompts", prompts, *TINY, "--memory", "50%", "--system", "lfu")
    assert main([*map(str, words), "--save", "--json"]) == 0
    printed, said = capsys.readouterr()
    result = json.loads(printed)
    names = [row["system"] for row in result["rows"]]
    assert names == ["lru", "expertly", "expertly-ahead", "lfu"] and said == ""
    assert loads == [BASE_SYSTEM, *names, *names[1:], names[0]], "one to begin with, then two rounds, in other orders"
    assert result["requests"] == 2 and all(row["reason"] is None for row in result["rows"])
    for row in result["rows"]:
        assert row["tpot_s"] > 0 and row["ttft_s"] > 0 and row["tokens_per_s"] > 0
        assert 0 <= row["hit_rate"] <= 1 and row["bytes_per_token"] >= 0
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    lru = result["rows"][0]
    assert (lru["ratio_low"], lru["ratio_high"]) == (1, 1)
    (fastest,) = result["fastest"]
    assert fastest["ratio"] == min(row["ratio"] for row in result["rows"])
    assert Path(result["saved"]) == remembered_path(pack_cached(str(model)))
    run = ("run", model, "Once", "--max-new-tokens", 4, "--temperature", 0)
    auto = answer(capsys, *run, "--memory", "50%", "--system", "auto")
    assert auto["system"] == fastest["system"] and "the fastest here" in auto["system_reason"]
    assert "the default" in answer(capsys, *run, "--memory", "90%")["system_reason"]


def test_the_table_is_for_people(model: Path, capsys: Captured) -> None:
    printed = told(capsys, "bench", model, *TINY, "--memory", "30%,60%")
    assert printed.count("fastest in ") == 2 == printed.count("expertly-ahead ")
    assert printed.count("1.00x (1.00 to 1.00x)") >= 2


def test_a_system_that_fails_is_a_row_with_its_reason_and_the_others_go_on(
    model: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Before it runs, or half way."""
    play = bench.answer

    def breaking(model: Any, *words: Any) -> Any:
        if loads[-1] == "expertly" and loads.count("expertly") > 1:  # in the second round
            raise MemoryError("all is full")
        return play(model, *words)

    monkeypatch.setattr(bench, "answer", breaking)
    words = ("bench", model, *TINY, "--memory", "50%", "--system", "promoe,resident")
    rows = {row["system"]: row for row in answer(capsys, *words, code=2)["rows"]}
    assert "needs" in rows["resident"]["reason"] and rows["promoe"]["reason"] and rows["promoe"]["tpot_s"] is None
    assert rows["expertly"]["reason"] == "MemoryError: all is full" and rows["expertly"]["ratio"] is None
    assert rows["lru"]["ratio"] == 1 and rows["expertly-ahead"]["ratio"] > 0
    assert main([*map(str, words)]) == 2
    assert f"resident failed in 50%: {rows['resident']['reason']}" in capsys.readouterr().out


def test_a_system_that_changes_tokens_is_an_error(
    model: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    play = bench.answer

    def lying(model: Any, *words: Any) -> Any:
        tokens, times = play(model, *words)
        return ((*tokens[:-1], tokens[-1] + 1) if loads[-1] == "expertly" else tokens), times

    monkeypatch.setattr(bench, "answer", lying)
    assert main(["bench", str(model), *map(str, TINY)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "expertly answers the prompt in line 1 differently from lru: token " in err


def test_what_cannot_be_saved_is_printed_all_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """A system that is no preset, for its name may name code; and somebody else's file in the place."""
    path = remembered_path(pack_cached(str(model)))
    path.unlink(missing_ok=True)
    best = bench.fastest
    monkeypatch.setattr(bench, "fastest", lambda rows: best(rows[-1:]))
    words = ("bench", str(model), *map(str, TINY), "--system", "lru:eviction=expertly.policies.lfu.LFU", "--save")
    assert main([*words]) == 0
    printed, said = capsys.readouterr()
    assert "fastest in " in printed and "is not saved; accepted: " in said and not path.exists()
    path.write_text("mine")
    assert main([*words, "--system", "lfu"]) == 2
    assert f"error: {path}: " in capsys.readouterr().err and path.read_text() == "mine"
