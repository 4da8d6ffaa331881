"""`expertly lab simulate`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertly.scheduler import systems
from lab.tests.sim.drive import make_trace, random_passes, sized
from tests.cli.asking import Captured, answer, refusal, told

KEYS = {
    "system", "memory", "memory_bytes", "segments", "hit_rate", "partial_hit_rate", "byte_hit_rate",
    "prediction_accuracy", "fetch_rate", "goodpred", "coverage", "accuracy", "timeliness", "stall_share", "ttft_s",
    "tpot_s", "floor_tpot_s", "bytes_loaded", "skipped", "recall", "prefetched_bytes", "wasted_bytes", "history",
    "predictor", "layers",
}  # fmt: skip
RATES = ("hit_rate", "partial_hit_rate", "byte_hit_rate")
BOUNDS = ["belady", "belady-global", "oracle", "resident"]
LAYERS = sized(2, 8, 2)
CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0,3,5\n2023-11-16 18:00:00.001,30,4\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two categories, four requests of a prompt of 4 tokens and 10 passes, sizes known."""
    passes = random_passes(0, LAYERS, 10, prompt=4, num_requests=4)
    return make_trace(tmp_path / "trace", passes, LAYERS, num_requests=4, categories=["a", "b"] * 2).folder


def simulate(capsys: Captured, *words: object) -> dict[str, Any]:
    return answer(capsys, "lab", "simulate", *words)


def table(capsys: Captured, *words: object) -> str:
    return told(capsys, "lab", "simulate", *words)


def error_of(capsys: Captured, *words: object) -> str:
    return refusal(capsys, "lab", "simulate", *words)


def test_json_has_the_promised_keys(trace: Path, capsys: Captured) -> None:
    result = simulate(capsys, trace, "--system", "lru,lfu", "--memory", "30%,60%", "--segments", 2)
    assert {"trace", "hardware", "results"} <= result.keys()
    assert result["trace"]["model"] == "toy" and result["hardware"]["name"]
    rows = result["results"]
    assert [(row["memory"], row["system"]) for row in rows] == [
        (memory, system) for memory in ("30%", "60%") for system in ("lru", "lfu", *BOUNDS)
    ]
    for row in rows:
        assert row.keys() >= KEYS
        assert row["segments"] == 2 and row["skipped"] is None
        for key in (*RATES, "stall_share", "ttft_s", "tpot_s", "floor_tpot_s", "memory_bytes", "bytes_loaded"):
            assert row[key] is not None, key
        assert all(0 <= row[key] <= 1 for key in (*RATES, "stall_share"))
        assert (row["prediction_accuracy"] is not None) == (row["system"] == "oracle")
    assert [row["memory_bytes"] for row in rows if row["system"] == "lru"] == [216, 456], "whole slots of 24 bytes"
    assert all(row["memory_bytes"] == 768 for row in rows if row["system"] == "resident")


def test_null_where_the_trace_cannot_say(bare: Path, capsys: Captured) -> None:
    result = simulate(capsys, bare, "--memory", "40%", "--segments", 4)
    assert result["trace"]["geometry"] is result["trace"]["expert_bytes"] is None
    for row in result["results"]:
        for key in ("stall_share", "ttft_s", "tpot_s", "floor_tpot_s", "bytes_loaded", "memory_bytes"):
            assert row[key] is None, key
        assert row["hit_rate"] is not None
    assert any("sizes" in note for note in result["notes"])


def geometry_file(folder: Path, **changes: Any) -> Path:
    sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 4, "intermediate_size": 200, "num_matrices": 3, "itemsize": 2}
    lines = ['name = "mine"', f"num_layers = {changes.pop('num_layers', 2)}", "[layer]"]
    lines += [f"{name} = {value}" for name, value in (sizes | changes).items()]
    path = folder / "mine.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_experts_per_layer(trace: Path, capsys: Captured) -> None:
    rows = simulate(capsys, trace, "--experts-per-layer", "0,4,8", "--system", "lru")["results"]
    lru = [row for row in rows if row["system"] == "lru"]
    assert [row["memory"] for row in lru] == ["0/layer", "4/layer", "8/layer"]
    assert [row["memory_bytes"] for row in lru] == [2 * 48, (8 + 2) * 48, (16 + 2) * 48], "and 2 staging slots"
    assert lru[0]["hit_rate"] == 0 and lru[0]["hit_rate"] < lru[1]["hit_rate"] < lru[2]["hit_rate"]


def test_bounds_asked_for_come_once_and_belady_takes_the_scope(trace: Path, capsys: Captured) -> None:
    rows = simulate(capsys, trace, "--system", "oracle,lru", "--memory", "40%")["results"]
    assert [row["system"] for row in rows] == ["oracle", "lru", "belady", "belady-global", "resident"]
    assert {row["system"]: row["scope"] for row in rows}["belady"] == "layer"
    rows = simulate(capsys, trace, "--system", "on-demand", "--memory", "40%")["results"]
    of = {row["system"]: row for row in rows}
    assert of["belady"]["scope"] == "global"
    assert of["belady"]["bytes_loaded"] == of["belady-global"]["bytes_loaded"]


def test_a_system_that_needs_what_the_trace_lacks_is_skipped(
    trace: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = replace(systems.SYSTEMS["lru"], name="clairvoyant", needs=("lookahead", "experts"))
    monkeypatch.setitem(systems.SYSTEMS.built_in, "clairvoyant", fake)
    rows = simulate(capsys, trace, "--system", "clairvoyant,lru", "--memory", "40%")["results"]
    assert [row["system"] for row in rows] == ["clairvoyant", "lru", *BOUNDS]
    skipped = rows[0]
    assert "needs lookahead, which this trace lacks (it has request," in skipped["skipped"]
    assert "clairvoyant" in skipped["skipped"]
    nothing = KEYS - {"system", "memory", "segments", "skipped"}
    assert all(skipped[key] is None for key in nothing)
    printed = table(capsys, trace, "--system", "clairvoyant,lru", "--memory", "40%,60%")
    assert printed.count("needs lookahead") == 1 and printed.count("clairvoyant  ") == 2


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """As recorded with `--full`: six requests."""
    passes = random_passes(0, LAYERS, 10, prompt=4, num_requests=6)
    return make_trace(tmp_path / "full", passes, LAYERS, num_requests=6, is_full=True).folder


def test_systems_made_of_parts_are_rows_like_others(full: Path, tmp_path: Path, capsys: Captured) -> None:
    names = ["fmoe", "fmoe:distance=2:select=top-k", "lru:prediction=lookahead"]
    options = ("--memory", "40%,60%", "--split", "2:1")
    result = simulate(capsys, full, "--system", ",".join(names), *options, "--plot", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert [row["system"] for row in result["results"]] == [*names, *BOUNDS] * 2
    for row in result["results"]:
        if row["system"].startswith("fmoe"):
            assert row["history"] == "filled from 4 requests" and row["predictor"]["maps"] == 4 * 14 + 2 * 14
    text = table(capsys, full, "--system", ",".join(names), *options)
    assert max(map(len, text.splitlines())) <= 120
    assert "fmoe:distance=2:select=top-k" in text


def test_systems_of_several_segments_are_told_apart(trace: Path, capsys: Captured) -> None:
    lines = table(capsys, trace, "--system", "lru,lru:segments=2", "--memory", "40%").splitlines()
    assert "P = 1, 2, on" in lines[0] and lines[2].split()[:3] == ["memory", "system", "P"]
    rows = [line.removeprefix("40%").split()[:2] for line in lines[3:] if line.strip()][1:]
    assert rows[:10] == [
        ["lru", "1"], ["lru:segments=2", "2"], *([name, cut] for cut in "12" for name in BOUNDS)
    ]  # fmt: skip


def test_what_stands_for_what_a_trace_does_not_know_is_said(trace: Path, capsys: Captured) -> None:
    text = table(capsys, trace, "--system", "fmoe", "--memory", "40%")
    assert "the chosen experts' weights only" in text and "the trace has no embeddings" in text
    assert "embeddings" not in table(capsys, trace, "--system", "fmoe:semantic=no", "--memory", "40%")


def test_arrivals_queue_and_say_what_was_cut(trace: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "azure.csv").write_text(CSV)
    arguments = (trace, "--arrivals", tmp_path / "azure.csv", "--memory", "50%")
    result = simulate(capsys, *arguments)
    assert any(note.startswith("2 requests arrive") for note in result["notes"])
    assert any(note.startswith("1 of them") for note in result["notes"])
    for row in result["results"]:
        assert row["tokens"] == (3 + 4) + (4 + 3) and len(row["latency_s"]["sorted"]) == 2
        assert row["latency_s"]["p50"] <= row["latency_s"]["p99"] == row["latency_s"]["max"]
    printed = table(capsys, *arguments)
    assert "latency p50" in printed


def test_the_table_fits_a_terminal(trace: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "azure.csv").write_text(CSV)
    arguments = ("--system", "lru,modelled-lookahead", "--segments", 2, "--arrivals", tmp_path / "azure.csv")
    printed = table(capsys, trace, "--memory", "20%,50%", *arguments)
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[0] == "toy: 2 layers of 8 experts, top-2, 768 B of experts; P = 2, on rtx3090"
    for word in ("hit rate", "partial", "stall", "TTFT", "TPOT", "of floor", "loaded", "latency p50", "p99"):
        assert word in lines[2]
    below = next(line for line in lines if "goodpred" in line)
    assert all(word in below for word in ("predictions right", "coverage", "accuracy", "in time"))
    assert sum(line.lstrip("25%0 ").startswith("modelled-lookahead  ") for line in lines) == 4, (
        "two budgets, two tables"
    )
    assert sum(line.startswith("20%") for line in lines) == 2, "a budget is named once in a table"
    assert any("modelled-lookahead: its predictions are made from the future" in line for line in lines)
    plain = table(capsys, trace, "--memory", "50%")
    assert "coverage" not in plain and "partial" not in plain and "latency" not in plain


def test_a_partial_recording_runs_up_to_where_it_goes(trace: Path, tmp_path: Path, capsys: Captured) -> None:
    manifest = json.loads((trace / "manifest.json").read_text())
    (trace / "manifest.json").write_text(json.dumps(manifest | {"complete": False}))
    result = simulate(capsys, trace, "--memory", "50%")
    assert not result["trace"]["complete"] and any("cut off" in note for note in result["notes"])


def test_not_a_trace(tmp_path: Path, capsys: Captured) -> None:
    assert "manifest.json" in error_of(capsys, tmp_path / "nothing")
    empty = make_trace(tmp_path / "empty", [], LAYERS)
    assert f"trace='{empty.folder}': empty" in error_of(capsys, empty.folder)
    damaged = make_trace(tmp_path / "damaged", random_passes(0, LAYERS, 9), LAYERS).folder
    shard = next(damaged.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-9])
    assert shard.name in error_of(capsys, damaged)


def test_without_sizes_only_shares_make_sense(bare: Path, tmp_path: Path, capsys: Captured) -> None:
    assert "memory='1GiB': the trace does not know its experts' sizes" in error_of(capsys, bare, "--memory", "1GiB")
    assert "chrome_trace: the trace does not know" in error_of(capsys, bare, "--chrome-trace", tmp_path / "out.json")
    assert not list(tmp_path.glob("out.json*"))
    geometry = geometry_file(tmp_path)
    rows = simulate(capsys, bare, "--memory", "20KiB", "--geometry", geometry)["results"]
    assert rows[0]["memory"] == "20KiB" and 0 < rows[0]["memory_bytes"] <= 20 << 10
    wrong = geometry_file(tmp_path, num_experts=16)
    assert "2 layers of 16 experts, top-2, but" in error_of(capsys, bare, "--geometry", wrong)
