"""The dense part of a token as graphs of an accelerator. A graph here is torch's operations, noted while they are
captured and run at each replay, on the same memory; as on a GPU, what is captured does not run. Changes, hooks and the
end of a model are heeded as programs do (test_programs.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import expertly
from expertly.engine import cpu, cuda
from expertly.engine.observe import Collector
from expertly.native.kernels import VARIABLE
from tests.engine.conftest import Case, Cases
from tests.engine.observe import loaded
from tests.engine.slot_kernels import put_slot_kernels
from tests.engine.streams import POISON, put_in_place
from tests.families import FAMILIES, generate

pytestmark = pytest.mark.timeout(120)

RECORDED = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"}
RECORDED |= {"granitemoe", "glm4_moe", "dots1", "hunyuan_v1_moe"}
"""Families whose layers are recorded."""

WAITING = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


class Graph(TorchDispatchMode):
    """torch.cuda.CUDAGraph. `error`: added to what a replay computes."""

    def __init__(self, error: float = 0.0) -> None:
        super().__init__()
        self._error = error
        self._calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "other threads copy and predict meanwhile"
        self.__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING:
            raise RuntimeError("operation not permitted when stream is capturing")
        made = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, tensors_of(made)))
        return made

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        for *_, made in self._calls:
            for one in made:
                if one._base is None:
                    one.view(-1).view(torch.uint8).fill_(POISON)

    def replay(self) -> None:
        for func, args, kwargs, made in self._calls:
            for there, now in zip(made, tensors_of(func(*args, **kwargs)), strict=True):
                if there.data_ptr() != now.data_ptr():
                    there.copy_(now)
        if self._error:
            self._calls[-1][3][0].add_(self._error)


def tensors_of(made: Any) -> list[torch.Tensor]:
    return [one for one in (made if isinstance(made, tuple | list) else [made]) if isinstance(one, torch.Tensor)]


class Stream:
    """torch.Stream."""

    num_within = 0

    def __init__(self, device: torch.device) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def __enter__(self) -> None:
        assert Stream.num_within == 0
        Stream.num_within = 1

    def __exit__(self, *_: Any) -> None:
        Stream.num_within = 0


@contextmanager
def with_graphs(
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    make: Any = Graph,
    kernels: str = "torch",
    *,
    records: bool = True,
    **options: Any,
) -> Iterator[Any]:
    """A model on a simulated accelerator, which records such graphs, unless it is not to."""
    monkeypatch.setenv(VARIABLE, "torch")
    put_in_place(monkeypatch)
    if kernels == "over slots":
        put_slot_kernels(monkeypatch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", make)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    if records:
        monkeypatch.setattr(cpu.KIND, "recorder", cuda.CudaGraphs)
    with loaded(case.store, memory="45%", **options) as model:
        yield model
    assert Stream.num_within == 0


def num_replayed(model: Any) -> int:
    found = expertly.stats(model).as_dict()["kernels"]["graphs"]
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("family", [*sorted(RECORDED), "deepseek_v3", "jamba", "qwen3_next"])
def test_tokens_and_logits_are_the_reference(family: str, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every layer of these families, from the fourth token on that a sequence alone decodes."""
    case = cases[family]
    with with_graphs(case, monkeypatch) as model:
        for _ in range(2):
            for prompt, tokens in zip(case.prompts, case.tokens, strict=True):
                assert generate(model, [prompt]) == [tokens]
        if family in RECORDED:
            num_steps = 2 * len(case.prompts) * (len(case.tokens[0]) - 1)
            assert num_replayed(model) == FAMILIES[family].num_moe_layers * (num_steps - 3)
        else:
            assert num_replayed(model) == 0
        assert generate(model, case.prompts) == case.tokens


@pytest.mark.parametrize("kernels", ["torch", "over slots"])
@pytest.mark.parametrize("system", ["expertly-ahead", "fmoe", "promoe"])
def test_a_predictor_sees_the_same_however_late_it_looks(
    system: str, kernels: str, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, seen = cases["qwen3_moe"], []
    for records in (True, False):
        late: list[Any] = []
        num_looks: list[int] = []

        def routed(*call: Any, late: list[Any] = late, usual: Any = Collector.routed) -> Any:
            late.append(usual(*call))
            return late[-1]

        def looked(
            *call: Any, late: list[Any] = late, num_looks: list[int] = num_looks, usual: Any = Collector._router_ran
        ) -> None:
            num_looks.append(len(late))
            usual(*call)

        with monkeypatch.context() as patch:
            patch.setattr(Collector, "routed", routed)
            patch.setattr(Collector, "_router_ran", looked)
            with with_graphs(case, patch, kernels=kernels, system=system, records=records) as model:
                for _ in range(3):
                    assert generate(model, case.prompts[:1]) == case.tokens[:1]
                stats = expertly.stats(model).as_dict()
                assert stats["kernels"]["graphs"] == (3 * 15 if records else 0)
                assert stats["synchronisations_per_pass"] == len(stats["layers"]) + 2
                seen.append([one() for one in late])
                assert num_looks == list(range(len(late))), "once a layer"
    assert len(seen[0]) == 3 * 3 * 7
    for found, expected in zip(*seen, strict=True):
        for name in ("experts", "scores", "lookahead", "inputs"):
            there, here = getattr(found, name), getattr(expected, name)
            assert (there is None) == (here is None) and (here is None or np.allclose(there, here, atol=1e-3)), name


@pytest.mark.parametrize("make", [lambda: Graph(1e-5), lambda: Graph(float("nan"))], ids=["other numbers", "nothing"])
def test_graphs_that_give_other_numbers_are_not_used(make: Any, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    with with_graphs(case, monkeypatch, make) as model:
        for _ in range(2):
            assert generate(model, case.prompts[:1]) == case.tokens[:1]
        assert num_replayed(model) == 0


@pytest.mark.parametrize("step", ["mm", "topk", "add"])
def test_what_cannot_be_recorded_stays_as_it_is(step: str, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before attention, behind it, and behind the experts."""
    case, tried = cases["qwen3_moe"], []

    class Refusing(Graph):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name == f"aten::{step}":
                tried.append(func)
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().__torch_dispatch__(func, types, args, kwargs)

    with with_graphs(case, monkeypatch, Refusing) as model:
        assert generate(model, case.prompts[:1]) == case.tokens[:1]
        assert num_replayed(model) == 0 and tried


def test_what_a_layer_gave_is_not_overwritten(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    of_models: list[list[torch.Tensor]] = []
    with loaded(case.store) as plain, with_graphs(case, monkeypatch) as model:
        for one in (model, plain):
            generate(one, case.prompts[:1])
            of_models.append([])
            hooks = [
                layer.register_forward_hook(lambda *call, given=of_models[-1]: given.append(call[-1]))
                for layer in one.model.layers
            ]
            generate(one, case.prompts[:1])
            for hook in hooks:
                hook.remove()
        assert num_replayed(model) == 3 * (6 - 3) + 3 * 6
    for found, expected in zip(*of_models, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
