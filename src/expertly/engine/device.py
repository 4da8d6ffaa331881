"""One device: the experts that it computes, the slots that it keeps them in, and who decides over these."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from expertly.core.geometry import Geometry
from expertly.core.messages import Phase, Span
from expertly.core.observation import Began, Routed
from expertly.engine.backend import Backend
from expertly.engine.compute import LayerCompute, PartialExpert
from expertly.engine.configuring import Configuring
from expertly.engine.routing import Dispatch
from expertly.engine.step_times import StepTimes
from expertly.native.kernels import choose_kernels
from expertly.scheduler.counters import LayerCounters
from expertly.scheduler.loop import Prefetcher, run_layer
from expertly.scheduler.observations import Channel
from expertly.scheduler.scheduler import Scheduler


class Device:
    """The Executor of a model with one device, and each of the devices of a model with several: then its geometry and
    its numbers of experts are those of its share.
    """

    def __init__(self, name: str, scheduler: Scheduler, backend: Backend) -> None:
        """Raises ConfigError as `choose_kernels`."""
        self.name = name
        self.kernels = choose_kernels(backend.device)
        self.scheduler = scheduler
        self.backend = backend
        self.ahead: Prefetcher | None = None
        self.configuring = Configuring(scheduler) if scheduler.allocation.is_configured else None
        self._layers: list[LayerCompute] = []

    @property
    def geometry(self) -> Geometry:
        return self.scheduler.geometry

    @property
    def devices(self) -> Sequence[Device]:
        return (self,)

    @property
    def num_late(self) -> int:
        """See Executor."""
        return 0 if self.ahead is None else self.ahead.num_late

    def bind(self, modules: Sequence[nn.Module], experts: Sequence[Sequence[int]] | None = None) -> None:
        """See Executor. `experts`: of each layer, the number here -> the number in the module; None: the same."""
        self._layers = [
            LayerCompute(
                module,
                self.geometry.layers[layer],
                self.geometry.segments_per_expert,
                self.backend.rows(layer),
                None if experts is None else experts[layer],
                self.kernels,
            )
            for layer, module in enumerate(modules)
        ]

    def predict_from(self, channel: Channel) -> None:
        """See Executor."""
        self.ahead = Prefetcher(self.scheduler, self.backend, channel, now=time.perf_counter_ns)

    def preload(self, layer: int) -> None:
        """See Executor."""
        for expert in range(self.geometry.layers[layer].num_experts):
            spans = self.scheduler.preload(layer, expert)
            self.backend.submit(spans)
            for _ in spans:
                self.scheduler.loaded(self.backend.wait())

    def begin(self) -> None:
        """See Executor."""
        self.backend.begin()
        if self.configuring is not None:
            self.configuring.begin_iteration()

    def begin_iteration(self, began: Callable[[], Began], layers: range | None) -> None:
        """See Executor."""
        assert self.ahead is not None
        self.ahead.begin_iteration(began, layers)

    def end_iteration(self, ok: bool) -> None:
        """See Executor."""
        assert self.ahead is not None
        self.ahead.end_iteration(ok)

    def run_layer(
        self, work: Dispatch, hidden: torch.Tensor, routed: Callable[[], Routed] | None
    ) -> tuple[torch.Tensor, int]:
        """See Executor. `hidden` is on this device. Of a share of the layer, the outputs are in the order of `work`."""
        backend = self.backend
        runner = _LayerRun(self._layers[work.router.layer], work, hidden)

        def use(spans: Sequence[Span]) -> None:
            if len(spans) > 1 and runner.takes_several:
                runner.compute_together(spans)
            else:
                for span in spans:
                    runner.compute(span)
            for span in spans:
                backend.used(span)

        times = None if self.configuring is None else self.configuring.times
        transport = _TimedTransport(backend) if times is None else _MeasuredTransport(backend)
        compute: Callable[[Sequence[Span]], None] = use
        together = runner.takes_several
        if times is not None and False not in work.router.is_decode:
            compute, together = _timed(use, times), False
        run_layer(self.scheduler, transport, work.router, compute, self.ahead, routed, together=together)
        device_ns = backend.stall_ns()
        if times is not None and isinstance(transport, _MeasuredTransport) and transport.num_segments:
            layer, elapsed_ns = work.router.layer, transport.elapsed_ns + device_ns
            times.loaded(layer, transport.num_segments, elapsed_ns, has_waited=transport.has_waited)
            times.asked(layer, transport.asking_ns)
        return runner.outputs, transport.stall_ns + device_ns

    def note_times(self, layer: int, phase: Phase, stall_ns: int, expert_ns: int) -> None:
        """See Executor."""
        counters = self.scheduler.counters[layer].of(phase)
        counters.stall_ns += stall_ns
        counters.expert_ns += expert_ns
        if self.configuring is not None:
            is_decode, end_ns = phase is Phase.DECODE, time.perf_counter_ns()
            self.configuring.times.ran(layer, is_decode, stall_ns, expert_ns, end_ns)

    def layer_counters(self, layer: int) -> LayerCounters:
        """See Executor."""
        return self.scheduler.counters[layer]

    def abandon(self, is_in_doubt: bool) -> None:
        """See Executor."""
        self.backend.drain()
        self.scheduler.abandon()
        if is_in_doubt:
            self.scheduler.check()

    def close(self) -> None:
        """See Executor."""
        self._layers = []
        if self.configuring is not None:
            self.configuring.close()
        self.backend.close()


def _timed(use: Callable[[Sequence[Span]], None], times: StepTimes) -> Callable[[Sequence[Span]], None]:
    """The same, and how long it took."""

    def measured(spans: Sequence[Span]) -> None:
        (span,) = spans
        start = time.perf_counter_ns()
        use(spans)
        times.computed(span.layer, span.num_segments, time.perf_counter_ns() - start)

    return measured


class _TimedTransport:
    """The backend, with the time waited for it."""

    def __init__(self, backend: Backend) -> None:
        self.submit = backend.submit
        self.poll = backend.poll
        self._wait = backend.wait
        self.stall_ns = 0

    def wait(self) -> Span:
        """See Transport."""
        start = time.perf_counter_ns()
        span = self._wait()
        self.stall_ns += time.perf_counter_ns() - start
        return span


class _MeasuredTransport(_TimedTransport):
    """The same, with how long what was demanded took to come."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.poll = self._counted_poll
        self.submit = self._noted_submit
        self._backend = backend
        self._asked_ns = 0
        self.asking_ns = 0  # what that took the asking thread
        self.elapsed_ns = 0  # from the first demand to the last arrival
        self.has_waited = False  # for that
        self.num_segments = 0  # that have arrived since

    def wait(self) -> Span:
        """See Transport."""
        span = super().wait()
        self._arrived(span, True)
        return span

    def _noted_submit(self, spans: Iterable[Span]) -> None:
        start = time.perf_counter_ns()
        self._asked_ns = self._asked_ns or start
        self._backend.submit(spans)
        self.asking_ns += time.perf_counter_ns() - start

    def _counted_poll(self) -> Span | None:
        span = self._backend.poll()
        if span is not None:
            self._arrived(span, False)
        return span

    def _arrived(self, span: Span, has_waited: bool) -> None:
        if self._asked_ns:
            self.elapsed_ns = time.perf_counter_ns() - self._asked_ns
            self.has_waited = has_waited
            self.num_segments += span.num_segments


class _LayerRun:
    """The outputs of one layer, filled span by span."""

    def __init__(self, compute: LayerCompute, work: Dispatch, hidden: torch.Tensor) -> None:
        compute.begin()
        self._compute = compute
        self._work = work
        self._hidden = hidden if hidden.dtype == compute.dtype else hidden.to(compute.dtype)
        self._partial: dict[int, PartialExpert] = {}
        self.outputs = torch.empty(work.num_rows, hidden.shape[1], dtype=compute.dtype, device=hidden.device)
        if not work.covers_all_rows:
            self.outputs.zero_()

    @property
    def takes_several(self) -> bool:
        """Whether experts that are here can be computed in one call: those of one token, by the compiled products."""
        return self._work.positions is not None and self._compute.is_native(self._hidden)

    def compute_together(self, spans: Sequence[Span]) -> None:
        """Use the bytes of several spans, in one call as far as they are whole experts."""
        assert self._work.positions is not None
        whole = [span for span in spans if span.num_segments == self._compute.num_segments]
        if whole:
            places = [self._work.positions[span.expert] for span in whole]
            self._compute.together(self._hidden, whole, places, self.outputs)
        for span in spans:
            if span.num_segments != self._compute.num_segments:
                self.compute(span)

    def compute(self, span: Span) -> None:
        """Use the bytes of a span: a whole expert at once, else a part of it."""
        compute, expert = self._compute, span.expert
        work, rows = self._work, None
        if work.positions is not None:
            row = work.positions[expert]
            x, out = self._hidden, self.outputs[row : row + 1]
        else:
            assert work.rows is not None
            rows = work.rows[expert]
            x = self._hidden[rows // work.top_k]
            if work.places is None:
                out = torch.empty(len(rows), self._hidden.shape[1], dtype=compute.dtype, device=x.device)
            else:
                out, rows = self.outputs[work.places[expert]], None
        if span.num_segments == compute.num_segments:
            compute.whole(x, span, out)
        else:
            partial = self._partial.get(expert)
            if partial is None:
                partial = self._partial[expert] = PartialExpert(compute, x, out)
            if not partial.add(span):
                return
            out = self._partial.pop(expert).out
        if rows is not None:
            self.outputs[rows] = out
