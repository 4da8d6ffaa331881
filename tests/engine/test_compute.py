"""Each MoE layer on the reference's own inputs and routing (docs/conventions.md): spans, precisions, odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import expertly
from expertly.api import handle
from expertly.core.observation import IterationInfo
from expertly.engine import compute
from expertly.model.hooks import experts_modules
from expertly.native import kernels as native_kernels
from expertly.native import widened
from expertly.native.kernels import VARIABLE, Kernels, choose_kernels
from tests.engine.conftest import Cases
from tests.engine.observe import Call, loaded, recording
from tests.families import FAMILIES, generate, load_reference

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}


def reference_calls(folder: Any, prompts: list[list[int]], dtype: torch.dtype) -> list[Call]:
    """Every experts call of a padded batch, and of some tokens after it."""
    reference = load_reference(folder, dtype=dtype)
    with recording(reference) as recorder:
        generate(reference, prompts, 3)
        generate(reference, prompts[:1], 3)
    assert {len(call.index) for call in recorder.calls} >= {1, 2}
    return recorder.calls


@pytest.fixture(scope="module")
def calls_of(cases: Cases) -> Callable[[str, torch.dtype], list[Call]]:
    """Those of a family, made when first asked for."""
    return cache(lambda family, dtype: reference_calls(cases[family].folder, cases[family].prompts, dtype))


def run(model: Any, call: Call) -> torch.Tensor:
    module = experts_modules(model)[call.layer]
    return handle(model).engine.forward_experts(module, call.layer, call.hidden, call.index, call.weights)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


LAYOUTS = ("P=1", "P=4", "P=4 fragmented")
FLOAT32 = [(family, torch.float32, layout) for family in ("qwen3_moe", "gpt_oss") for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("family", "dtype", "layout"),
    [
        *((family, torch.bfloat16, "P=4 fragmented") for family in FAMILIES),
        *((family, torch.bfloat16, "P=1") for family in ("mixtral", "gpt_oss", "deepseek_v3")),
        ("qwen3_moe", torch.bfloat16, "P=4"),
        ("gpt_oss", torch.float16, "P=4"),
        *FLOAT32,
    ],
    ids=str,
)
def test_a_layer_on_the_references_inputs(
    family: str, dtype: torch.dtype, layout: str, cases: Cases, calls_of: Callable[[str, torch.dtype], list[Call]]
) -> None:
    case, calls = cases[family], calls_of(family, dtype)
    name = str(dtype).removeprefix("torch.")
    segments = 1 if layout == "P=1" else 4
    with loaded(case.folder, dtype=name, segments=segments, memory="45%") as model:
        if layout.endswith("fragmented"):
            scatter(model)
        num_spans = watch_spans(model)
        for call in calls:
            actual = run(model, call)
            assert call.output is not None
            assert actual.dtype == call.output.dtype and actual.shape == call.output.shape
            error = relative_error(actual, call.output)
            assert error < TOLERANCE[dtype], f"{family} layer {call.layer}, {len(call.index)} tokens: {error:.2e}"
        if layout.endswith("fragmented"):
            assert num_spans["part"] > 2 * num_spans["whole"], "experts really are in spans"
        handle(model).engine.scheduler.check()


@pytest.mark.parametrize(("segments", "dtype"), [(1, torch.bfloat16), (4, torch.float16)])
def test_a_layer_where_the_processor_has_no_products_of_16_bits(
    segments: int,
    dtype: torch.dtype,
    cases: Cases,
    calls_of: Callable[[str, torch.dtype], list[Call]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Experts that torch computes, as those of long prompts are."""
    widened_rows: list[int] = []

    def noted(x: torch.Tensor, out: torch.Tensor, rows: Any = widened._rows) -> Any:
        widened_rows.append(len(x))
        return rows(x, out)

    monkeypatch.setattr(widened, "WIDENED", {dtype})
    monkeypatch.setattr(widened, "_rows", noted)
    monkeypatch.setenv(VARIABLE, "torch")
    case = cases["gpt_oss"]
    with loaded(case.folder, dtype=str(dtype).removeprefix("torch."), segments=segments) as model:
        for call in calls_of("gpt_oss", dtype):
            assert call.output is not None
            assert relative_error(run(model, call), call.output) < TOLERANCE[dtype]
    assert widened_rows


def scatter(model: Any) -> None:
    """No slots are blocks of an expert, and those that are taken are reversed: its units never lie side by side."""
    for pool in handle(model).engine.scheduler.cache.pools:
        assert pool.num_free == pool.num_slots
        pool.__init__(pool.num_slots - pool.least_staging, pool.least_staging, pool.num_slots + 1)
        pool.take = lambda num, wanted=None, take=pool.take: [*take(num)][::-1]


def watch_spans(model: Any) -> dict[str, int]:
    """Counts of spans computed, whole experts and parts."""
    seen = {"whole": 0, "part": 0}
    engine = handle(model).engine
    used = engine.device.used

    def watch(spans: Any) -> None:
        for span in spans:
            seen["whole" if span.num_segments == engine.scheduler.geometry.segments_per_expert else "part"] += 1
        used(spans)

    engine.device.used = watch  # type: ignore[method-assign]
    engine.device.queues_uses = True
    return seen


# -- shapes that no well-behaved router makes -------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 4])
def test_ids_that_are_no_expert_give_zero(segments: int, cases: Cases) -> None:
    """Upstream's expert parallelism marks an expert of another rank by the id E."""
    case = cases["qwen3_moe"]
    hidden, weights = torch.randn(3, 32), torch.rand(3, 3)
    index = torch.tensor([[0, 8, 5], [8, 8, 8], [7, 1, 0]])
    with loaded(case.store, segments=segments) as model:
        actual = run(model, Call(0, hidden, index, weights))
        assert not actual[1].any()
        for row in range(3):
            each = run(model, Call(0, hidden[row : row + 1], index[row : row + 1], weights[row : row + 1]))
            torch.testing.assert_close(each[0], actual[row])
        expected = run(model, Call(0, hidden[:1], torch.tensor([[0, 5, 5]]), weights[:1] * torch.tensor([1, 0, 1])))
        torch.testing.assert_close(actual[0], expected[0])


def test_the_same_expert_twice_for_one_token_and_no_token_at_all(cases: Cases) -> None:
    hidden, weights = torch.randn(1, 32), torch.tensor([[0.5, 0.25, 0.25]])
    with loaded(cases["qwen3_moe"].store, segments=4) as model:
        twice = run(model, Call(1, hidden, torch.tensor([[3, 3, 2]]), weights))
        once = run(model, Call(1, hidden, torch.tensor([[3, 2, 1]]), torch.tensor([[0.75, 0.25, 0.0]])))
        torch.testing.assert_close(twice, once)
        empty = Call(0, torch.empty(0, 32), torch.empty(0, 3, dtype=torch.long), torch.empty(0, 3))
        assert run(model, empty).shape == (0, 32)


def test_an_input_that_is_a_view(cases: Cases) -> None:
    case = cases["gpt_oss"]
    wide, index, weights = torch.randn(5, 64), torch.randint(0, 8, (2, 5)).T, torch.rand(2, 5).T
    with loaded(case.store, segments=4) as model:
        strided = run(model, Call(0, wide[:, ::2], index, weights))
        dense = run(model, Call(0, wide[:, ::2].contiguous(), index.contiguous(), weights.contiguous()))
        torch.testing.assert_close(strided, dense)


def test_experts_of_a_prompt_are_computed_together(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are there and have few of its tokens; not more rows at a time than there is room for their sums."""
    calls: list[tuple[int, int]] = []

    def noted(*args: Any, experts: Any = Kernels.experts, **more: Any) -> None:
        calls.append((len(args[3]), sum(len(rows) for _, rows, _ in args[3])))
        experts(*args, **more)

    monkeypatch.setattr(Kernels, "experts", noted)
    monkeypatch.setattr(compute, "_SUMS_NBYTES", 48 * 32 * 4)  # of 48 rows
    hidden, weights = torch.randn(34, 32), torch.rand(34, 3)
    index = torch.stack([(torch.arange(3) + token) % 8 for token in range(34)])
    with loaded(cases["qwen3_moe"].folder, dtype="bfloat16", memory="100%") as model:
        for _ in range(2):  # the first brings them
            calls.clear()
            made = run(model, Call(0, hidden.bfloat16(), index, weights.bfloat16()))
        assert [num for num, _ in calls] == [3, 3, 2] and max(rows for _, rows in calls) <= 48
        for token in (0, 17, 33):
            one = slice(token, token + 1)
            alone = run(model, Call(0, hidden[one].bfloat16(), index[one], weights[one].bfloat16()))
            torch.testing.assert_close(made[one], alone)


def test_a_large_prefill_is_combined_in_cuts(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call(50)
    with loaded(cases["qwen3_moe"].store) as model:
        whole = run(model, call)
        monkeypatch.setattr(native_kernels, "_COMBINE_NBYTES", 3 * 32 * 4 * 7)
        assert torch.equal(run(model, call), whole)


def test_stale_iteration_info_does_not_change_the_arithmetic(cases: Cases) -> None:
    """Rows that no info describes (a router called by hand): one token decodes, more are prefill, all count."""
    call = random_call(4)
    with loaded(cases["qwen3_moe"].store) as model:
        expected = run(model, call)
        engine = handle(model).engine
        engine.begin_iteration(IterationInfo(np.ones(7, bool), None, 1, "prefill"))
        assert torch.equal(run(model, call), expected)
        engine.end_iteration(True)


# -- by the compiled products, or by torch -----------------------------------------------------------------------------

both_kernels = pytest.mark.parametrize("kernels", ["auto", "torch"])


def num_by(kernels: str, model: Any) -> int:
    """Experts, or parts, that were computed so."""
    return int(expertly.stats(model).as_dict()["kernels"][kernels])


def random_call(num_tokens: int, dtype: torch.dtype = torch.float32) -> Call:
    dice = torch.Generator().manual_seed(num_tokens)
    hidden, weights = torch.randn(num_tokens, 32, generator=dice), torch.rand(num_tokens, 3, generator=dice)
    index = torch.stack([torch.randperm(8, generator=dice)[:3] for _ in range(num_tokens)])
    return Call(0, hidden.to(dtype), index, weights.to(dtype))


def test_an_expert_of_many_tokens_is_torchs(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    most = choose_kernels().most_tokens(torch.float32)
    with loaded(cases["qwen3_moe"].store, system="resident", memory="100%") as model:
        for num_tokens, kernels in ((most + 1, "torch"), (most, "native")):
            index = torch.tensor([[0, 1, 2]] * num_tokens)
            run(model, Call(0, torch.randn(num_tokens, 32), index, torch.rand(num_tokens, 3)))
            assert num_by(kernels, model) == 3


class InFloat32(torch.nn.Module):
    """An activation that computes, and answers, in another type than the weights'."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x.float())


@both_kernels
def test_activations_are_rounded_to_the_weights_type(
    kernels: str, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the reference does before the next product."""
    monkeypatch.setenv(VARIABLE, kernels)
    calls = [random_call(num_tokens, torch.bfloat16) for num_tokens in (1, 2, 9)]
    for segments in (1, 4):
        with loaded(cases["qwen3_moe"].folder, dtype="bfloat16", segments=segments) as model:
            if segments > 1:
                scatter(model)
            expected = [run(model, call) for call in calls]
            modules: list[Any] = experts_modules(model)
            for module in modules:
                module.act_fn = InFloat32()
            handle(model).engine.executor.bind(modules)
            for call, output in zip(calls, expected, strict=True):
                assert relative_error(run(model, call), output) < 1e-2
            assert (num_by("native", model) > 0) == (kernels == "auto")


@both_kernels
def test_an_input_that_changes_in_place_is_seen(kernels: str, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, kernels)
    call = random_call(1, torch.bfloat16)
    with loaded(cases["qwen3_moe"].folder, dtype="bfloat16", system="resident", memory="100%") as model:
        before = run(model, call)
        call.hidden.mul_(-2)
        after, fresh = run(model, call), run(model, replace(call, hidden=call.hidden.clone()))
        assert torch.equal(after, fresh) and not torch.equal(after, before)
