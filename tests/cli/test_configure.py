"""`expertly lab configure`: what it plans and prints; and what commands do with its plan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import expertly
from expertly.cli.main import main
from expertly.core.costs import Link
from expertly.core.geometry import DenseShape, LayerGeometry
from expertly.policies.allocation.moepic import LayerSplit, SplitPlan, read_plan, save_plan
from expertly.trace.reader import Trace
from expertly.trace.schema import TraceLayer
from tests.cli.asking import Captured, answer, refusal, told
from tests.cli.test_trace_record import write_prompts
from tests.sim.drive import make_trace, random_passes, sized, toy

LAYERS = (LayerGeometry(8, 2, 64, 256, 3, 2),) * 3
"""An expert is 96 KiB."""


@pytest.fixture
def hardware(tmp_path: Path) -> Path:
    """Loading an expert takes 49 us, more than a layer hides."""
    times = {"launch_ns": 1000, "layer_ns": 20000, "iteration_ns": 50000, "link": Link(2e9, 0, 0)}
    toy(name="slow", memory_nbytes_per_s=1e12, flops_per_s=1e15, **times).write(tmp_path / "slow.toml")
    return tmp_path / "slow.toml"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    passes = random_passes(0, LAYERS, 25, prompt=4, num_requests=4)
    dense = DenseShape(layer_nbytes=4096, head_nbytes=65536)
    return make_trace(tmp_path / "trace", passes, LAYERS, num_requests=4, dense=dense, is_full=True).folder


def configure(capsys: Captured, *words: object) -> dict[str, Any]:
    return answer(capsys, "lab", "configure", *words)


def said(capsys: Captured, *words: object) -> str:
    return told(capsys, "lab", "configure", *words)


def test_json_has_every_number(trace: Path, hardware: Path, capsys: Captured) -> None:
    found = configure(capsys, trace, "--hardware", hardware, "--memory", "40%,60%", "--segments", 4)
    assert (found["segments"], found["tokens"], found["requests"]) == (4, 100, 4)
    assert (found["model"], found["is_trace"], found["times"]) == ("toy", True, "profile slow")
    assert found["predicted_share"] == pytest.approx(2 / 3)
    assert found["timing"]["load_s"] == [pytest.approx(98304 / 2e9, abs=1e-9)] * 3
    assert [len(one["hits"]) for one in found["rates"]] == [9] * 3
    assert [one["accuracy"] for one in found["rates"]] == [[0, 0], [1, 1], [1, 1]]
    assert [one["memory"] for one in found["results"]] == ["40%", "60%"]
    for one in found["results"]:
        assert one["seconds"] > 0 and one["memory_bytes"] <= 24 * 98304 * 0.6
        assert one["exposed_s"] <= one["equal_budgets_exposed_s"] <= one["uniform_exposed_s"]
        assert 0 < one["exposed_s"] < one["uniform_exposed_s"], "what is chosen must be able to matter"
        layers = one["layers"]
        assert [layer["layer"] for layer in layers] == [0, 1, 2]
        assert sum(layer["budget_segments"] for layer in layers) == sum(one["kept_segments"])
        assert sum(layer["exposed_s"] for layer in layers) == pytest.approx(one["exposed_s"])
        assert sum(layer["uniform_exposed_s"] for layer in layers) == pytest.approx(one["uniform_exposed_s"])
        for number, layer in enumerate(layers):
            assert layer["kept_experts"] * layer["kept_segments"] <= layer["budget_segments"]
            assert layer["theta"] == layer["kept_segments"] / 4
            assert layer["hit_rate"] == found["rates"][number]["hits"][layer["kept_experts"]]
            assert 0 <= layer["loaded_experts"] <= 2 and layer["window_s"] > 0
    small, large = found["results"]
    assert large["exposed_s"] < small["exposed_s"]


def test_the_table_and_what_to_type(trace: Path, hardware: Path, tmp_path: Path, capsys: Captured) -> None:
    plan = tmp_path / "plan.json"
    text = said(capsys, trace, "--hardware", hardware, "--memory", "40%", "--segments", 2, "--out", plan)
    head, learned, times, _, memory, headers, _, *rows, exposed, equal, use = text.splitlines()
    assert head == "toy: 2.25 MiB of experts in 3 layers, P = 2" and times == "times: profile slow"
    assert learned == "learned from 100 decoded tokens of 4 requests"
    assert memory.startswith("memory 40% = ") and memory.endswith("experts kept")
    assert " ".join(headers.split()) == "layer budget keeps theta hits right window m uniform configured"
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "all"]
    assert max(map(len, text.splitlines()[:-1])) <= 80
    assert exposed.startswith("exposed a token, predicted: ") and exposed.endswith("less)")
    assert " uniform -> " in exposed and " configured (" in exposed and "equal budgets" in equal
    typed = f"--system moepic --memory 40% --plan {plan} --segments 2 --hardware {hardware}"
    assert use == f"use it: expertly lab simulate {trace} {typed}"
    assert "save it with --out FILE" in said(capsys, trace, "--hardware", hardware, "--memory", "40%")


def test_the_plan_is_the_one_that_is_shown(trace: Path, hardware: Path, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "plan.json"
    found = configure(capsys, trace, "--hardware", hardware, "--memory", "40%", "--segments", 4, "--out", path)
    plan = read_plan(path)
    shown = [
        (one["kept_experts"], one["kept_segments"], one["budget_segments"]) for one in found["results"][0]["layers"]
    ]
    assert [(one.kept_experts, one.kept_segments, one.budget_segments) for one in plan.layers] == shown
    about = json.loads(path.read_text())["about"]
    assert about["model"] == "toy" and about["memory"] == "40%"
    assert about["exposed_ms"] == pytest.approx(found["results"][0]["exposed_s"] * 1e3, abs=1e-6)
    assert about["exposed_ms"] < about["exposed_ms_uniform"]


def test_a_split_learns_from_its_first_part(trace: Path, capsys: Captured) -> None:
    found = configure(capsys, trace, "--split", "1:1", "--seed", 3)
    assert (found["requests"], found["tokens"], found["split"]) == (2, 50, "1:1")
    assert "--split 1:1" in found["results"][0]["command"] and "--seed 3" in found["results"][0]["command"]
    assert configure(capsys, trace, "--tokens", 14)["tokens"] == 10, "4 of them are the prompt's"


def test_a_trace_without_lookahead_and_sizes(tmp_path: Path, capsys: Captured) -> None:
    """As imported traces are: H alone is known, and sizes are asked for."""
    layers = [TraceLayer(32, 4)] * 24
    bare = make_trace(tmp_path / "bare", random_passes(0, layers, 12), layers).folder
    assert "does not know its experts' sizes; give --geometry NAME" in refusal(capsys, "lab", "configure", bare)
    found = configure(capsys, bare, "--geometry", "gpt-oss-20b")
    assert found["predicted_share"] == 0 and "the trace has no lookahead" in found["notes"][0]
    assert all(layer["predicted_rate"] == 0 < layer["hit_rate"] for layer in found["results"][0]["layers"])
    assert found["results"][0]["command"].endswith("--geometry gpt-oss-20b")
    assert "nothing counts as predicted" in said(capsys, bare, "--geometry", "gpt-oss-20b").splitlines()[-1]


def test_a_model_is_run_and_measured(model: Path, tmp_path: Path, capsys: Captured) -> None:
    plan = tmp_path / "plan.json"
    found = configure(
        capsys, model, "--memory", "60%", "--segments", 4, "--tokens", 12, "--prompt", "Once upon", "--prompt", "def f",
        "--seconds", 0, "--out", plan,
    )  # fmt: skip
    assert (found["requests"], found["tokens"], found["is_trace"]) == (2, 12, False)
    assert found["times"] == "measured here, on cpu, with memory 60%"
    assert found["predicted_share"] == 1, "its routers can be asked ahead, the first one by the token before"
    assert min(*found["timing"]["attention_s"], *found["timing"]["moe_s"], *found["timing"]["load_s"]) > 0
    assert read_plan(plan).geometry.segments_per_expert == 4
    command = found["results"][0]["command"]
    assert command.startswith(f"expertly run {model} 'Once upon a time' --system moepic --memory 60% --plan ")


def test_prompts_are_put_by_the_models_chat_template(model: Path, tmp_path: Path, capsys: Captured) -> None:
    chatty = Path(shutil.copytree(model, tmp_path / "chatty"))
    (chatty / "chat_template.jinja").write_text("{{ raise_exception('no ' + messages[0]['content']) }}")
    words = ("lab", "configure", chatty, "--prompt", "Hello", "--tokens", 4, "--hardware", "rtx3090")
    assert "the model's chat template refuses them: no Hello" in refusal(capsys, *words)
    assert answer(capsys, *words, "--raw")["tokens"] == 4


PLANNED = sized(3, 8, 2)
PROMPT = "Once upon a time"


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    passes = random_passes(0, PLANNED, 25, num_requests=4)
    return make_trace(tmp_path / "trace", passes, PLANNED, num_requests=4, is_full=True).folder


@pytest.fixture
def plan(planned: Path, tmp_path: Path, capsys: Captured) -> Path:
    path = tmp_path / "plan.json"
    answer(capsys, "lab", "configure", planned, "--memory", "40%", "--segments", 4, "--out", path)
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


def test_simulate_begins_with_the_plan(planned: Path, plan: Path, capsys: Captured) -> None:
    systems = "moepic,moepic:allocation=split,lru"
    words = ("--system", systems, "--memory", "40%", "--segments", 4, "--tokens", 40)  # none is worked out by then
    without, given = (
        {row["system"]: row for row in answer(capsys, "lab", "simulate", planned, *words, *more)["results"]}
        for more in ((), ("--plan", plan))
    )
    for name in systems.split(",")[:2]:
        assert given[name]["allocation"]["split"] == splits_of(plan) != without[name]["allocation"]["split"]
        assert given[name]["memory_bytes"] == without[name]["memory_bytes"]
        assert given[name]["tpot_s"] != without[name]["tpot_s"]
    assert given["lru"] == without["lru"], "it has no use for one"


def test_refusals_of_simulate(planned: Path, plan: Path, tmp_path: Path, capsys: Captured) -> None:
    given, missing = ("lab", "simulate", planned, "--plan"), tmp_path / "missing.json"
    for words, error in {
        "lru,fmoe --segments 4": "no system of lru, fmoe begins with a plan",
        "moepic --segments 2": "plan field segments_per_expert=4: must be 2, as it runs",
        "moepic --segments 4 --memory 20%": "must be at most the",
        "moepic:allocation=split:theta=0.25 --segments 4": "says theta, as a plan does of every layer",
    }.items():
        assert error in refusal(capsys, *given, plan, "--system", *words.split()), words
    assert refusal(capsys, *given, missing, "--system", "moepic") == f"{missing}: no such file"


def test_generate_begins_with_the_plan_and_changes_no_token(model: Path, uneven: Path, capsys: Captured) -> None:
    words = ("generate", model, "--prompt", PROMPT, "--max-new-tokens", 8, "--memory", "60%", "--system")
    found = answer(capsys, *words, "moepic", "--segments", 4, "--plan", uneven)
    assert found["allocation"]["split"] == splits_of(uneven)
    assert found["token_ids"] == answer(capsys, *words, "lru")["token_ids"]


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
