"""`--plan`: what `simulate`, `generate` and `trace record` do with what `expertly lab configure` saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import expertly
from expertly.cli.main import main
from expertly.policies.allocation.moepic import LayerSplit, SplitPlan, read_plan, save_plan
from expertly.trace.reader import Trace
from tests.cli.asking import Captured, refusal
from tests.cli.test_trace_record import write_prompts
from tests.sim.drive import make_trace, random_passes, sized

LAYERS = sized(3, 8, 2)
PROMPT = "Once upon a time"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    passes = random_passes(0, LAYERS, 25, num_requests=4)
    return make_trace(tmp_path / "trace", passes, LAYERS, num_requests=4, is_full=True).folder


@pytest.fixture
def plan(trace: Path, tmp_path: Path, capsys: Captured) -> Path:
    path = tmp_path / "plan.json"
    assert main(["lab", "configure", str(trace), "--memory", "40%", "--segments", "4", "--out", str(path)]) == 0
    capsys.readouterr()
    return path


@pytest.fixture
def uneven(model: Path, tmp_path: Path) -> Path:
    """What nobody would configure: of layer 0 nothing, of layer 1 a quarter of some, of layer 2 three quarters."""
    loaded, _ = expertly.load(str(model), memory="60%", segments=4)
    geometry = loaded._expertly_handle.engine.executor.geometry
    expertly.unload(loaded)
    splits = (LayerSplit(0, 0, 0), LayerSplit(3, 1, 4), LayerSplit(2, 3, 6))
    path = tmp_path / "plan.json"
    save_plan(path, SplitPlan(geometry, splits), {})
    return path


def splits_of(plan: Path) -> list[dict[str, float]]:
    """As results show them: as many tops as a budget holds; of a layer that keeps nothing, no part."""
    read = read_plan(plan)
    num = read.geometry.segments_per_expert
    tops = [one.kept_segments or num for one in read.layers]
    return [
        {"kept_experts": one.budget_segments // top, "theta": top / num}
        for one, top in zip(read.layers, tops, strict=True)
    ]


def rows_of(capsys: Captured, *arguments: object) -> dict[str, dict[str, Any]]:
    assert main(["lab", "simulate", *map(str, arguments), "--json"]) == 0
    out, _ = capsys.readouterr()
    return {row["system"]: row for row in json.loads(out)["results"]}


def test_simulate_begins_with_the_plan(trace: Path, plan: Path, capsys: Captured) -> None:
    systems = "moepic,moepic:allocation=split,lru"
    settings = ("--system", systems, "--memory", "40%", "--segments", 4, "--tokens", 40)  # none is worked out by then
    without = rows_of(capsys, trace, *settings)
    given = rows_of(capsys, trace, *settings, "--plan", plan)
    for name in systems.split(",")[:2]:
        assert given[name]["allocation"]["split"] == splits_of(plan) != without[name]["allocation"]["split"]
        assert given[name]["memory_bytes"] == without[name]["memory_bytes"]
        assert given[name]["tpot_s"] != without[name]["tpot_s"]
    assert given["lru"] == without["lru"], "it has no use for one"


def test_refusals_of_simulate(trace: Path, plan: Path, tmp_path: Path, capsys: Captured) -> None:
    for arguments, error in {
        ("--system", "lru,fmoe", "--segments", "4"): "no system of lru, fmoe begins with a plan",
        ("--system", "moepic", "--segments", "2"): "plan field segments_per_expert=4: must be 2, as it runs",
        ("--system", "moepic", "--segments", "4", "--memory", "20%"): "must be at most the",
        (
            "--system",
            "moepic:allocation=split:theta=0.25",
            "--segments",
            "4",
        ): "says theta, as a plan does of every layer",
    }.items():
        assert error in refusal(capsys, "lab", "simulate", trace, "--plan", plan, *arguments), arguments
    missing = tmp_path / "missing.json"
    assert (
        refusal(capsys, "lab", "simulate", trace, "--system", "moepic", "--plan", missing) == f"{missing}: no such file"
    )


def test_generate_begins_with_the_plan_and_changes_no_token(model: Path, uneven: Path, capsys: Captured) -> None:
    arguments = ["generate", str(model), "--prompt", PROMPT, "--max-new-tokens", "8", "--memory", "60%", "--json"]
    assert main([*arguments, "--system", "moepic", "--segments", "4", "--plan", str(uneven)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["allocation"]["split"] == splits_of(uneven)
    assert main([*arguments, "--system", "lru"]) == 0
    assert found["token_ids"] == json.loads(capsys.readouterr().out)["token_ids"]


def test_recorded_decisions_replay_with_their_plan(model: Path, uneven: Path, tmp_path: Path, capsys: Captured) -> None:
    out, decisions = tmp_path / "trace", tmp_path / "decisions"
    prompts = write_prompts(tmp_path / "prompts.jsonl", (PROMPT, None))
    settings = ["--memory", "60%", "--system", "moepic:tau=3", "--segments", "4", "--predict", "inline"]
    assert main(
        ["lab", "trace", "record", str(model), "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "6",
         *settings, "--plan", str(uneven), "--decisions", str(decisions)]
    ) == 0  # fmt: skip
    assert Trace.open(out).num_rows
    assert main(["lab", "trace", "replay", str(decisions)]) == 0
    capsys.readouterr()
    header = json.loads(decisions.read_text().splitlines()[0])
    assert SplitPlan.from_dict(header["plan"]) == read_plan(uneven)
