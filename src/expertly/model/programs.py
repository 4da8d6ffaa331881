"""The decoder layers of a loaded model as programs of the compiled library, for a single token: norms, projections,
attention over the KV cache, router, resident experts and what is behind them in one native call.

A layer's own forward is noted once: torch's operations and the calls of our kernels (graphs.py says which layers, and
compares). The call stops where there is something to decide, and where torch has an operation that is not on the list
below, and goes on behind it; a layer whose operations depend on numbers stays as it is.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from expertly.model.dense import IDLE, is_native_attention
from expertly.model.graphs import LayerGraphs, use_graphs
from expertly.model.hooks import CACHE, Runtime, places
from expertly.native.kernels import BOOLEAN, STEPS, ChosenExperts, Kernels, UnsureError, double_bits

_aten = torch.ops.aten

_WITHOUT_WORK = {_aten._unsafe_view.default, _aten.empty.memory_format, _aten.empty_like.default}
_WITHOUT_WORK |= {_aten.new_empty.default, _aten.empty_strided.default}
"""Besides views."""

_WITH_TWO = {_aten.add.Tensor: "add", _aten.mul.Tensor: "multiply"}

_OF_EACH = {_aten.silu.default, _aten.sigmoid.default, _aten.gelu.default, _aten.relu.default, _aten.neg.default}
"""Of each number alone: looked up for those of 16 bits."""

_DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

_EACH, _ONE, _CONSTANT = range(3)
"""As in program.h, what the second operand is."""

_WIDTH = 16
"""Numbers of a step: its kind, whether it is ready, its arguments."""

_FIRST_PLACE = 7
"""From the end of the call of `projections`: where keys and values go."""

_TRIES = 8
"""Tokens for which a layer is noted again, where its router could not tell."""


class NotedError(RuntimeError):
    """A layer cannot be a program: it has an operation that makes another program of other numbers."""


@cache
def _table(function: Any, arguments: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
    """What torch makes of every number of 16 bits."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    made: torch.Tensor = function(every, *arguments)
    return made


def _step(kind: str, arguments: Sequence[int], *, is_ready: bool = True) -> tuple[int, ...]:
    return STEPS.index(kind), is_ready, *arguments, *(0,) * (_WIDTH - 2 - len(arguments))


def _again(func: Any, args: Any, kwargs: Any, made: Any) -> None:
    """An operation of torch, to where it wrote before."""
    results = func(*args, **kwargs)
    for old, new in zip(*(it if isinstance(it, tuple | list) else (it,) for it in (made, results)), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


class _Noted(TorchDispatchMode):
    """Notes what runs within it."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.steps: list[tuple[int, ...]] = []
        self.calls: dict[int, Callable[[], None]] = {}  # steps that are torch's
        self.kept: list[Any] = []
        self._kernels = kernels

    def note(self, kind: str, arguments: Sequence[int], kept: Sequence[Any]) -> None:
        self.steps.append(_step(kind, arguments))
        self.kept += kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.kept.append((args, made))
        if func.is_view or func in _WITHOUT_WORK:
            return made
        if _DEPENDS & set(func.tags):
            raise NotedError(str(func))
        if kwargs or not self._note_native(func, made, *args):
            self.calls[len(self.steps)] = partial(_again, func, args, kwargs or {}, made)
            self.steps.append(_step("torch", (), is_ready=False))
        return made

    def _note_native(self, func: Any, made: Any, first: Any, second: Any = None, *others: Any) -> bool:
        """Note what the compiled library has; returns whether it does."""
        tensors = [tensor for tensor in (made, first, second) if isinstance(tensor, torch.Tensor)]
        dtype = self._kernels.dtypes.get(first.dtype) if isinstance(first, torch.Tensor) else None
        if dtype is None or not all(it.is_contiguous() and it.dtype == first.dtype for it in tensors):
            return False
        if func in _OF_EACH and first.itemsize == 2:
            arguments = () if second is None else (second, *others)
            table = _table(func, arguments, first.dtype)
            where = first.data_ptr(), table.data_ptr(), made.data_ptr()
            self.note("looked up", (dtype, made.numel(), *where), (table,))
            return True
        if func not in _WITH_TWO or others:
            return False
        if not isinstance(second, torch.Tensor):
            operand, kind = double_bits(float(second)), _CONSTANT
        else:
            if first.numel() == 1 and first.shape != made.shape:
                first, second = second, first
            operand, kind = second.data_ptr(), _EACH if second.shape == made.shape else _ONE
            if second.shape != made.shape and second.numel() > 1:
                return False
        if first.shape != made.shape:
            return False
        self.note(_WITH_TWO[func], (dtype, made.numel(), first.data_ptr(), operand, kind, made.data_ptr()), ())
        return True


class _Segment:
    """What was noted between two things that are done elsewhere. To call it is to run it."""

    def __init__(self, noted: _Noted, kernels: Kernels) -> None:
        self.steps, self.calls, self.kept, self._kernels = noted.steps, noted.calls, noted.kept, kernels
        self._array = array("q", [number for step in noted.steps for number in step])

    def __call__(self) -> None:
        begin, end = 0, len(self.steps)
        while begin < end:
            begin = self._kernels.run_program(self._array, begin, end)
            if begin < end and begin not in self.calls:
                raise UnsureError
            if begin < end:
                self.calls[begin]()
                begin += 1


class Notes:
    """A Recorder for a CPU: what is recorded runs, too."""

    has_others = True

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._noted: _Noted | None = None

    def begin(self) -> None:
        self._noted = self._kernels.tape = _Noted(self._kernels)
        self._noted.__enter__()

    def end(self) -> Callable[[], None]:
        noted = self._noted
        assert noted is not None
        self.abandon()
        return _Segment(noted, self._kernels)

    def abandon(self) -> None:
        if self._noted is not None:
            self._noted.__exit__(None, None, None)
            self._noted = self._kernels.tape = None


def use_programs(model: PreTrainedModel, kernels: Kernels) -> Counter[str]:
    """In those MoE layers of a loaded model where it is found to be possible, from the first token that is decoded on.
    Returns how many layers stay as they are, by what stopped them, as it is found out.
    """
    stopped: Counter[str] = Counter()
    if kernels.library is not None:
        num_unknown = use_graphs(model, kernels, Notes(kernels), partial(LayerProgram, stopped=stopped))
        if num_unknown:
            stopped["code that is not on a list"] = num_unknown
    return stopped


class LayerProgram(LayerGraphs):
    """The program of one layer."""

    def __init__(self, *arguments: Any, stopped: Counter[str]) -> None:
        super().__init__(*arguments)
        self._stopped = stopped
        self._tries = 0
        self._steps = array("q")
        self._num_steps = self._at_attention = self._at_experts = 0
        self._calls: dict[int, Callable[[], None]] = {}  # steps that are torch's
        self._chosen: ChosenExperts | None = None
        self._projected: array[int] | None = None  # the call that puts keys and values into the cache
        self._asked = array("q")  # of attention
        self._scaling: float | None = None
        self._told_always: dict[str, Any] = {}  # what attention is told besides, whoever calls the layer
        self._is_idle = False  # what attention is told changes nothing
        self._native_as: Any = None  # the function of transformers that was native, without a mask

    def takes(self, layer: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        is_tried = self._attention.__dict__.get("_expertly_is_tried", True)  # whose first tokens join its projections
        is_plain = type(hidden) is torch.Tensor and hidden.is_cpu
        return is_tried and is_plain and super().takes(layer, hidden, kwargs)

    def prove(self, layer: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        num_compared = self.num_compared
        try:
            is_proven = super().prove(layer, hidden, kwargs)
        except UnsureError:
            self.num_compared, self._tries = num_compared, self._tries + 1
            return self._tries < _TRIES
        if not is_proven:
            self._stopped[self._why or "other numbers than the layer's own"] += 1
        return is_proven

    def run(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        if not self._num_steps:
            self._assemble()
        at, kernels, steps, end = self._at, self._shared.kernels, self._steps, self._num_steps
        at.hidden.copy_(hidden)
        self._shared.keep_angles(kwargs["position_embeddings"])
        told = {name: kwargs[name] for name in self._passed} if self._passed else {}
        self._place(kwargs.get(CACHE), kwargs.get("attention_mask"), told)
        runtime, looks = self._experts._expertly_runtime, self._router._forward_hooks
        chosen = self._chosen
        if chosen is not None:
            steps[self._at_experts * _WIDTH + 1] = not looks and runtime.may_run()
        reached = kernels.run_program(steps, 0, end)
        while reached < end:
            if reached == self._at_attention:
                self._attend(kwargs)
            elif reached == self._at_experts:
                self._mix()
                chosen = None
            elif reached in self._calls:
                self._calls[reached]()
            else:
                args, named = at.routed[:2]
                for there, now in zip(at.routed[2], self._router.forward(*args, **named), strict=True):
                    there.copy_(now)
            reached = kernels.run_program(steps, reached + 1, end)
        if chosen is not None:
            runtime.ran(self._layer, at.chosen[0], at.chosen[1], at.mixed, *chosen.times())
        kernels.num_programs += 1
        kernels.num_attention += steps[self._at_attention * _WIDTH + 1]
        return at.out.clone()  # type: ignore[no-any-return]

    # -- the steps -----------------------------------------------------------------------------------------------------

    def _assemble(self) -> None:
        """One list of steps from the three that were recorded, with attention and experts between them."""
        before, between, behind = (replay.steps for replay in self._replays)  # type: ignore[attr-defined]
        at, kernels = self._at, self._shared.kernels
        attention, experts = len(before), len(before) + 1 + len(between)
        dtype = kernels.dtypes[at.query.dtype]
        self._told_always = {name: value for name, value in self._own.items() if name != "scaling"}
        self._scaling = self._own.get("scaling")
        self._is_idle = {*self._told_always, *self._passed} <= IDLE and "dropout" not in self._passed
        scale = at.query.shape[-1] ** -0.5 if self._scaling is None else self._scaling
        sinks, softcap = self._own.get("s_aux"), self._own.get("softcap") or 0.0
        batch, heads, num, width = at.query.shape
        self._asked = array(
            "q",
            (
                *(batch, heads, at.key.shape[1], num, 0, width, at.value.shape[-1], at.query.data_ptr(), 0, 0, 0),
                *(0 if sinks is None else sinks.data_ptr(), at.attended.data_ptr(), *at.query.stride()[:3], *(0,) * 9),
                *(BOOLEAN, 0 if sinks is None else kernels.dtypes.get(sinks.dtype, 0), 0, 0, 0, 0),
            ),
        )
        asks = dtype, self._asked.buffer_info()[0], double_bits(scale), double_bits(softcap)
        runtime: Runtime = self._experts._expertly_runtime
        if len(at.chosen[1]) == 1:
            self._chosen = runtime.chosen_experts(self._layer, *at.chosen, at.mixed)
        mixes = (0, 0) if self._chosen is None else (dtype, self._chosen.address)

        attend, mix = _step("attention", asks, is_ready=False), _step("experts", mixes, is_ready=False)
        every = [*before, attend, *between, mix, *behind]
        for first, replay in zip((0, attention + 1, experts + 1), self._replays, strict=True):
            self._calls |= {first + number: call for number, call in replay.calls.items()}  # type: ignore[attr-defined]
        self._steps = array("q", [number for numbers in every for number in numbers])
        self._num_steps, self._at_attention, self._at_experts = len(every), attention, experts
        projections = STEPS.index("projections")
        if [kind for kind, *_ in before].count(projections) == 1:
            kept = self._replays[0].kept  # type: ignore[attr-defined]
            (address,) = (numbers[3] for numbers in before if numbers[0] == projections)
            calls = [it for it in kept if isinstance(it, array) and it.buffer_info()[0] == address]
            (self._projected,) = calls

    def _place(self, cache: Any, mask: torch.Tensor | None, told: dict[str, Any]) -> None:
        """Have attention run where the KV cache has room for the token and nobody asks for what the kernel is not."""
        at, steps, kernels = self._at, self._steps, self._shared.kernels
        ready, call = self._at_attention * _WIDTH + 1, self._projected
        kept = None
        if call is not None:
            call[-_FIRST_PLACE] = call[1 - _FIRST_PLACE] = 0
            key = at.key
            if mask is not None:  # for one key more than there are
                key = key.expand(-1, -1, cache.get_seq_length(self._attention.layer_idx) + 1, -1) if cache else None
            name = object.__getattribute__(self._attention.config._expertly_config, "_attn_implementation")
            is_usual = mask is None and self._is_idle and name == "sdpa"
            usual = ALL_ATTENTION_FUNCTIONS[name] if is_usual else None
            is_native = usual is not None and usual is self._native_as
            if not is_native and key is not None:
                more = {**self._told_always, **told}
                is_native = is_native_attention(self._attention, self._scaling, more, mask, at.query, key)
                self._native_as = usual if is_native else None
            if is_native:
                kept = places(cache, self._attention.layer_idx, at.hidden)
        steps[ready] = kept is not None
        if call is None or kept is None:
            return
        asked, itemsize = self._asked, at.hidden.element_size()
        asked[4] = kept[0].shape[2]
        for number, place in enumerate(kept):
            address, strides = place.data_ptr(), place.stride()
            asked[8 + number] = address
            asked[16 + 3 * number], asked[17 + 3 * number], asked[18 + 3 * number] = strides[:3]
            call[number - _FIRST_PLACE] = address + (place.shape[2] - 1) * strides[2] * itemsize
            call[3 + 2 * number - _FIRST_PLACE] = strides[0] * itemsize
            call[4 + 2 * number - _FIRST_PLACE] = strides[1] * itemsize
        asked[10] = 0
        if mask is not None:
            asked[10] = mask.data_ptr()
            for number, (size, stride) in enumerate(zip(mask.shape[:3], mask.stride()[:3], strict=True)):
                asked[22 + number] = 0 if size == 1 else stride * mask.element_size()
            asked[25] = BOOLEAN if mask.dtype == torch.bool else kernels.dtypes[mask.dtype]
