"""Runs the experts of a model, one forward pass at a time. The model's layers call it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # those of `signal` make enums: 25 us a layer
from _signal import signal as set_handler
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from expertly.core.errors import NAN_REASONS, EngineClosedError, ModelUseError, NanError, TransferError
from expertly.core.messages import Phase, RouterRan, group_by_expert
from expertly.core.observation import IterationInfo
from expertly.engine.compute import Dispatch
from expertly.engine.device import Device
from expertly.engine.executor import Executor
from expertly.engine.shard import Choice
from expertly.model.hooks import RanStep
from expertly.native.kernels import ChosenExperts
from expertly.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from expertly.engine.cuda import CudaDevice
    from expertly.engine.observe import Prefetching

_KEPT_NBYTES = 64 << 10
"""Hidden states of one layer up to this size are kept whole until the next pass, to find where NaN began."""


_Ran = tuple[int, torch.Tensor, torch.Tensor]
"""A layer, and its inputs and outputs as `_traced` keeps them."""


class Observer(Protocol):
    """The engine tells it of each forward pass, in order. The forward pass raises its exceptions."""

    @property
    def wants_token_ids(self) -> bool:
        """Whether each `IterationInfo` is to have the token of each row."""

    def begin_iteration(self, info: IterationInfo) -> None:
        """A forward pass begins; `info` says the token and the sequence of each row."""

    def router_ran(
        self, layer: int, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> None:
        """A layer is about to run with these inputs [T, H], ids [T, K] and weights [T, K].

        Ids that are `num_experts` or more choose no expert. The tensors are the model's own: do not write to them.
        """

    def end_iteration(self, ok: bool) -> None:
        """The pass ended; `ok` is False when it raised."""


class Engine:
    """The `model.hooks.Runtime` of one model. One forward pass at a time."""

    def __init__(self, executor: Executor, damage: Callable[[int | None], str | None] = lambda layer: None) -> None:
        """`damage(layer)`: what is wrong in the store with a layer's experts (of None: with the dense part), or None
        where nothing is. NaN may come from it.
        """
        self.executor = executor
        self.shard = executor.shard
        """This machine's part of the executor."""
        self.observer: Observer | None = None
        self.prefetching: Prefetching | None = None
        self.is_unwanted: Callable[[], bool] = lambda: False
        """Asked before the experts of a layer, unless a program runs them. If true, the pass raises RuntimeError."""
        self.num_passes = dict.fromkeys(Phase, 0)
        self.num_tokens = dict.fromkeys(Phase, 0)
        self._damage = damage
        self._info: IterationInfo | None = None
        self._trail: list[_Ran] = []  # of a pass, to find where NaN began when it ends with NaN
        self._unseen = _Unseen(executor.shard.device)
        self._is_closed = False
        self._is_stopped = False
        self._deferred_interrupts = DeferredInterrupts()
        self._process = os.getpid()

    @property
    def scheduler(self) -> Scheduler:
        return self.shard.scheduler

    @property
    def device(self) -> Device:
        return self.shard.device

    def preload(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Load and keep every expert; `progress(done_nbytes, total_nbytes)`."""
        geometry, done = self.executor.geometry, 0
        for layer in range(geometry.num_layers):
            self.shard.preload(layer)
            done += geometry.layers[layer].nbytes
            if progress is not None:
                progress(done, geometry.nbytes)

    # -- Runtime -----------------------------------------------------------------------------------------------

    @property
    def wants_token_ids(self) -> bool:
        """Only an observer or a predictor needs them."""
        return self.prefetching is not None or (self.observer is not None and self.observer.wants_token_ids)

    def begin_iteration(self, info: IterationInfo) -> None:
        self._check_open()
        with self._deferred_interrupts:
            self.executor.begin()
            if self.prefetching is not None:
                try:
                    self.prefetching.begin(info)
                except BaseException:
                    self._abandon()
                    raise
        self._info = info
        self._trail.clear()
        if self.observer is not None:
            self.observer.begin_iteration(info)

    def check_output(self, hidden_states: torch.Tensor) -> None:
        """Raises NanError naming the layer that made the first NaN, where a row that is not padding has one."""
        self._unseen.bring()
        if not self._may_have_nan(hidden_states):
            return
        is_nan = hidden_states.isnan().any(dim=-1).reshape(-1).cpu()
        is_pad = None if self._info is None else self._info.is_pad
        if is_pad is not None:
            is_nan &= ~torch.tensor(is_pad)
        if bool(is_nan.any()):
            place, layer = _first_nan(self._trail, is_nan)
            raise NanError(f"{place}: {self._damage(layer) or NAN_REASONS}")

    def check_logits(self, logits: torch.Tensor) -> None:
        """Raises NanError where every row has NaN, as with NaN in the head's weights; one row may be padding."""
        if self._may_have_nan(logits[..., -1, :]) and bool(logits.isnan().any(dim=-1).all()):
            raise NanError(f"the model's head gave NaN: {self._damage(None) or NAN_REASONS}")

    def _may_have_nan(self, values: torch.Tensor) -> bool:
        """False where there is none; True also where infinities cancel out. The host waits for the device once."""
        return math.isnan(self.shard.to_host(values.sum()))

    def end_iteration(self, ok: bool) -> None:
        info, self._info = self._info, None
        with self._deferred_interrupts:
            self._count_unseen(info)
            self.executor.settle()
        if self.observer is not None:
            self.observer.end_iteration(ok)
        with self._deferred_interrupts:
            if self.prefetching is not None:
                self.prefetching.end(ok)
        if info is None or not ok:
            return
        is_real = True if info.is_pad is None else ~info.is_pad
        self.num_passes[Phase(info.phase)] += 1
        self.num_tokens[Phase.PREFILL] += int((info.is_prefill & is_real).sum())
        self.num_tokens[Phase.DECODE] += int((~info.is_prefill & is_real).sum())

    def forward_experts(
        self,
        module: nn.Module,
        layer: int,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """[T, H] from hidden states [T, H], chosen experts [T, K] and their weights [T, K].

        Raises TransferError when experts could not be loaded; the layer is undone and the next pass may work.
        """
        if self._is_stopped or os.getpid() != self._process:
            self._check_open()
        if self.is_unwanted():
            raise RuntimeError("nobody waits for this pass")
        if torch.is_grad_enabled():
            if hidden_states.requires_grad:
                raise ModelUseError("the experts come and go: gradients cannot be computed; use torch.no_grad()")
            with torch.no_grad():
                return self.forward_experts(module, layer, hidden_states, top_k_index, top_k_weights)
        if self.observer is not None:
            self.observer.router_ran(layer, hidden_states, top_k_index, top_k_weights)
        with self._deferred_interrupts:
            executor, shard, prefetching = self.executor, self.shard, self.prefetching
            if self._unseen.layers and not shard.device.queues_uses:
                self._count_unseen(self._info)  # before the next decision
            begin, early = shard.stamp(), None
            if shard.begins_early:
                early = shard.begin_early(layer, hidden_states, top_k_index, is_seen=not self.may_run())
            if early is None:
                ids = shard.to_host(top_k_index)
            elif early.choice is not None:  # resident experts are queued; the scheduler decides about the rest
                ids, mark = early.choice
                cast("CudaDevice", shard.device).streams.wait_for(mark)
            else:  # all experts are queued
                result = shard.kernels.combine(early.outputs, top_k_weights, hidden_states.dtype)
                self._trail.append(_traced(layer, hidden_states, result))
                self._unseen.layers.append((layer, top_k_index, begin, shard.stamp(), None))
                return result
            work = dispatch(layer, ids, executor.geometry.layers[layer].num_experts, self._info)
            try:
                routed = None
                if prefetching is not None:
                    routed = prefetching.routed(work.router, top_k_index, top_k_weights)
                outputs, waits = executor.run_layer(work, hidden_states, routed, early)
            except BaseException as error:
                self._abandon()
                if isinstance(error, OSError):
                    raise TransferError(f"layer {layer}: reading experts failed: {error}") from error
                raise
            result = shard.kernels.combine(outputs, top_k_weights, hidden_states.dtype)
            self._trail.append(_traced(layer, hidden_states, result))
            executor.note_times(work.router, begin, shard.stamp(), waits)
            return result

    def chosen_experts(self, layer: int, *tensors: torch.Tensor) -> ChosenExperts | None:
        return self.shard.chosen_experts(layer, tensors) if self.shard is self.executor else None

    def may_run(self) -> bool:
        is_seen = self.observer is not None or self.prefetching is not None or self._info is None
        return not (is_seen or self._is_stopped) and os.getpid() == self._process

    def lookahead_table(self, layer: int) -> tuple[int, int, int] | None:
        if self.prefetching is None or self.shard is not self.executor or self.device.queues_uses:
            return None
        num_named = self.prefetching.lookahead_width(layer)
        return None if num_named is None else self.shard.lookahead_table(layer, num_named)

    def note_lookahead(self, layer: int, scores: npt.NDArray[np.float32] | None) -> bool:
        if self.prefetching is None or self.observer is not None:
            return False
        self.prefetching.note_lookahead(layer, scores)
        return True

    def is_quiet(self) -> bool:
        if self.prefetching is None or self.observer is not None or self._is_stopped or os.getpid() != self._process:
            return False
        return _is_token(self._info) and self.prefetching.may_defer and self.scheduler.is_quiet

    def ran(self, layers: Iterable[RanStep]) -> None:
        for layer, hidden, ids, result, clock, early in layers:
            self._trail.append((layer, hidden, result))
            self._unseen.layers.append((layer, ids, clock[-2], clock[-1], early))

    def _count_unseen(self, info: IterationInfo | None) -> None:
        """Have the scheduler count the choices of layers that ran without it."""
        shard, unseen = self.shard, self._unseen.take()
        if self._is_closed:
            return
        try:
            if _is_token(info):
                early = repeat(None) if self.prefetching is None else self.prefetching.deferred_predictions(unseen)
                unseen = shard.count_token(unseen, early)
            for layer, ids, begin, end, _ in unseen:
                router = dispatch(layer, ids, shard.geometry.layers[layer].num_experts, info).router
                shard.count(router)
                shard.note_times(router, begin, end, [])
        except BaseException:
            self._abandon()
            raise

    def stop(self) -> None:
        """From now on no layer begins: a pass that another thread runs fails at its next layer. Idempotent."""
        self._is_stopped = True

    def close(self) -> None:
        """Free threads, files and memory. Idempotent. In a forked child nothing is closed."""
        if self._is_closed:
            return
        self._is_closed = self._is_stopped = True
        if os.getpid() != self._process:  # a forked child, where the engine's threads do not run
            return
        with contextlib.ExitStack() as closing:  # closes the last first, and all of them even if one raises
            closing.callback(self.executor.close)
            if self.prefetching is not None:
                closing.callback(self.prefetching.close)

    # -- when a layer fails --------------------------------------------------------------------------------------------

    def _abandon(self) -> None:
        """Undo the layer and drop all prefetches. Where that fails, no layer begins from now on."""
        was_stopped, self._is_stopped = self._is_stopped, True
        self.executor.abandon()
        self._is_stopped = was_stopped

    def _check_open(self) -> None:
        if self._is_closed or self._is_stopped:
            raise EngineClosedError("this model was unloaded; call expertly.load again")
        if os.getpid() != self._process:
            raise EngineClosedError("this model was loaded before this process was forked; call expertly.load again")


class _Unseen:
    """Choices of layers that ran without the scheduler, because all their experts were resident. They are copied to the
    host together, when the pass waits for the device anyway.
    """

    def __init__(self, device: Device) -> None:
        self.layers: list[Choice] = []
        self._device = device
        self._copy: tuple[torch.Tensor, Any] | None = None

    def bring(self) -> None:
        """Queue one copy for all: it is complete once the host has waited for anything queued after it."""
        if self.layers and self._copy is None and self._device.queues_uses:
            every = torch.cat([ids.reshape(-1) for _, ids, *_ in self.layers])
            self._copy = cast("CudaDevice", self._device).streams.to_host_later(every)

    def take(self) -> list[Choice]:
        """All of them, with ids in host memory."""
        self.bring()
        copy, layers, self._copy, self.layers = self._copy, self.layers, None, []
        if copy is None:
            return layers
        every, mark = copy
        cast("CudaDevice", self._device).streams.reach(mark)
        parts = every.split([ids.numel() for _, ids, *_ in layers])
        both = zip(layers, parts, strict=True)
        return [(layer, part.view(ids.shape), *stamps) for (layer, ids, *stamps), part in both]


def _is_token(info: IterationInfo | None) -> bool:
    """Whether the pass is one token in decode."""
    return info is not None and len(info.is_prefill) == 1 and not info.is_prefill[0] and info.is_pad is None


def _traced(layer: int, hidden: torch.Tensor, result: torch.Tensor) -> _Ran:
    """Inputs and outputs [T, H] of a layer: small ones whole, of larger ones the sum of each row."""
    if hidden.nbytes > _KEPT_NBYTES:
        hidden, result = hidden.sum(dim=-1, keepdim=True), result.sum(dim=-1, keepdim=True)
    return layer, hidden, result


def _first_nan(trail: Sequence[_Ran], rows: torch.Tensor) -> tuple[str, int | None]:
    """A sentence about where the first NaN of these rows [T] came from, and the layer whose experts gave it, if experts
    did.
    """
    for layer, hidden, result in trail:
        if _has_nan(hidden, rows):
            return f"the dense part before the experts of MoE layer {layer} gave NaN", None
        if _has_nan(result, rows):
            return f"the experts of MoE layer {layer} gave NaN", layer
    return "the dense part after the last MoE layer gave NaN", None


def _has_nan(values: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether `rows` [T] of the values have NaN; any row, where the layer had other rows than the pass."""
    is_nan = values.isnan().any(dim=-1).cpu()
    return bool((is_nan & rows if len(is_nan) == len(rows) else is_nan).any())


def dispatch(layer: int, top_k_index: torch.Tensor, num_experts: int, info: IterationInfo | None) -> Dispatch:
    """Group choices [T, K] in host memory by expert. Ids outside 0..E-1 are dropped: their output rows stay zero."""
    num_tokens, top_k = top_k_index.shape
    if num_tokens == 1:
        (ids,) = top_k_index.tolist()
        positions = dict(zip(ids, range(top_k), strict=True))
        if len(positions) == top_k and min(ids) >= 0 and max(ids) < num_experts:
            is_decode, num_real = True, 1
            if info is not None and len(info.is_prefill) == 1:
                is_decode = not info.is_prefill[0]
                num_real = int(info.is_pad is None or not info.is_pad[0])
            router = RouterRan(layer, ids, [num_real] * top_k, [is_decode] * top_k, num_real)
            return Dispatch(router, top_k, top_k, True, None, positions)
    if info is None or len(info.is_prefill) != num_tokens:
        is_prefill = np.full(num_tokens, num_tokens > 1)
        is_real = None
    else:
        is_prefill, is_real = info.is_prefill, None if info.is_pad is None else ~info.is_pad
    router, (grouped, bounds) = group_by_expert(layer, top_k_index.numpy(), num_experts, is_prefill, is_real)
    order = torch.from_numpy(grouped)
    rows = {e: order[bounds[e] : bounds[e + 1]] for e in router.experts}
    num_rows = num_tokens * top_k
    return Dispatch(router, top_k, num_rows, int(bounds[-1] - bounds[0]) == num_rows, rows, None)


# -- interrupts --------------------------------------------------------------------------------------------------------

_SIGNALS = (int(signal.SIGINT), int(signal.SIGTERM))


class DeferredInterrupts:
    """A context in which SIGINT and SIGTERM wait: their handlers run when it ends, so that no exception of theirs stops
    a decision half-way. It is entered often, and not within itself. Only the main thread runs handlers.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}  # kept: an interrupt at the end of a context leaves `_note` in place
        self._waiting: list[int] | None = None  # signals that came within the context; None outside one

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = getsignal(number)
            if callable(handler):  # a signal without one ends the process at once, or does nothing
                self._handlers[number] = self._handlers[number] if handler == self._note else handler
                set_handler(number, self._note)
        self._waiting = []

    def __exit__(self, *error: object) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            for number in _SIGNALS:
                if getsignal(number) == self._note:
                    set_handler(number, self._handlers[number])
            for number in waiting:
                self._handlers[number](number, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._waiting is None:
            self._handlers[number](number, frame)
        elif number not in self._waiting:
            self._waiting.append(number)
