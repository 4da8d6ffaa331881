"""The same truths on a CUDA device; skipped where there is none. Those that load most models come last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.engine import cuda
from expertly.model.hooks import experts_modules
from tests.engine.conftest import Case, Cases
from tests.engine.observe import Call, loaded
from tests.engine.test_compute import TOLERANCE, reference_calls, relative_error, run
from tests.families import FAMILIES, HIDDEN_SIZE, NUM_EXPERTS, generate, load_reference, logits_of

pytestmark = pytest.mark.gpu

Expected = tuple[int, list[list[int]], torch.Tensor, torch.Tensor]
"""How many tokens are generated for each prompt, these, logits of the prompts, and how far each may be from them."""


@contextmanager
def on_gpu(case: Case, *, graphs: bool = False, **settings: Any) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        if not graphs:
            patch.setattr(cuda.KIND, "recorder", lambda device: None)
        with loaded(case.store, **({"device": "cuda"} | settings)) as model:
            yield model
            assert handle(model).engine.device.stats()["copied_nbytes"] > 0


def reference_of(case: Case, num_tokens: int = 12) -> Expected:
    reference = load_reference(case.folder).to("cuda")
    tokens, logits = generate(reference, case.prompts, num_tokens), logits_of(reference, case.prompts)
    reference.set_experts_implementation("eager")  # the others refuse double precision
    exact = logits_of(reference.double(), case.prompts)
    rounding = (logits - exact).abs().max()  # jamba's is 4e-4, four times the usual bound
    assert rounding < 1e-3
    return num_tokens, tokens, logits, (1e-5 + 1e-4 * logits.abs()).clamp(min=rounding)


def assert_same(model: Any, case: Case, expected: Expected) -> None:
    """Within 1e-4 of the reference, or no farther than its own float32 is from double precision."""
    num_tokens, tokens, logits, allowed = expected
    assert generate(model, case.prompts, num_tokens) == tokens
    too_far = (logits_of(model, case.prompts) - logits).abs() > allowed
    assert not too_far.any(), f"{int(too_far.sum())} of {too_far.numel()} logits"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe"])
@pytest.mark.parametrize(
    "system",
    ["expertly-ahead", "moepic:tau=2", "moe-infinity", "fmoe", "promoe", "lru:prediction=speculative:segments=4"],
)
def test_no_system_changes_a_token(system: str, family: str, cases: Cases) -> None:
    case = cases[family]
    expected = reference_of(case)
    with on_gpu(case, memory="45%", system=system) as model:
        for _ in range(2):
            assert_same(model, case, expected)
        stats = expertly.stats(model).as_dict()
        assert stats["synchronisations_per_pass"] <= len(stats["layers"]) + 2
        times = handle(model).engine.executor.shard.times
        assert times is None or times.is_known, "by the device's clock"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("segments", [1, 4])
def test_few_tokens_are_the_kernels_over_slots(segments: int, dtype: str, cases: Cases) -> None:
    """On the reference's inputs: which computed them is counted, and torch has prompts alone."""
    pytest.importorskip("triton", reason="torch computes without it")
    case = cases["qwen3_moe"]
    calls = reference_calls(case.folder, case.prompts, getattr(torch, dtype))
    with on_gpu(Case(case.folder, case.folder), dtype=dtype, memory="45%", segments=segments) as model:
        message = expertly.stats(model).as_dict()["kernels"]
        assert message["name"] == "triton", message["why"]
        for call in calls:
            on_device = Call(call.layer, call.hidden.cuda(), call.index.cuda(), call.weights.cuda())
            assert call.output is not None
            error = relative_error(run(model, on_device).cpu(), call.output)
            assert error < TOLERANCE[call.hidden.dtype], f"layer {call.layer}, {len(call.index)} tokens"
        message = expertly.stats(model).as_dict()["kernels"]
        assert message["native"] > message["early"] > 0 and message["torch"] == 0


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "deepseek_v3"])
@pytest.mark.parametrize("system", ["lru", "expertly-ahead", "resident"])
def test_graphs_change_no_token(system: str, family: str, cases: Cases) -> None:
    case = cases[family]
    reference = load_reference(case.folder).to("cuda")
    expected = [generate(reference, [prompt], 30) for prompt in case.prompts]
    memory = "100%" if system == "resident" else "45%"
    for graphs in (True, False):
        with on_gpu(case, memory=memory, system=system, graphs=graphs) as model:
            for _ in range(2):
                assert [generate(model, [prompt], 30) for prompt in case.prompts] == expected
            stats = expertly.stats(model).as_dict()
            assert (stats["kernels"]["graphs"] > 0) == (graphs and family != "deepseek_v3")


def test_device_memory_is_the_budget_and_is_given_back(cases: Cases) -> None:
    before = torch.cuda.memory_allocated()
    model, _ = expertly.load(str(cases["mixtral"].store), memory="25%", device="cuda")
    stats = expertly.stats(model).as_dict()
    dense = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert torch.cuda.memory_allocated() - before <= 1.5 * dense + stats["memory_bytes"] + (1 << 20)
    expertly.unload(model)
    del model
    assert torch.cuda.memory_allocated() - before <= 1 << 20


def test_no_layer_waits_where_all_experts_are_resident(cases: Cases) -> None:
    pytest.importorskip("triton", reason="torch waits for the choice")
    case = cases["qwen3_moe"]
    expected = reference_of(case)
    with on_gpu(case, system="resident", memory="100%") as model:
        assert_same(model, case, expected)
        stats = expertly.stats(model).as_dict()
        phases, num_layers = stats["phases"], len(stats["layers"])
        assert stats["kernels"]["early"] == phases["decode"]["hits"] > 0
        prefill, decode = (phases[phase]["iterations"] for phase in ("prefill", "decode"))
        assert stats["synchronisations"] <= 2 * (prefill + decode) + num_layers * prefill


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_nothing_but_the_routers_choice_makes_the_host_wait(num_tokens: int, cases: Cases) -> None:
    with on_gpu(cases["qwen3_moe"], segments=4) as model:
        engine, modules = handle(model).engine, experts_modules(model)
        for step in range(6):
            hidden, weights = (torch.randn(num_tokens, n, device="cuda") for n in (HIDDEN_SIZE, 3))
            ids = torch.rand(num_tokens, NUM_EXPERTS, device="cuda").topk(3).indices
            torch.cuda.set_sync_debug_mode("error")
            try:
                engine.forward_experts(modules[step % 3], step % 3, hidden, ids, weights)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("segments", [1, 4])
def test_float32_tokens_and_logits_are_the_reference(family: str, segments: int, cases: Cases) -> None:
    case = cases[family]
    expected = reference_of(case)
    for system in ("on-demand", "lru", "lfu"):
        for memory, host_memory in (("25%", "100%"), ("25%", "40%"), ("100%", "100%")):
            settings = {"memory": memory, "host_memory": host_memory, "system": system, "segments": segments}
            with on_gpu(case, **settings) as model:
                assert_same(model, case, expected)
                moved = handle(model).engine.device.stats()
                assert moved["copied_nbytes"] == expertly.stats(model).as_dict()["bytes_loaded"], settings
