"""One device of a model: the experts that it computes, its slots, and the scheduler that decides over them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from expertly.core.geometry import Geometry
from expertly.core.messages import Phase, Span
from expertly.core.observation import Began, Routed
from expertly.engine.compute import Dispatch, LayerCall, LayerCompute
from expertly.engine.configuring import Configuring, StepTimes
from expertly.engine.device import Device, kind_of
from expertly.native.kernels import choose_kernels
from expertly.scheduler.counters import LayerCounters
from expertly.scheduler.loop import Prefetcher, run_layer
from expertly.scheduler.observations import Channel
from expertly.scheduler.scheduler import Scheduler

Waits = list[tuple[Any, Any]]
"""Stamps around each time that a layer waited for a transfer."""

_HELD_NS = 10_000
"""Where a device works behind the host, passing two stamps takes some time, too: what took less was no waiting."""


class Moments:
    """Stamps of a device as its nanoseconds: told in the order in which they are noted, when it has come there. Nobody
    waits for that.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._noted: deque[tuple[Any, Any, Waits, Callable[[int, int, int], None]]] = deque()
        self._last: Any = None  # a stamp, and when that was
        self._last_ns = 0

    def note(self, begin: Any, end: Any, waits: Waits, tell: Callable[[int, int, int], None]) -> None:
        """`tell(begin_ns, end_ns, waited_ns)`, when the device has come to `end`."""
        if self._device.queues_uses:
            self._noted.append((begin, end, waits, tell))
            self.settle()
        else:
            tell(begin, end, sum([there - here for here, there in waits]) if waits else 0)

    def settle(self) -> None:
        """Tell what can be told by now."""
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
        """Nothing that was noted has happened."""
        self._noted.clear()


class Shard:
    """The Executor of a model with one device, and each of the shards of a model with several: then its geometry and
    its numbers of experts are those of its share. The first shard is where the dense part is.
    """

    def __init__(self, name: str, scheduler: Scheduler, device: Device) -> None:
        """Raises ConfigError as `choose_kernels`."""
        self.name = name
        self.kernels = choose_kernels(runs_on_host=kind_of(device.torch_device).runs_on_host)
        self.scheduler = scheduler
        self.device = device
        self.stamp, self.to_host = device.stamp, device.to_host
        self.moments = Moments(device)
        self.geometry: Geometry = scheduler.geometry
        self.prefetcher: Prefetcher | None = None
        self.configuring = Configuring(scheduler) if scheduler.allocation.is_configured else None
        self.shards: Sequence[Shard] = (self,)
        self._layers: list[LayerCompute] = []

    @property
    def num_late(self) -> int:
        """Predictions that came too late."""
        return 0 if self.prefetcher is None else self.prefetcher.num_late

    def bind(self, modules: Sequence[nn.Module], experts: Sequence[Sequence[int]] | None = None) -> None:
        """Attach the experts modules, in layer order. `experts`: of each layer, the number here -> the number in the
        module; None: the same.
        """
        self._layers = [
            LayerCompute(
                module,
                self.geometry.layers[layer],
                self.geometry.segments_per_expert,
                self.device.rows(layer),
                self.device.dtype,
                None if experts is None else experts[layer],
                self.kernels,
                gathers=not self.device.queues_uses,
            )
            for layer, module in enumerate(modules)
        ]

    def predict_from(self, channel: Channel) -> None:
        """From now on prefetch what this channel predicts."""
        self.prefetcher = Prefetcher(self.scheduler, self.device, channel, now=time.perf_counter_ns)

    def preload(self, layer: int) -> None:
        """Load and keep every expert of a layer, before anything ran."""
        for expert in range(self.geometry.layers[layer].num_experts):
            spans = self.scheduler.preload(layer, expert)
            self.device.submit(spans)
            for _ in spans:
                self.scheduler.loaded(self.device.wait())

    def begin(self) -> None:
        """A forward pass begins. Raises ModelUseError where the device is in a state in which none can run."""
        self.device.begin()
        if self.configuring is not None:
            now = self.device.stamp()
            self.moments.note(now, now, [], self.configuring.times.begin)
            self.configuring.begin_iteration()

    def begin_iteration(self, began: Callable[[], Began], layers: range | None) -> None:
        """Tell who predicts what the pass shows. Raises what predicting raised. Needs `predict_from`."""
        assert self.prefetcher is not None
        self.prefetcher.begin_iteration(began, layers)

    @property
    def observes(self) -> bool:
        """Whether the predictor is to see the pass that began."""
        return self.scheduler.gate is None or self.scheduler.gate.observes

    def end_iteration(self, ok: bool) -> None:
        assert self.prefetcher is not None
        self.prefetcher.end_iteration(ok)

    def run_layer(
        self, work: Dispatch, hidden: torch.Tensor, routed: Callable[[], Routed] | None
    ) -> tuple[torch.Tensor, Waits]:
        """The outputs of a layer's experts [T * K, H] by row, from hidden states [T, H], and when transfers were waited
        for. `routed` is what may be seen of the router; None: nothing. `hidden` is on this device;
        of a share of the layer, the outputs are in the order of `work`.

        Raises TransferError or OSError when bytes could not be brought; nothing runs any more then.
        """
        device, router = self.device, work.router
        device.waits = []
        call = LayerCall(self._layers[router.layer], work, hidden)
        if self.configuring is not None:
            self._run_measured(call, work, routed, self.configuring.times)
            return call.outputs, device.waits
        compute = _using(device, call.compute) if device.queues_uses else call.compute
        run_layer(self.scheduler, device, router, compute, self.prefetcher, routed, together=call.takes_several)
        return call.outputs, device.waits

    def _run_measured(
        self, call: LayerCall, work: Dispatch, routed: Callable[[], Routed] | None, times: StepTimes
    ) -> None:
        """The same, with what the configurator wants to know of a decode step's parts."""
        transport, router = _MeasuredTransport(self.device), work.router
        is_decode = False not in router.is_decode
        compute = _using(self.device, call.compute)
        if is_decode:
            compute = self._timed(compute, times)
        together = call.takes_several and not is_decode
        run_layer(self.scheduler, transport, router, compute, self.prefetcher, routed, together=together)
        if transport.num_segments:

            def loaded(begin_ns: int, end_ns: int, waited_ns: int) -> None:
                has_waited = transport.has_waited and waited_ns >= _HELD_NS
                times.loaded(router.layer, transport.num_segments, end_ns - begin_ns, has_waited=has_waited)

            self.moments.note(transport.asked, transport.arrived, self.device.waits, loaded)
            times.asked(router.layer, transport.asking_ns)

    def _timed(self, use: Callable[[Sequence[Span]], None], times: StepTimes) -> Callable[[Sequence[Span]], None]:
        """The same, one span at a time, and how long each took."""
        stamp, note = self.device.stamp, self.moments.note

        def measured(spans: Sequence[Span]) -> None:
            (span,) = spans
            begin = stamp()
            use(spans)
            note(begin, stamp(), [], lambda begin, end, _: times.computed(span.layer, span.num_segments, end - begin))

        return measured

    def settle(self) -> None:
        """Count the times that are known by now."""
        self.moments.settle()

    def note_times(self, layer: int, phase: Phase, begin: Any, end: Any, waits: Waits) -> None:
        """Count how long a forward pass waited for transfers of a layer, and was in its experts in all."""
        self.moments.note(begin, end, waits, partial(self._ran, layer, phase))

    def _ran(self, layer: int, phase: Phase, begin_ns: int, end_ns: int, waited_ns: int) -> None:
        counters = self.scheduler.counters[layer]
        of_phase = counters.decode if phase is Phase.DECODE else counters.prefill
        of_phase.stall_ns += waited_ns
        of_phase.expert_ns += end_ns - begin_ns
        if self.configuring is not None:
            self.configuring.times.ran(layer, phase is Phase.DECODE, waited_ns, end_ns - begin_ns, end_ns)

    def layer_counters(self, layer: int) -> LayerCounters:
        return self.scheduler.counters[layer]

    def abandon(self, is_in_doubt: bool) -> None:
        """Undo the layer that runs, once nothing moves, and drop what is prefetched. Raises AssertionError or
        LookupError where a decision was interrupted half-way, which is looked for where that `is_in_doubt`.
        """
        self.device.drain()
        self.moments.drop()
        self.scheduler.abandon()
        if is_in_doubt:
            self.scheduler.check()

    def close(self) -> None:
        """Free threads, files and memory. Idempotent."""
        self._layers = []
        if self.configuring is not None:
            self.configuring.close()
        self.device.close()


def _using(device: Device, compute: Callable[[Sequence[Span]], None]) -> Callable[[Sequence[Span]], None]:
    """The same, and the device knows of it."""

    def use(spans: Sequence[Span]) -> None:
        compute(spans)
        for span in spans:
            device.used(span)

    return use


class _MeasuredTransport:
    """The device, with how long what was asked for took to come."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.asking_ns = 0  # what asking took the asking thread
        self.asked: Any = None  # stamps of the first load and of the last arrival
        self.arrived: Any = None
        self.has_waited = False  # for that
        self.num_segments = 0  # that have arrived since

    def submit(self, spans: Sequence[Span]) -> None:
        start = time.perf_counter_ns()
        if self.asked is None:
            self.asked = self._device.stamp()
        self._device.submit(spans)
        self.asking_ns += time.perf_counter_ns() - start

    def poll(self) -> Span | None:
        span = self._device.poll()
        if span is not None:
            self._arrived(span, False)
        return span

    def wait(self) -> Span:
        span = self._device.wait()
        self._arrived(span, True)
        return span

    def _arrived(self, span: Span, has_waited: bool) -> None:
        if self.asked is not None:
            self.arrived = self._device.stamp()
            self.has_waited = has_waited
            self.num_segments += span.num_segments
