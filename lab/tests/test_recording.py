"""What is recorded, in every family, against the model's own weights and what its experts modules are called with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import expertly
from expertly.api import handle
from expertly.core.errors import ModelUseError, TraceError
from expertly.core.observation import IterationInfo
from expertly.model.hooks import experts_modules
from expertly_lab.recording import Recording, record
from expertly_lab.trace.reader import Trace
from expertly_lab.trace.schema import NO_EXPERT, TraceLayer
from tests.engine.conftest import Cases
from tests.engine.observe import Call, loaded, recording
from tests.families import FAMILIES, generate, load_reference

NUM_NEW = 6


@pytest.fixture
def model(cases: Cases) -> Iterator[Any]:
    with loaded(cases["qwen3_moe"].store) as result:
        yield result


def run_recorded(model: Any, folder: Path, prompt: list[int]) -> tuple[list[int], Trace]:
    """Record one request; its new tokens and the trace."""
    with record(model, folder) as recorder:
        recorder.begin_request("some", "text", len(prompt))
        (tokens,) = generate(model, [prompt], NUM_NEW)
    return tokens, Trace.open(folder)


def column(trace: Trace, field: str) -> Any:
    return trace.rows(field, 0, trace.num_rows)


def rows_of(calls: list[Call], num_layers: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, weights), [rows, L, K] each, of all calls in order."""
    assert len(calls) % num_layers == 0
    passes = [calls[i : i + num_layers] for i in range(0, len(calls), num_layers)]
    index = [torch.stack([call.index for call in each], 1) for each in passes]
    weights = [torch.stack([call.weights for call in each], 1) for each in passes]
    return torch.cat(index).numpy(), torch.cat(weights).float().numpy()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "lfm2_moe", "jamba", "ernie4_5_moe"])
def test_rows_are_what_the_unmodified_models_experts_receive(family: str, cases: Cases, tmp_path: Path) -> None:
    case = cases[family]
    prompt = case.prompts[0]
    reference = load_reference(case.folder)
    with recording(reference) as seen:
        (expected,) = generate(reference, [prompt], NUM_NEW)
    with loaded(case.store) as model:
        layers = handle(model).store.manifest.layers
        tokens, trace = run_recorded(model, tmp_path / "trace", prompt)
    assert tokens == expected
    experts, weights = rows_of(seen.calls, len(layers))
    assert np.array_equal(column(trace, "experts"), experts), "in the router's order"
    assert np.abs(column(trace, "weights").astype(np.float32) - weights).max() < 2e-3
    assert column(trace, "token").tolist() == prompt + tokens[:-1]
    assert column(trace, "is_prefill").tolist() == [True] * len(prompt) + [False] * (NUM_NEW - 1)
    assert column(trace, "iteration").tolist() == [0] * len(prompt) + list(range(1, NUM_NEW))
    (request,) = trace.requests
    assert (request.category, request.prompt, request.num_prompt_tokens) == ("some", "text", len(prompt))
    assert trace.is_complete
    assert [layer.geometry() for layer in trace.manifest.layers] == list(layers)
    assert trace.manifest.dense is not None and trace.manifest.dense.layer_nbytes > 0


def test_a_batch_leaves_pads_out_and_names_the_request_of_each_row(cases: Cases, tmp_path: Path, model: Any) -> None:
    case = cases["qwen3_moe"]
    reference = load_reference(case.folder)
    with recording(reference) as seen:
        tokens = generate(reference, case.prompts, 3)
    with record(model, tmp_path / "trace") as recorder:
        numbers = [recorder.begin_request(num_prompt_tokens=len(prompt)) for prompt in case.prompts]
        recorder.begin_batch(numbers)
        assert generate(model, case.prompts, 3) == tokens
    trace = Trace.open(tmp_path / "trace")
    first, second = map(len, case.prompts)
    assert first > second
    is_real = np.array([True] * first + [False] * (first - second) + [True] * (second + 4))
    experts, _ = rows_of(seen.calls, 3)
    assert np.array_equal(column(trace, "experts"), experts[is_real])
    assert column(trace, "request").tolist() == [0] * first + [1] * second + [0, 1] * 2
    assert column(trace, "token").tolist() == [
        *case.prompts[0], *case.prompts[1], tokens[0][0], tokens[1][0], tokens[0][1], tokens[1][1],
    ]  # fmt: skip
    assert [request.has_own_iterations for request in trace.requests] == [False, False]


def test_recording_twice_gives_the_same_bytes(cases: Cases, tmp_path: Path) -> None:
    case = cases["qwen3_moe"]
    for name in ("first", "second"):
        with loaded(case.store) as model, record(model, tmp_path / name, full=True) as recorder:
            for prompt in case.prompts:
                recorder.begin_request()
                generate(model, [prompt], NUM_NEW)
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert "rows-00000.safetensors" in names
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_a_pass_that_fails_is_left_out_and_the_next_is_recorded(cases: Cases, tmp_path: Path, model: Any) -> None:
    prompt = cases["qwen3_moe"].prompts[0]
    with record(model, tmp_path / "trace") as recorder:
        recorder.begin_request()
        failing = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="half-way"):
            generate(model, [prompt], NUM_NEW)
        assert recorder.writer.num_rows == 0
        failing.remove()
        generate(model, [prompt], 2)
        assert (recorder.writer.num_iterations, recorder.writer.num_rows) == (2, len(prompt) + 1)
    with pytest.raises(TraceError, match="2 sequences, but 1 requests"), record(model, tmp_path / "other") as recorder:
        recorder.begin_batch([recorder.begin_request()])
        generate(model, cases["qwen3_moe"].prompts, 2)
    assert not Trace.open(tmp_path / "other").is_complete
    assert_untouched(model)


def fail(*_: Any) -> None:
    raise RuntimeError("half-way through the pass")


def assert_untouched(model: Any) -> None:
    assert handle(model).engine.observer is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_cannot_be_recorded_changes_nothing(cases: Cases, tmp_path: Path, model: Any) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(TraceError, match="used: not empty"), record(model, tmp_path / "used", full=True):
        pass
    assert_untouched(model)
    with (
        record(model, tmp_path / "one"),
        pytest.raises(ModelUseError, match="recorded already"),
        record(model, tmp_path / "two"),
    ):
        pass
    assert not (tmp_path / "two").exists()
    assert_untouched(model)
    stats = expertly.stats(model).as_dict()
    assert stats["bytes_loaded"] == 0, "looking for routers loads no expert"
    assert generate(model, cases["qwen3_moe"].prompts) == cases["qwen3_moe"].tokens


def test_the_counters_do_not_see_the_recorder(cases: Cases, tmp_path: Path) -> None:
    case = cases["qwen3_moe"]
    counted = []
    for is_recorded in (False, True):
        with loaded(case.store) as model:
            if is_recorded:
                run_recorded(model, tmp_path / "trace", case.prompts[0])
            else:
                generate(model, [case.prompts[0]], NUM_NEW)
            stats = expertly.stats(model).as_dict()
            counted.append({key: value for key, value in stats["phases"]["decode"].items() if not key.endswith("_s")})
            counted[-1]["bytes_loaded"] = stats["bytes_loaded"]
    assert counted[0] == counted[1]


def test_a_recorder_sees_the_routers_beside_a_predictor_that_programs_tell(cases: Cases, tmp_path: Path) -> None:
    """Before it, with it and after it, in one model whose layers run by themselves where nobody looks."""
    case, traces = cases["qwen3_moe"], []
    for system in ("lru", "lru:prediction=lookahead"):
        with loaded(case.store, system=system, memory="90%") as model:
            for _ in range(2):
                assert generate(model, case.prompts[:1]) == case.tokens[:1]
            asked = expertly.stats(model).as_dict()["kernels"]["programs"]
            with record(model, tmp_path / system, full=True) as recorder:
                recorder.begin_request("some", "text", len(case.prompts[0]))
                assert generate(model, case.prompts[:1]) == case.tokens[:1]
            assert generate(model, case.prompts[:1]) == case.tokens[:1]
            assert asked > 0
        traces.append(Trace.open(tmp_path / system))
    for field in ("experts", "weights", "probs", "router_inputs", "lookahead"):
        assert np.array_equal(column(traces[0], field), column(traces[1], field)), field


def test_every_expert_of_a_layer_whose_top_k_differs(tmp_path: Path) -> None:
    """Layers of other widths share a row: what a layer does not choose is NO_EXPERT, ids that are none as well."""
    taken: list[dict[str, Any]] = []
    layers = [TraceLayer(8, 2), TraceLayer(4, 3), TraceLayer(8, 2)]
    writer: Any = SimpleNamespace(append=lambda rows: taken.append(dict(rows)))
    recorder = Recording(writer, layers, None, {}, {})
    weights = torch.full((2, 3), 0.25, dtype=torch.bfloat16)
    info = IterationInfo(np.array([True, True]), None, 1, "prefill")
    for num_rows in (2, 1):  # a layer called with other rows than the pass has is none of its rows
        recorder.begin_iteration(info)
        recorder.router_ran(1, torch.zeros(2, 4), torch.tensor([[3, 0, 1], [2, 4, 0]]), weights)
        recorder.router_ran(0, torch.zeros(num_rows, 4), torch.tensor([[7, 0], [8, -1]])[:num_rows], weights[:, :2])
        recorder.end_iteration(True)
    none = NO_EXPERT
    assert taken[0]["experts"].tolist() == [
        [[7, 0, none], [3, 0, 1], [none] * 3],
        [[none, none, none], [2, none, 0], [none] * 3],
    ]
    assert taken[0]["weights"][0].tolist() == [[0.25, 0.25, 0], [0.25] * 3, [0] * 3]
    assert (taken[1]["experts"][:, 0] == none).all() and taken[1]["experts"][0, 1].tolist() == [3, 0, 1]
    assert taken[0]["token"].tolist() == [-1, -1]
    recorder.end_iteration(True)
    recorder.router_ran(0, torch.zeros(2, 4), torch.zeros(2, 2, dtype=torch.long), weights)
    recorder.begin_iteration(info)
    recorder.end_iteration(True)
    assert len(taken) == 2, "nothing ran in between"


SIGMOID = {"deepseek_v3", "glm4_moe", "dots1", "lfm2_moe"}
CHOICE_IS_NOT_TOP_K = SIGMOID | {"ernie4_5_moe"}  # a bias takes part in the choice
NUM_FULL = 3
MAX_DISTANCE = 8


def scores_by_hand(model: Any, layer: int, hidden: torch.Tensor, is_sigmoid: bool) -> torch.Tensor:
    """From the one weight [E, H] beside the experts of a layer, and its bias if it has one."""
    manifest = handle(model).store.manifest
    block = model.get_submodule(manifest.sites[layer].rpartition(".")[0])
    shape = (manifest.layers[layer].num_experts, hidden.shape[-1])
    (module,) = [
        module
        for name, module in block.named_modules()
        if not name.startswith("experts") and getattr(getattr(module, "weight", None), "shape", None) == shape
    ]
    logits = linear(hidden, module.weight, getattr(module, "bias", None))
    return logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True) if is_sigmoid else logits.softmax(-1)


def router_inputs_of(model: Any) -> tuple[list[dict[int, torch.Tensor]], list[Any]]:
    """A list that gets the experts' inputs [T, H] of each pass, by layer, and the hooks that fill it."""
    passes: list[dict[int, torch.Tensor]] = []
    handles = []
    for layer, module in enumerate(experts_modules(model)):

        def before(_: nn.Module, args: tuple[torch.Tensor, ...], layer: int = layer) -> None:
            if not passes or layer in passes[-1] or layer < max(passes[-1]):
                passes.append({})
            passes[-1][layer] = args[0].clone()

        handles.append(module.register_forward_pre_hook(before))
    return passes, handles


@pytest.mark.parametrize("family", FAMILIES)
def test_full_fields_are_the_models_own(family: str, cases: Cases, tmp_path: Path) -> None:
    case, is_sigmoid = cases[family], family in SIGMOID
    prompt = case.prompts[0]
    with loaded(case.store) as model:
        with record(model, tmp_path / "trace", full=True) as recorder:
            assert recorder.absent == {}
            passes, handles = router_inputs_of(model)
            recorder.begin_request()
            (tokens,) = generate(model, [prompt], NUM_FULL)
            for each in handles:
                each.remove()
        assert tokens == case.tokens[0][: len(tokens)]
        trace = Trace.open(tmp_path / "trace")
        field = {name: trace.rows(name, 0, trace.num_rows) for name in trace.manifest.fields}
        embedded = model.get_input_embeddings()(torch.from_numpy(field["token"].astype(np.int64)))
        assert np.array_equal(field["embedding"], embedded.half().numpy())
        layers, first = handle(model).store.manifest.layers, 0
        assert len(passes) == trace.num_iterations
        for seen in passes:
            num_rows = len(next(iter(seen.values())))
            rows = slice(first, first + num_rows)
            for layer in range(len(layers)):
                inputs = seen[layer]
                assert np.array_equal(field["router_inputs"][rows, layer], inputs.half().numpy())
                for distance in range(MAX_DISTANCE + 1):
                    name = f"layer {layer}, distance {distance}"
                    result = field["lookahead"][rows, layer, distance - 1] if distance else field["probs"][rows, layer]
                    if distance >= len(layers):
                        assert not result.any(), name
                        continue
                    by_hand = scores_by_hand(model, (layer + distance) % len(layers), inputs, is_sigmoid)
                    np.testing.assert_allclose(result, by_hand.numpy(), rtol=2e-3, atol=1e-3, err_msg=name)
                    np.testing.assert_allclose(result.astype(np.float32).sum(-1), 1, atol=5e-3, err_msg=name)
            first += num_rows
        assert first == trace.num_rows
        if family not in CHOICE_IS_NOT_TOP_K:
            top_k = layers[0].top_k
            chosen = np.take_along_axis(field["probs"], field["experts"].astype(np.int64), -1)
            assert (chosen.min(-1) >= -np.sort(-field["probs"])[..., top_k - 1]).all(), "the top K were chosen"


def test_what_a_model_does_not_have_is_named_and_left_out(cases: Cases, tmp_path: Path) -> None:
    prompt = cases["mixtral"].prompts[0]
    with loaded(cases["mixtral"].store) as model:
        gate = model.model.layers[1].mlp.gate
        original = type(gate)

        class Stateful(original):  # type: ignore[misc, valid-type]
            num_rows = 0

            def forward(self, hidden_states: torch.Tensor) -> Any:
                if len(hidden_states) == 3:
                    raise ValueError("not without what ran before")
                return super().forward(hidden_states)

        gate.__class__ = Stateful
        with record(model, tmp_path / "deaf", full=True) as recorder:
            assert list(recorder.absent) == ["lookahead"] and "layers 1 need" in recorder.absent["lookahead"]
            recorder.begin_request()
            generate(model, [prompt], NUM_FULL)
        gate.__class__ = original
        block = model.model.layers[1].mlp
        del block.gate
        block.__dict__["gate"] = gate.forward
        with record(model, tmp_path / "hidden", full=True) as recorder:
            assert list(recorder.absent) == ["probs", "router_inputs", "lookahead"]
            recorder.begin_request()
            generate(model, [prompt], NUM_FULL)
    deaf, hidden = Trace.open(tmp_path / "deaf"), Trace.open(tmp_path / "hidden")
    assert {"probs", "router_inputs", "embedding"} <= deaf.manifest.fields.keys()
    assert not deaf.has("lookahead") and "no lookahead: " in deaf.manifest.fields["experts"].note
    assert hidden.has("embedding") and not hidden.has("probs")
    assert "no probs: " in hidden.manifest.fields["experts"].note
    assert deaf.num_rows == hidden.num_rows == len(prompt) + NUM_FULL - 1
