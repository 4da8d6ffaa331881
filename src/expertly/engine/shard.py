"""One device of a model: the experts that it computes, its slots, and the scheduler that decides about them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan, Span
from expertly.core.observation import Floats, Routed
from expertly.engine.compute import EARLY_TOKENS, Dispatch, Early, LayerCall, LayerCompute
from expertly.engine.device import Device, kind_of
from expertly.engine.step_times import StepTimes
from expertly.native.kernels import ChosenExperts, choose_kernels
from expertly.policies.prediction import Predictor
from expertly.scheduler.counters import LayerCounters, PhaseCounters
from expertly.scheduler.loop import Prefetcher, run_layer
from expertly.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from expertly.engine.cuda import CudaDevice

Choice = tuple[int, torch.Tensor, Any, Any, "Floats | None"]
"""A layer, the ids [T, K] that it chose, stamps before and after it, and what the next router said early, if it did."""

Waits = list[tuple[Any, Any]]
"""Pairs of stamps, before and after each time that a layer waited for a transfer."""


class Moments:
    """Turns device stamps into nanoseconds, in order, when the device has reached them; never waits."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._noted: deque[tuple[Any, Any, Waits, Callable[[int, int, int], None]]] = deque()
        self._last: Any = None  # the last stamp that was turned into nanoseconds
        self._last_ns = 0  # its time

    def note(self, begin: Any, end: Any, waits: Waits, tell: Callable[[int, int, int], None]) -> None:
        """Call `tell(begin_ns, end_ns, waited_ns)` when the device has reached `end`."""
        if self._device.queues_uses:
            self._noted.append((begin, end, waits, tell))
            self.settle()
        else:
            tell(begin, end, sum([stop - start for start, stop in waits]) if waits else 0)

    def settle(self) -> None:
        """Call `tell` for all stamps that the device has reached by now."""
        between_ns = self._device.between_ns
        while self._noted:
            begin, end, waits, tell = self._noted[0]
            length_ns = between_ns(begin, end)
            if length_ns is None:
                return
            self._noted.popleft()
            since_ns = 0 if self._last is None else between_ns(self._last, begin) or 0
            begin_ns = self._last_ns + since_ns
            self._last, self._last_ns = end, begin_ns + length_ns
            tell(begin_ns, self._last_ns, sum(between_ns(*pair) or 0 for pair in waits))

    def drop(self) -> None:
        """Forget the stamps that the device has not reached."""
        self._noted.clear()


class Shard:
    """A device with its scheduler. It is the Executor of a model without workers; with workers, geometry and expert
    numbers are those of its share.
    """

    def __init__(self, name: str, scheduler: Scheduler, device: Device) -> None:
        """Raises ConfigError as `choose_kernels` does."""
        self.name = name
        self.kernels = choose_kernels(runs_on_host=kind_of(device.torch_device).runs_on_host)
        self.scheduler = scheduler
        self.device = device
        self.stamp, self.to_host = device.stamp, device.to_host
        self.moments = Moments(device)
        self.geometry: Geometry = scheduler.geometry
        self.prefetcher: Prefetcher | None = None
        self.times = StepTimes(scheduler) if scheduler.allocation.is_configured else None
        self._pass_stamp: Any = None  # when the pass began, if passes are timed
        self.remotes: Sequence[Any] = ()  # only a Cluster has any
        self._layers: list[LayerCompute] = []
        self.begins_early = device.queues_uses and self.times is None
        """Whether layers may begin before the host knows which experts are chosen: the device is a CudaDevice."""
        self._stays_full = False  # all experts are resident, and none is ever evicted

    @property
    def shard(self) -> Shard:
        return self

    def bind(self, modules: Sequence[nn.Module], experts: Sequence[Sequence[int]] | None = None) -> None:
        """Attach the experts modules, in layer order. `experts[layer][number]` is the number in the module of an expert
        of this shard; None: the same number.
        """
        held = [None] * len(modules) if experts is None else experts
        num_segments, device = self.geometry.segments_per_expert, self.device
        self._layers = [
            LayerCompute(module, shape, num_segments, device.rows(layer), device.dtype, numbers, self.kernels)
            for layer, (module, shape, numbers) in enumerate(zip(modules, self.geometry.layers, held, strict=True))
        ]

    def use_predictor(self, predictor: Predictor) -> Prefetcher:
        """From now on prefetch what this predictor says. It learns of passes from the Prefetcher that is returned."""
        device = self.device.torch_device
        beside = kind_of(device).beside(device)  # observations are complete: what is queued since need not end
        self.prefetcher = Prefetcher(self.scheduler, self.device, predictor, beside)
        return self.prefetcher

    def preload(self, layer: int) -> None:
        """Load and keep every expert of a layer, before anything ran."""
        for expert in range(self.geometry.layers[layer].num_experts):
            spans = self.scheduler.preload(layer, expert)
            self.device.submit(spans)
            for _ in spans:
                self.scheduler.loaded(self.device.wait())

    def begin(self) -> None:
        """A forward pass begins. Raises ModelUseError where the device cannot run one now (a CUDA
        graph is captured).
        """
        self.device.begin()
        if self.begins_early and not self._stays_full:  # a device with all experts evicts none
            self._stays_full = not self.scheduler.allocation.is_online and None not in self.scheduler.cache.whole
        if self.times is not None:
            self._pass_stamp = self.device.stamp()
            if self.scheduler.allocation.is_due and self.times.is_known:
                self.scheduler.configure(self.times.timing())

    def begin_early(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, *, is_seen: bool) -> Early | None:
        """Queue the kernels of those chosen experts `ids` [T, K] that are resident, on hidden states [T, H], before the
        host knows the choice; `run_layer` does the rest. None where this layer does not begin early. If all experts
        stay resident and nobody reads the choice (not `is_seen`), only `count` is left.
        """
        compute = self._layers[layer]
        if compute.slot_kernels is None or compute.norm is not None or len(hidden) > EARLY_TOKENS:
            return None
        first = self.geometry.first_ids[layer]
        spans = self.scheduler.cache.whole[first : first + self.geometry.layers[layer].num_experts]
        if not any(spans):
            return None
        choice = None
        if is_seen or not self._stays_full:  # queued before the kernels, the copy does not wait for them
            choice = cast("CudaDevice", self.device).streams.to_host_later(ids)
        return compute.begin_early(hidden, ids, spans, choice)

    def chosen_experts(self, layer: int, tensors: Sequence[torch.Tensor]) -> ChosenExperts | None:
        """A program's step that computes a token's experts without the scheduler if all of them are resident. None
        where the scheduler has to decide before each layer.
        """
        scheduler = self.scheduler
        if self.device.queues_uses or self.times is not None or scheduler.allocation.is_online:
            return None
        first, table = self.geometry.first_ids[layer], scheduler.cache.first_slot
        address = table.buffer_info()[0] + first * table.itemsize
        return self._layers[layer].chosen(address, self.geometry.layers[layer].num_experts, tensors)

    def count_token(self, choices: list[Choice], predictions: Iterable[Prediction | None]) -> list[Choice]:
        """Count a decoded token's choices that layers computed without the scheduler, and what was predicted from each.
        Returns the choices that are left for `count`.
        """
        if self.device.queues_uses:
            return choices
        layers = [(layer, *ids.tolist(), end - begin) for layer, ids, begin, end, _ in choices]
        return choices[self.scheduler.count_ran(layers, predictions) :]

    def lookahead_table(self, layer: int, num_named: int) -> tuple[int, int, int]:
        """As Runtime.lookahead_table: where the slots of the next layer's experts are, and how many experts it has."""
        if not num_named:
            return 0, 0, 0
        table, first = self.scheduler.cache.first_slot, self.geometry.first_ids[layer + 1]
        address = table.buffer_info()[0] + first * table.itemsize
        return address, self.geometry.layers[layer + 1].num_experts, num_named

    def count(self, router: RouterRan) -> None:
        """Count the choices of a layer that was computed without the scheduler."""
        self._count_early(len(router.experts))
        run_layer(self.scheduler, self.device, router, lambda spans: None, together=True)

    def _count_early(self, num_experts: int) -> None:
        self.kernels.counts.early += num_experts
        self.kernels.counts.native += num_experts

    def run_layer(
        self,
        work: Dispatch,
        hidden: torch.Tensor,
        routed: Callable[[], Routed] | None,
        early: Early | None = None,
    ) -> tuple[torch.Tensor, Waits]:
        """Run a layer's experts on hidden states [T, H], which are on this device. Returns outputs [T * K, H] by row
        (of a share of the layer, in the order of `work`) and the waits for transfers. `routed` is the observation of
        the router; None: the predictor sees nothing. `early`: what `begin_early` returned.

        Raises TransferError or OSError when bytes could not be brought; call `abandon` then.
        """
        device, router = self.device, work.router
        device.waits.clear()
        layer = self._layers[router.layer]
        call = LayerCall(layer, work, hidden, early)
        compute = _using(device, call.compute) if device.queues_uses else call.compute
        if early is not None:
            compute = self._without(early, router.experts, compute)
        run_layer(self.scheduler, device, router, compute, self.prefetcher, routed, together=call.takes_several)
        return call.outputs if layer.norm is None else layer.norm(call.outputs), device.waits[:]

    def _without(
        self, early: Early, experts: Sequence[int], compute: Callable[[Sequence[Span]], None]
    ) -> Callable[[Sequence[Span]], None]:
        """`compute` for experts that `begin_early` has not queued; the slots of the others are unchanged since."""
        done = {span for expert in experts if (span := early.spans[expert]) is not None}
        self._count_early(len(done))
        if done:
            self.device.used(list(done))

        def rest(spans: Sequence[Span]) -> None:
            left = [span for span in spans if span not in done]
            if left:
                compute(left)

        return rest

    def settle(self) -> None:
        """The pass has ended: count the times that the device has reached by now."""
        if self.times is not None:
            passed = partial(self.times.passed, self.scheduler.cache.is_decoding)
            self.moments.note(self._pass_stamp, self.device.stamp(), [], passed)
        self.moments.settle()

    def note_times(self, router: RouterRan, begin: Any, end: Any, waits: Waits) -> None:
        """Count how long a layer's experts took, from `begin` to `end`, and how much of that was waiting."""
        counters = self.scheduler.cache.counters[router.layer]
        phase = counters.decode if self.scheduler.cache.is_decoding else counters.prefill
        if self.device.queues_uses:
            self.moments.note(begin, end, waits, partial(add_times, phase))
        else:
            phase.stall_ns += sum([stop - start for start, stop in waits]) if waits else 0
            phase.expert_ns += end - begin

    def layer_counters(self, layer: int) -> LayerCounters:
        return self.scheduler.counters[layer]

    def abandon(self) -> None:
        """Wait until nothing moves, undo the running layer and drop all prefetches. Raises AssertionError or
        LookupError where an exception had stopped the scheduler half-way through a decision.
        """
        self.device.drain()
        self.moments.drop()
        self.scheduler.abandon()
        self.scheduler.check()

    def close(self) -> None:
        """Free threads, files and memory. Idempotent."""
        self._layers = []
        self.device.close()


def add_times(counters: PhaseCounters, begin_ns: int, end_ns: int, waited_ns: int) -> None:
    counters.stall_ns += waited_ns
    counters.expert_ns += end_ns - begin_ns


def _using(device: Device, compute: Callable[[Sequence[Span]], None]) -> Callable[[Sequence[Span]], None]:
    """`compute`, then tell the device that the spans were used."""

    def use(spans: Sequence[Span]) -> None:
        compute(spans)
        device.used(spans)

    return use
