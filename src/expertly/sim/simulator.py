"""Runs a system over a workload on a virtual clock: the loop and the control plane are the engine's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from expertly.core.messages import RouterRan, Span
from expertly.core.observation import Want
from expertly.policies.allocation.moepic import Timing
from expertly.policies.predictor import Predictor
from expertly.scheduler.loop import Prefetcher, only_demand, run_layer
from expertly.scheduler.observations import Channel, InlineChannel, ObservationQueue
from expertly.scheduler.scheduler import Scheduler
from expertly.sim.coded import CodedDisk
from expertly.sim.compute import ComputeModel
from expertly.sim.future import TraceFuture
from expertly.sim.hardware import PredictorCosts
from expertly.sim.link import Clock, VirtualLink
from expertly.sim.matcher import MatcherWatcher, VirtualChannel
from expertly.sim.metrics import Metrics
from expertly.sim.workload import Iteration


class Watcher(MatcherWatcher, Protocol):
    """Sees what a simulation does, with its times."""

    def computed(self, what: str, layer: int, begin_ns: int, end_ns: int) -> None:
        """The device computed: "dense", "expert 7" or "head"."""
        ...


class Simulator:
    """One device, one request at a time or the batches of the trace. `run` may be called once.

    Predicting takes what `costs` say, beside the device; without them it takes no time. What is worked out from `times`
    (those of a decode step) takes none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        compute: ComputeModel,
        clock: Clock,
        link: VirtualLink,
        *,
        predictor: Predictor | None = None,
        costs: PredictorCosts | None = None,
        future: TraceFuture | None = None,
        watcher: Watcher | None = None,
        times: Timing | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.metrics = Metrics()
        self.predictor = predictor
        self._compute = compute
        self._clock = clock
        self._link = link
        self._matcher: VirtualChannel | None = None
        self._ahead: Prefetcher | None = None
        self._wants: frozenset[Want] = frozenset()
        if predictor is not None:
            num_layers = scheduler.geometry.num_layers
            channel: Channel = InlineChannel(predictor)
            catch_up = None
            if costs is not None:
                backlog = ObservationQueue.of_layers(num_layers)
                channel = self._matcher = VirtualChannel(predictor, clock, costs, backlog, watcher)
                catch_up = self._matcher.catch_up
            self._ahead = Prefetcher(scheduler, link, channel, catch_up, lambda: clock.now_ns)
            self._wants = predictor.wants
        self._future = future
        self._watcher = watcher
        self._times = times
        self._slowdown = compute.slowdown_while_loading
        self._tokens: dict[int, int] = {}  # of the running layer's experts

    @property
    def coded(self) -> CodedDisk | None:
        """Where experts are read and decoded, if they are stored compressed."""
        return self._link.coded

    @property
    def num_late(self) -> int:
        """Predictions that came when their layer's router had spoken."""
        return 0 if self._ahead is None else self._ahead.num_late

    @property
    def num_dropped(self) -> int:
        """Contexts that the predictor did not get to."""
        return 0 if self._matcher is None else self._matcher.num_dropped

    def preload(self) -> None:
        """Keep every expert before anything runs; takes no time, as it is not part of any request."""
        geometry = self.scheduler.geometry
        for layer in range(geometry.num_layers):
            for expert in range(geometry.layers[layer].num_experts):
                for span in self.scheduler.preload(layer, expert):
                    self.scheduler.loaded(span)

    def run(self, iterations: Iterable[Iteration], progress: Callable[[int], None] | None = None) -> None:
        """Run them all; `progress(rows done)` now and then."""
        clock, future = self._clock, self._future
        for iteration in iterations:
            clock.now_ns = max(clock.now_ns, iteration.arrival_ns)
            if self._times is not None and (job := self.scheduler.configuration_due()) is not None:
                self.scheduler.configure(job(self._times).plan)
            begin, stalled, (hits, demands) = clock.now_ns, self._stall_ns, self._decoded()
            if self._ahead is not None:
                # who knows the future looks beyond the pass
                stack = iteration.stack if future is None else None
                self._ahead.begin_iteration(partial(iteration.began, self._wants), stack)
            for router in iteration.layers:
                if future is not None:
                    future.begin_layer(router.layer)
                self._run_layer(router, iteration)
            if self._ahead is not None:
                self._ahead.end_iteration(True)
            self._spend("head", -1, self._compute.head_ns(iteration.num_tokens))
            now_hits, now_demands = self._decoded()
            self.metrics.add(
                iteration, begin, clock.now_ns, self._stall_ns - stalled, now_hits - hits, now_demands - demands
            )
            if progress is not None and not iteration.index % 256:
                progress(iteration.first_row)
        if self._matcher is not None:
            self._matcher.close()

    @property
    def _stall_ns(self) -> int:
        """Time waited for transfers so far, and for predictions where their transfer is synchronous."""
        return self._link.stall_ns + (0 if self._matcher is None else self._matcher.stall_ns)

    def _decoded(self) -> tuple[int, int]:
        """Hits and demands of decode so far."""
        phases = [counters.decode for counters in self.scheduler.counters]
        return sum([phase.hits for phase in phases]), sum([phase.demands for phase in phases])

    def _run_layer(self, router: RouterRan, iteration: Iteration) -> None:
        num_tokens = iteration.num_tokens
        self._spend("dense", router.layer, self._compute.dense_ns(router.layer, num_tokens))
        if num_tokens > 1:
            self._tokens = dict(zip(router.experts, router.num_tokens, strict=True))
        else:
            self._tokens = {}
        routed = partial(iteration.routed, router, self._wants) if self._wants else only_demand(router)
        run_layer(self.scheduler, self._link, router, self._use, self._ahead, routed)

    def _use(self, spans: Sequence[Span]) -> None:
        (span,) = spans
        num_tokens = self._tokens.get(span.expert, 1) if self._tokens else 1
        duration_ns = self._compute.span_ns(span.layer, num_tokens, span.num_segments)
        begin = self._clock.now_ns
        self._clock.now_ns = begin + duration_ns
        self._link.computing(begin, begin + duration_ns)
        if self._watcher is not None:
            self._watcher.computed(f"expert {span.expert}", span.layer, begin, begin + duration_ns)

    def _spend(self, what: str, layer: int, duration_ns: int) -> None:
        """Compute for so long beside the experts; while the link is busy it takes longer by the slowdown."""
        begin = self._clock.now_ns
        slowdown = 1.0
        if self._slowdown > 1.0:
            busy_ns = self._link.busy_until_ns() - begin
            if busy_ns > 0:
                slow_ns = min(duration_ns * self._slowdown, busy_ns)
                slow_duration_ns = round(slow_ns + duration_ns - slow_ns / self._slowdown)
                slowdown, duration_ns = max(1.0, slow_duration_ns / max(1, duration_ns)), slow_duration_ns
        self._clock.now_ns = begin + duration_ns
        self._link.computing(begin, begin + duration_ns, slowdown)
        if self._watcher is not None:
            self._watcher.computed(what, layer, begin, self._clock.now_ns)
