"""The decoder layers of a loaded model as programs of the compiled library, for a token or a few: norms, projections,
attention over the KV cache, router, resident experts of a single token and what is behind them in one native call.

A layer's own forward is noted once: torch's operations and the calls of our kernels (graphs.py says which layers, and
compares). The call stops where there is something to decide, and where torch has an operation that is not on the list
below, and goes on behind it; a layer whose operations depend on numbers stays as it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import cache, partial
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from expertly.model.dense import IDLE, is_native, is_native_mask, paged
from expertly.model.graphs import LayerGraphs, use_graphs
from expertly.model.hooks import CACHE, RanStep, Runtime, factors_of, mix, places, watchers
from expertly.native.kernels import (
    SEEN,
    STEPS,
    ChosenExperts,
    Kernels,
    UnsureError,
    double_bits,
    point_at,
    put_into,
    seen,
)

_aten = torch.ops.aten

_WITHOUT_WORK = {_aten._unsafe_view.default, _aten.empty.memory_format, _aten.empty_like.default}
_WITHOUT_WORK |= {_aten.new_empty.default, _aten.empty_strided.default}
"""Besides views."""

_WITH_TWO = {_aten.add.Tensor: "add", _aten.mul.Tensor: "multiply"}

_OF_EACH = {_aten.silu.default, _aten.sigmoid.default, _aten.gelu.default, _aten.relu.default, _aten.neg.default}
"""Of each number alone: looked up for those of 16 bits."""

_DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

_EACH, _ONE, _CONSTANT = range(3)
"""As in program.h, the kind of the second operand."""

_WIDTH = 16
"""Numbers of a step: its kind, whether it is ready, its arguments."""

_CALL = 3
"""Of these the address of the numbers of a call."""


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


_END, _NOTHING = _step("following", (), is_ready=False), _step("looked up", (0, 0))


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
        self._thread = get_ident()  # others may compute logits meanwhile

    def note(self, kind: str, arguments: Sequence[int], kept: Sequence[Any]) -> None:
        if get_ident() != self._thread:
            return
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

    def _note_native(self, func: Any, made: Any, first: Any, second: Any = None, *rest: Any) -> bool:
        """Note what the compiled library has; returns whether it does."""
        tensors = [tensor for tensor in (made, first, second) if isinstance(tensor, torch.Tensor)]
        dtype = self._kernels.dtypes.get(first.dtype) if isinstance(first, torch.Tensor) else None
        if dtype is None or not all(it.is_contiguous() and it.dtype == first.dtype for it in tensors):
            return False
        if func in _OF_EACH and first.itemsize == 2:
            arguments = () if second is None else (second, *rest)
            table = _table(func, arguments, first.dtype)
            addresses = first.data_ptr(), table.data_ptr(), made.data_ptr()
            self.note("looked up", (dtype, made.numel(), *addresses), (table,))
            return True
        if func not in _WITH_TWO or rest:
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
        self._numbers = array("q", [number for step in (*noted.steps, _END) for number in step])

    def only_call(self, kind: str) -> array[int] | None:
        """The numbers of the call of this kind, if there is one."""
        calls = [numbers[_CALL] for numbers in self.steps if STEPS[numbers[0]] == kind]
        kept = {part.buffer_info()[0]: part for part in self.kept if isinstance(part, array)}
        return kept[calls[0]] if len(calls) == 1 else None

    def __call__(self) -> None:
        begin, end = 0, len(self.steps)
        while (begin := self._kernels.run_program(self._numbers, begin)[0]) < end:
            if begin not in self.calls:
                raise UnsureError
            self.calls[begin]()
            begin += 1


class Notes:
    """A Recorder for a CPU: what is recorded runs, too."""

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


def use_programs(model: PreTrainedModel, kernels: Kernels) -> None:
    """In those MoE layers of a loaded model where it is found to be possible, from the first token that is decoded on.
    `kernels` counts as for graphs.
    """
    if kernels.library is not None:
        use_graphs(model, kernels, Notes(kernels), LayerProgram)


class LayerProgram(LayerGraphs):
    """The program of one layer."""

    most_tokens = 4  # of each number of tokens a layer keeps the memory of what it computes
    caches = LayerGraphs.caches | {PagedAttentionCache}

    _steps: array[int] | None = None  # of what was recorded, with attention and experts between
    _projected: array[int] | None = None  # the call that puts keys and values into the cache
    _asked_router: array[int] | None = None  # the router's call
    _chosen: ChosenExperts | None = None
    _native_as: Any = None  # the attention of transformers that was native, whatever the mask
    _row: _LastRow | None = None
    _page: _LastPage | None = None
    _is_attended = _ran_mixed = False  # whether the token's attention, its experts ran as steps
    _early: Any = None  # what the next router says of this one's input, [T, E], and the memory of the step that asks it
    _notes_lookahead = False  # whether that is all that a predictor looks at
    _looks_ahead = False  # whether the step of the experts runs only if all that will be predicted is resident
    _ran: RanStep

    def run(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        return run_programs((self,), hidden, (kwargs,))

    def prepare(self, kwargs: dict[str, Any], may_run: bool) -> array[int]:
        """Have those steps run by themselves that need nobody for this token; experts where they `may_run`, or look
        ahead for whoever looks at the router. Returns all of them.
        """
        steps = self._assemble() if self._steps is None else self._steps
        self._is_attended = steps[self._at_attention * _WIDTH + 1] = self._goes_on(kwargs) or self._place(kwargs)
        self._ran_mixed = self._chosen is not None
        if self._ran_mixed:
            is_seen = self.router._forward_hooks and watchers(self.router)  # by a predictor: else it would not run
            steps[self._at_experts * _WIDTH + 1] = self._looks_ahead if is_seen else may_run
        return steps

    def hold(self, is_quiet: bool) -> bool:
        """Of a layer that looks ahead, have the experts run by themselves only if it `is_quiet`. Whether it is one."""
        if self._ran_mixed and self._looks_ahead and self._steps is not None:
            self._steps[self._at_experts * _WIDTH + 1] &= is_quiet
        return self._ran_mixed

    def take(self, step: int, kwargs: dict[str, Any]) -> None:
        """A step that did not run by itself."""
        if step == self._at_attention:
            self._attend(kwargs)
        elif step == self._at_experts:
            scores = None if self._early is None else self._early[0]
            if self._notes_lookahead and self._experts._expertly_runtime.note_lookahead(self._layer, scores):
                self._at.mixed.copy_(self._experts(self._at.chosen[0], *map(torch.clone, self._at.chosen[1:])))
            else:
                mix(self._at, self.router, self._experts)
            self._ran_mixed = False
        elif step in self._calls:
            self._calls[step]()
        elif step != self._at_experts - 1:  # what that asks for is there, if not the choice
            at = self._at
            args, named = at.routed[:2]
            for place, part in zip(at.routed[2], self.router.forward(*args, **named), strict=True):
                place.copy_(part)

    def take_back(self, kwargs: dict[str, Any]) -> None:
        """The places of keys and values, which are not filled as a layer before failed."""
        if self._is_attended and type(kwargs[CACHE]) is DynamicCache:
            kept, num_tokens = kwargs[CACHE].layers[self._attention.layer_idx], self._at.hidden.shape[1]
            kept.keys, kept.values = kept.keys[:, :, :-num_tokens], kept.values[:, :, :-num_tokens]

    def goes_on_with(self, following: LayerProgram) -> bool:
        """Whether the following program reads what this one gives, after the last step, which hands it over."""
        steps, read = ((it._assemble() if it._steps is None else it._steps) for it in (self, following))
        out, hidden = self._at.out, following._at.hidden
        if (out.shape, out.dtype) != (hidden.shape, hidden.dtype) or not out.is_contiguous():
            return False
        arguments = out.nbytes, out.data_ptr(), hidden.data_ptr(), read.buffer_info()[0]
        steps[-_WIDTH:] = array("q", _step("following", arguments))
        if following._asked_router is not None and watchers(self.router):
            self._ask_early(following._asked_router, following._at.hidden.dtype)
        return True

    def _ask_early(self, asked: array[int], dtype: torch.dtype) -> None:
        """Where a predictor looks at that alone, have the step before the experts ask the next router about this one's
        input, as `asked` asks it about its own.
        """
        x, table = next(iter(self._at.routed[0]), None), self._experts._expertly_runtime.lookahead_table(self._layer)
        if table is None or x is None or x.dtype != dtype or tuple(x.shape) != tuple(asked[:2]):
            return
        if not x.is_contiguous():
            return
        call, scores = array("q", asked), torch.empty(asked[0], asked[2])
        for_nobody = [torch.empty(scores.shape, dtype=torch.int64) for _ in range(3)]  # logits, weights and ids
        call[6], call[9:] = x.data_ptr(), array("q", [tensor.data_ptr() for tensor in (*for_nobody, scores)])
        step, begin = _step("router", (self._shared.kernels.dtypes[dtype], call.buffer_info()[0])), self._at_experts - 1
        self._steps[begin * _WIDTH : (begin + 1) * _WIDTH] = array("q", step)  # type: ignore[index]
        self._early, self._notes_lookahead = (scores.numpy(), call, for_nobody), True
        if self._chosen is not None:
            self._looks_ahead = True
            self._chosen.look_ahead(scores, *table)
            layer, hidden, ids, result, numbers, _ = self._ran
            self._ran = layer, hidden, ids, result, numbers, scores.numpy()

    def _assemble(self) -> array[int]:
        """One list of steps from the three that were recorded, with attention and experts between them."""
        at, kernels, (before, between, behind) = self._at, self._shared.kernels, self._replays
        self._layer: int = self._experts._expertly_layer
        self._is_idle = self._more.keys() <= IDLE and self._passed <= IDLE - {"dropout"}  # whoever calls the layer
        scale = at.query.shape[-1] ** -0.5 if self._scaling is None else self._scaling
        self._asked = kernels.attention_call(at.query, at.key, at.attended, self._more.get("s_aux"))
        asks = self._asked.buffer_info()[0], double_bits(scale), double_bits(self._more.get("softcap") or 0.0)
        runtime: Runtime = self._experts._expertly_runtime
        table = runtime.lookahead_table(self._layer)
        self._notes_lookahead = table is not None and not table[-1]  # nothing
        if len(at.chosen[1]) == 1:
            self._chosen = runtime.chosen_experts(self._layer, *at.chosen, at.mixed)
        dtype = kernels.dtypes[at.query.dtype]
        attend = _step("attention", (dtype, *asks), is_ready=False)
        if self._chosen is not None:
            self._ran = self._layer, *at.chosen[:2], at.mixed, self._chosen.numbers, None
            self._looks_ahead = self._notes_lookahead
        mix = _step("experts", () if self._chosen is None else (dtype, self._chosen.address), is_ready=False)
        self._at_attention, self._at_experts = len(before.steps), len(before.steps) + 2 + len(between.steps)
        starts = (0, before), (self._at_attention + 1, between), (self._at_experts + 1, behind)
        self._calls = {start + number: call for start, part in starts for number, call in part.calls.items()}
        every = [*before.steps, attend, *between.steps, _NOTHING, mix, *behind.steps, _END]
        self._steps = array("q", [number for numbers in every for number in numbers])
        self._projected, self._asked_router = before.only_call("projections"), between.only_call("router")
        return self._steps

    def _goes_on(self, kwargs: dict[str, Any]) -> bool:
        """Have attention run where only the number of tokens is other than for the last one; whether it does."""
        row, cache, layer = self._row, kwargs.get(CACHE), self._attention.layer_idx
        if self._page is not None:
            return self._goes_on_in(self._page, cache, kwargs)
        kept = None if row is None or kwargs.get("attention_mask") is not None else row.kept()
        if (
            row is None
            or kept is None
            or type(cache) is not DynamicCache
            or cache.offloading
            or layer >= len(cache.layers)
            or cache.layers[layer] is not kept
            or object.__getattribute__(self._attention.config._expertly_config, "_attn_implementation") != "sdpa"
            or ALL_ATTENTION_FUNCTIONS["sdpa"] is not row.attention
        ):
            return False
        (keys, values), first, second = kept._expertly_rooms, row.memories[0](), row.memories[1]()
        if first is None or keys.memory is not first or values.memory is not second:
            return False
        if kept.keys is not keys.handed_out or kept.values is not values.handed_out:
            return False
        past = kept.keys.shape[2]
        if past >= first.shape[2]:
            return False
        kept.keys = keys.handed_out = first.narrow(2, 0, past + 1)
        kept.values = values.handed_out = second.narrow(2, 0, past + 1)
        assert self._projected is not None
        for number, (address, nbytes) in enumerate(row.places):
            self._projected[number - 7] = address + past * nbytes
        self._asked[4] = self._asked[28] = past + 1
        return True

    def _goes_on_in(self, page: _LastPage, cache: Any, kwargs: dict[str, Any]) -> bool:
        """The same in a paged cache, whose layers are all asked for the same rows."""
        if (
            page.cache() is not cache
            or kwargs.get("block_table") is not None
            or object.__getattribute__(self._attention.config._expertly_config, "_attn_implementation") != "sdpa"
            or ALL_ATTENTION_FUNCTIONS["sdpa"] is not page.attention
        ):
            return False
        write, read = kwargs["write_index"][page.index], kwargs["read_index"][page.index]
        mask, rows = kwargs.get("attention_mask"), self._shared.rows
        if rows is None or write is not rows.write or read is not rows.read or mask is not rows.mask:
            self._shared.rows = rows = _Rows.of(self._shared.kernels, self._at.query, write, read, mask)
        if rows is None:
            return False
        for place, number in zip(SEEN, rows.seen, strict=True):
            self._asked[place] = number
        assert self._projected is not None
        for number, (address, nbytes) in enumerate(page.places):
            self._projected[number - 7] = address + rows.first * nbytes
        return True

    def _place(self, kwargs: dict[str, Any]) -> bool:
        """Have attention run where the KV cache has room for the tokens and nobody asks for what the kernel is not;
        whether it does.
        """
        cache: Any = kwargs.get(CACHE)
        projected, mask = self._projected, kwargs.get("attention_mask")
        if projected is None:
            return False
        at, layer, num_tokens, positions = self._at, self._attention.layer_idx, self._at.hidden.shape[1], None
        keys = values = at.key
        room: Sequence[torch.Tensor] | None = None
        first = 0
        kernels = self._shared.kernels
        if type(cache) is not DynamicCache:
            kept = paged(cache, layer, at.key, kwargs) if num_tokens == 1 else None
            if kept is None or kept[2].numel() != 1:
                put_into(projected, None, 0)
                return False
            keys, values, row, positions = kept
        elif mask is not None:  # for more keys than there are
            keys = values = keys[:, :, :1].expand(-1, -1, cache.get_seq_length(layer) + num_tokens, -1)
        name = object.__getattribute__(self._attention.config._expertly_config, "_attn_implementation")
        usual = ALL_ATTENTION_FUNCTIONS[name] if name == "sdpa" and self._is_idle else None
        if usual is not None and usual is self._native_as:
            num_keys = keys.shape[2] if positions is None else positions.numel()
            is_known = is_native_mask(kernels, at.query, mask, num_keys)
        else:
            more = self._more | {name: kwargs[name] for name in self._passed}
            how = self._scaling, more, True, positions
            is_known = is_native(self._attention, at.query, keys, values, mask, *how)
            self._native_as = usual if is_known else None
        if is_known and positions is not None:
            room, first = (keys, values), int(row)
        elif is_known:
            room = places(cache, layer, at.hidden, at.key.shape[1], at.key.shape[3])
            keys, values = room or (keys, values)
            first = keys.shape[2] - num_tokens
        factors = None if room is None else factors_of(cache, layer)
        put_into(projected, room, first, factors)
        if room is not None:
            point_at(self._asked, keys, values, mask, kernels.dtypes, positions, factors)
        is_last = usual is not None and room is not None and cache is not None and num_tokens == 1
        self._row = _LastRow(cache.layers[layer], usual) if is_last and mask is None and positions is None else None
        self._page = _LastPage(cache, layer, usual) if is_last and positions is not None else None
        return room is not None


class _LastRow:
    """Where a token's keys and values went that saw all tokens: those of the next one go into the row behind. It keeps
    no cache alive.
    """

    def __init__(self, kept: Any, attention: Any) -> None:
        """`kept`: a RoomyLayer; `attention`: of transformers, which is native."""
        memories = [room.memory for room in kept._expertly_rooms]
        self.kept, self.attention, self.memories = ref(kept), attention, [ref(memory) for memory in memories]
        self.places = [(memory.data_ptr(), memory.stride(2) * memory.element_size()) for memory in memories]


class _LastPage:
    """The same of a paged cache."""

    def __init__(self, cache: Any, layer: int, attention: Any) -> None:
        self.index, *memories = cache._expertly_views[layer]
        self.cache, self.attention = ref(cache), attention
        self.places = [(memory.data_ptr(), memory.stride(2) * memory.element_size()) for memory in memories]


class _Rows:
    """Of a paged cache's layers, what a pass with one token writes and reads, and its mask."""

    @classmethod
    def of(
        cls, kernels: Kernels, query: torch.Tensor, write: torch.Tensor, read: torch.Tensor, mask: torch.Tensor | None
    ) -> _Rows | None:
        """None: the kernel is not for these."""
        num_read = read.numel()
        is_plain = write.numel() == 1 and num_read and read.dtype == torch.int64 and read.is_contiguous()
        if not is_plain or not is_native_mask(kernels, query, mask, num_read):
            return None
        return cls(kernels, write, read, mask)

    def __init__(self, kernels: Kernels, write: torch.Tensor, read: torch.Tensor, mask: torch.Tensor | None) -> None:
        self.write, self.read, self.mask = write, read, mask
        self.first, self.seen = int(write), seen(read.numel(), read, mask, kernels.dtypes)


def _hold_next(programs: Sequence[LayerProgram], runtime: Runtime) -> None:
    """Have the experts of the next layer run by themselves only if the scheduler is quiet; they leave it so."""
    is_quiet = runtime.is_quiet()
    any(program.hold(is_quiet) for program in programs)  # up to the first that has experts


def run_programs(
    programs: Sequence[LayerProgram], hidden: torch.Tensor, calls: Sequence[dict[str, Any]]
) -> torch.Tensor:
    """What layers give, each of which is called with the output of the one before. What leaves the last is copied: the
    next token is computed in the same memory.
    """
    first, last = programs[0], len(programs) - 1
    kernels, runtime = first._shared.kernels, first._experts._expertly_runtime
    first._at.hidden.copy_(hidden)
    first._shared.rows = None
    may_run = runtime.may_run()
    steps = [program.prepare(kwargs, may_run) for program, kwargs in zip(programs, calls, strict=True)]
    if not may_run:
        _hold_next(programs, runtime)
    number, end = 0, len(steps[last]) // _WIDTH - 1
    step, num_further = kernels.run_program(steps[0], 0, last)
    while True:
        is_end = number + num_further == last and step == end
        ran = []
        for program in programs[number : number + num_further + is_end]:
            if program._ran_mixed:
                ran.append(program._ran)
            kernels.counts.programs += 1
            kernels.counts.attention += program._is_attended
        if ran:
            runtime.ran(ran)
        if is_end:
            return programs[last]._at.out.clone()  # type: ignore[no-any-return]
        number += num_further
        try:
            programs[number].take(step, calls[number])
        except BaseException:
            for program, kwargs in zip(programs[number + 1 :], calls[number + 1 :], strict=True):
                program.take_back(kwargs)
            raise
        if not may_run and step == programs[number]._at_experts:
            _hold_next(programs[number + 1 :], runtime)
        step, num_further = kernels.run_program(steps[number], step + 1, last - number)
