"""One device of a model: the experts that it computes, its slots, and the scheduler that decides over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

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
    ) -> tuple[torch.Tensor, int]:
        """The outputs of a layer's experts [T * K, H] by row, from hidden states [T, H], and the time that was spent
        waiting for transfers. `routed` is what may be seen of the router; None: nothing. `hidden` is on this device;
        of a share of the layer, the outputs are in the order of `work`.

        Raises TransferError or OSError when bytes could not be brought; nothing runs any more then.
        """
        device, router = self.device, work.router
        waited_ns = device.waited_ns
        call = LayerCall(self._layers[router.layer], work, hidden)
        if self.configuring is not None:
            return self._run_measured(call, work, routed, self.configuring.times)
        compute = _using(device, call.compute) if device.queues_uses else call.compute
        run_layer(self.scheduler, device, router, compute, self.prefetcher, routed, together=call.takes_several)
        return call.outputs, device.waited_ns - waited_ns

    def _run_measured(
        self, call: LayerCall, work: Dispatch, routed: Callable[[], Routed] | None, times: StepTimes
    ) -> tuple[torch.Tensor, int]:
        """The same, with what the configurator wants to know of a decode step's parts."""
        transport, router, before_ns = _MeasuredTransport(self.device), work.router, self.device.waited_ns
        is_decode = False not in router.is_decode
        compute = _using(self.device, call.compute)
        if is_decode:
            compute = _timed(compute, times)
        together = call.takes_several and not is_decode
        run_layer(self.scheduler, transport, router, compute, self.prefetcher, routed, together=together)
        stall_ns = self.device.waited_ns - before_ns
        if transport.num_segments:
            # Where kernels wait for a copy on the device, that is no part of what the host waited for.
            elapsed_ns = transport.elapsed_ns + max(0, stall_ns - transport.waited_ns)
            times.loaded(router.layer, transport.num_segments, elapsed_ns, has_waited=transport.has_waited)
            times.asked(router.layer, transport.asking_ns)
        return call.outputs, stall_ns

    def note_times(self, layer: int, phase: Phase, stall_ns: int, expert_ns: int) -> None:
        """Count how long a forward pass waited for transfers of a layer, and was in its experts in all."""
        counters = self.scheduler.counters[layer]
        of_phase = counters.decode if phase is Phase.DECODE else counters.prefill
        of_phase.stall_ns += stall_ns
        of_phase.expert_ns += expert_ns
        if self.configuring is not None:
            is_decode, end_ns = phase is Phase.DECODE, time.perf_counter_ns()
            self.configuring.times.ran(layer, is_decode, stall_ns, expert_ns, end_ns)

    def layer_counters(self, layer: int) -> LayerCounters:
        return self.scheduler.counters[layer]

    def abandon(self, is_in_doubt: bool) -> None:
        """Undo the layer that runs, once nothing moves, and drop what is prefetched. Raises AssertionError or
        LookupError where a decision was interrupted half-way, which is looked for where that `is_in_doubt`.
        """
        self.device.drain()
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


def _timed(use: Callable[[Sequence[Span]], None], times: StepTimes) -> Callable[[Sequence[Span]], None]:
    """The same, one span at a time, and how long each took."""

    def measured(spans: Sequence[Span]) -> None:
        (span,) = spans
        start = time.perf_counter_ns()
        use(spans)
        times.computed(span.layer, span.num_segments, time.perf_counter_ns() - start)

    return measured


class _MeasuredTransport:
    """The device, with how long what was asked for took to come."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._asked_ns = 0
        self.asking_ns = 0  # what asking took the asking thread
        self.waited_ns = 0
        self.elapsed_ns = 0  # from the first load to the last arrival
        self.has_waited = False  # for that
        self.num_segments = 0  # that have arrived since

    def submit(self, spans: Sequence[Span]) -> None:
        start = time.perf_counter_ns()
        self._asked_ns = self._asked_ns or start
        self._device.submit(spans)
        self.asking_ns += time.perf_counter_ns() - start

    def poll(self) -> Span | None:
        span = self._device.poll()
        if span is not None:
            self._arrived(span, False)
        return span

    def wait(self) -> Span:
        start = time.perf_counter_ns()
        span = self._device.wait()
        self.waited_ns += time.perf_counter_ns() - start
        self._arrived(span, True)
        return span

    def _arrived(self, span: Span, has_waited: bool) -> None:
        if self._asked_ns:
            self.elapsed_ns = time.perf_counter_ns() - self._asked_ns
            self.has_waited = has_waited
            self.num_segments += span.num_segments
