"""The compiled products in the engine: used for a few tokens of what is in RAM, all experts of a layer in one call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.model.hooks import experts_modules
from expertly.native.kernels import VARIABLE, Kernels, choose_kernels, libraries
from tests.engine.conftest import Cases
from tests.engine.observe import Call, loaded
from tests.engine.test_compute import relative_error, run, scatter

AVAILABLE, WHY = libraries()
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=f"no compiled products: {WHY}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Experts, or parts, of each call."""
    seen: list[int] = []
    experts = Kernels.experts

    def counted(self: Kernels, layer: Any, tasks: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(len(tasks) // 3)
        experts(self, layer, tasks, *args, **kwargs)

    monkeypatch.setattr(Kernels, "experts", counted)
    monkeypatch.delenv(VARIABLE, raising=False)
    return seen


def layer_call(num_tokens: int, dtype: torch.dtype = torch.float32) -> Call:
    dice = torch.Generator().manual_seed(num_tokens)
    hidden, weights = torch.randn(num_tokens, 32, generator=dice), torch.rand(num_tokens, 3, generator=dice)
    index = torch.stack([torch.randperm(8, generator=dice)[:3] for _ in range(num_tokens)])
    return Call(0, hidden.to(dtype), index, weights.to(dtype))


def kernels_of(model: Any) -> dict[str, Any]:
    told: dict[str, Any] = expertly.stats(model).as_dict()["kernels"]
    return told


def test_what_arrives_is_computed_as_it_comes(cases: Cases, calls: list[int]) -> None:
    with loaded(cases["qwen3_moe"].store, memory="100%") as model:
        run(model, layer_call(1))
        assert sum(calls) == 3, "the last ones perhaps together"
        calls.clear()
        run(model, layer_call(1))
        assert calls == [3], "what is here is one call"
        assert (kernels_of(model)["native"], kernels_of(model)["torch"]) == (6, 0)


def test_parts_are_calls_of_their_own(cases: Cases, calls: list[int]) -> None:
    with loaded(cases["qwen3_moe"].store, segments=4, memory="100%") as model:
        scatter(model)
        call = layer_call(1)
        first = run(model, call)
        assert calls == [1] * 12
        again = run(model, call)
        assert calls[12:] == [1] * 12 and torch.equal(first, again)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3_moe", torch.bfloat16),
        ("gpt_oss", torch.bfloat16),
        ("gpt_oss", torch.float16),
        ("qwen3_moe", torch.float32),
    ],
    ids=str,
)
def test_outputs_are_torchs(
    family: str, dtype: torch.dtype, cases: Cases, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without biases, whole and in scattered parts."""
    name, work = str(dtype).removeprefix("torch."), [layer_call(num_tokens, dtype) for num_tokens in (1, 2, 4, 9)]
    monkeypatch.setenv(VARIABLE, "torch")
    with loaded(cases[family].folder, dtype=name, segments=1) as model:
        expected = [run(model, call) for call in work]
        assert calls == [] and kernels_of(model)["torch"] > 0
    monkeypatch.setenv(VARIABLE, "native")
    for segments in (1, 4):
        with loaded(cases[family].folder, dtype=name, segments=segments) as model:
            if segments > 1:
                scatter(model)
            for call, output in zip(work, expected, strict=True):
                error = relative_error(run(model, call), output)
                assert error < {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-6}[dtype]
                assert calls, "they really ran"
                calls.clear()


def test_an_expert_of_many_tokens_is_torchs(cases: Cases, calls: list[int]) -> None:
    with loaded(cases["qwen3_moe"].store, system="resident", memory="100%") as model:
        few = choose_kernels().most_tokens(torch.float32)
        many = few + 1
        index = torch.tensor([[0, 1, 2]] * many)
        run(model, Call(0, torch.randn(many, 32), index, torch.rand(many, 3)))
        assert calls == [] and kernels_of(model)["torch"] == 3
        run(model, Call(0, torch.randn(few, 32), index[:-1], torch.rand(few, 3)))
        assert calls == [3], "all of a layer in one call"


class InFloat32(torch.nn.Module):
    """An activation that computes, and answers, in another type than the weights'."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x.float())


@pytest.mark.parametrize(("kernels", "segments"), [("native", 1), ("native", 4), ("torch", 4)])
def test_activations_are_rounded_to_the_weights_type(
    segments: int, kernels: str, cases: Cases, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the reference does before the next product."""
    monkeypatch.setenv(VARIABLE, kernels)
    work = [layer_call(num_tokens, torch.bfloat16) for num_tokens in (1, 2, 9)]
    with loaded(cases["qwen3_moe"].folder, dtype="bfloat16", segments=segments) as model:
        scatter(model)
        expected = [run(model, call) for call in work]
        modules: list[Any] = experts_modules(model)
        for module in modules:
            module.act_fn = InFloat32()
        handle(model).engine.executor.bind(modules)
        for call, output in zip(work, expected, strict=True):
            assert relative_error(run(model, call), output) < 1e-2
    assert bool(calls) == (kernels == "native")


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_an_input_that_changes_in_place_is_seen(kernels: str, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, kernels)
    call = layer_call(1, torch.bfloat16)
    with loaded(cases["qwen3_moe"].folder, dtype="bfloat16", system="resident", memory="100%") as model:
        before = run(model, call)
        call.hidden.mul_(-2)
        after, fresh = run(model, call), run(model, replace(call, hidden=call.hidden.clone()))
        assert torch.equal(after, fresh) and not torch.equal(after, before)
