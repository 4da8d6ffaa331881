"""`expertly lab configure`: what it plans, what it prints, what it refuses; and what `--plan` does with
it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from expertly.core.geometry import DenseShape, LayerGeometry
from expertly.policies.allocation.moepic import read_plan
from expertly.trace.schema import TraceLayer
from tests.cli.asking import Captured, answer, refusal, told
from tests.sim.drive import make_trace, random_passes
from tests.test_architecture import run_without_torch

LAYERS = (LayerGeometry(8, 2, 64, 256, 3, 2),) * 3
"""An expert is 96 KiB."""

SLOW = """name = "slow"
memory_nbytes_per_s = 1e12
flops_per_s = 1e15
efficiency = 1.0
launch_ns = 1000
layer_ns = 20000
iteration_ns = 50000

[link]
nbytes_per_s = 2e9
latency_ns = 0
overhead_ns = 0
"""


@pytest.fixture
def hardware(tmp_path: Path) -> Path:
    """Loading an expert takes 49 us, more than a layer hides."""
    path = tmp_path / "slow.toml"
    path.write_text(SLOW)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    passes = random_passes(0, LAYERS, 25, prompt=4, num_requests=4)
    dense = DenseShape(layer_nbytes=4096, head_nbytes=65536)
    return make_trace(tmp_path / "trace", passes, LAYERS, num_requests=4, dense=dense, is_full=True).folder


def configure(capsys: Captured, *words: object) -> dict[str, Any]:
    return answer(capsys, "lab", "configure", *words)


def said(capsys: Captured, *words: object) -> str:
    return told(capsys, "lab", "configure", *words)


def error_of(capsys: Captured, *words: object) -> str:
    return refusal(capsys, *words)


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
    assert "does not know its experts' sizes; give --geometry NAME" in error_of(capsys, "lab", "configure", bare)
    found = configure(capsys, bare, "--geometry", "gpt-oss-20b")
    assert found["predicted_share"] == 0 and "the trace has no lookahead" in found["notes"][0]
    assert all(layer["predicted_rate"] == 0 < layer["hit_rate"] for layer in found["results"][0]["layers"])
    assert found["results"][0]["command"].endswith("--geometry gpt-oss-20b")
    assert "nothing counts as predicted" in said(capsys, bare, "--geometry", "gpt-oss-20b").splitlines()[-1]


def test_refusals_of_a_trace(trace: Path, tmp_path: Path, capsys: Captured) -> None:
    for arguments, error in {
        ("--memory", "1%"): "below the staging slots through which experts are streamed",
        ("--memory", "auto"): "there is no machine to ask",
        ("--memory", "10%,"): "must be one or more, with commas between",
        ("--segments", "7"): "must divide the experts' intermediate size 256",
        ("--zeta", "1"): "must be above 0 and below 1",
        ("--seed", "1"): "shuffles for --split, which is not given",
        ("--prompt", "hello"): "only of a model, and this is a trace",
        ("--seconds", "1"): "only of a model, and this is a trace",
        ("--total-memory", "1GiB"): "only of a model, and this is a trace",
        ("--raw",): "only of a model, and this is a trace",
        ("--hardware", "none-such"): "no such profile and no such file",
        ("--out", str(tmp_path / "no" / "plan.json")): "must be a file, in a folder that exists and is writable",
        ("--out", "plan.json", "--memory", "40%,60%"): "holds the plan of one memory",
    }.items():
        assert error in error_of(capsys, "lab", "configure", trace, *arguments), arguments
    assert not (tmp_path / "plan.json").exists()


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


def test_refusals_of_a_model(model: Path, capsys: Captured) -> None:
    for arguments, error in {
        ("--geometry", "gpt-oss-20b"): "only of a trace, and this is a model",
        ("--split", "7:3"): "only of a trace, and this is a model",
        ("--memory", "auto,25%"): "'auto' is what is free here",
        ("--seconds", "2", "--hardware", "rtx3090"): "nothing is measured",
        ("--memory", "1%"): "below the staging slots",
        ("--prompt", ""): "gives 0 tokens; write at least one word",
        ("--prompt", "caf\udce9"): "must be UTF-8",
        ("--memory", "100%", "--seconds", "0", "--tokens", "4"): "or name a profile of this machine (--hardware)",
    }.items():
        assert error in error_of(capsys, "lab", "configure", model, *arguments), arguments


def test_of_a_trace_it_needs_no_torch(trace: Path) -> None:
    done = run_without_torch(
        f"from expertly.cli.main import main\nsys.exit(main(['lab', 'configure', {str(trace)!r}, '--memory', '40%']))"
    )
    assert done.returncode == 0, done.stderr
    assert "exposed a token" in done.stdout
