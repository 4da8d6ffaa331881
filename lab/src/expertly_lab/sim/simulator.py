"""Runs a system over a workload on a virtual clock, with the loop and the scheduler of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from expertly.core.messages import RouterRan, Span
from expertly.core.observation import Routed, Want
from expertly.policies.moepic import Timing
from expertly.policies.prediction import Predictor
from expertly.scheduler.loop import Prefetcher, run_layer
from expertly.scheduler.scheduler import Scheduler
from expertly.scheduler.systems import OVERLAPPED
from expertly_lab.sim.compute import ComputeModel
from expertly_lab.sim.future import TraceFuture
from expertly_lab.sim.link import Clock, SimulationWatcher, VirtualLink, VirtualLinks
from expertly_lab.sim.metrics import Metrics
from expertly_lab.sim.synchronous import WaitingPrefetcher, run_by_id
from expertly_lab.sim.workload import Iteration


class Simulator:
    """Runs one request at a time or the batches of the trace. `run` may be called once. Several devices compute their
    experts side by side and are one cache; the first computes all else, sending between them takes no time, and a
    layer ends when the last of them has computed. A staging slot of theirs is free once its expert is queued.

    Predicting takes no time. Jobs of the allocation are given `times` (those of a decode step) and take none either.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        compute: ComputeModel,
        clock: Clock,
        link: VirtualLink | VirtualLinks,
        *,
        predictor: Predictor | None = None,
        future: TraceFuture | None = None,
        watcher: SimulationWatcher | None = None,
        times: Timing | None = None,
        loop: str = OVERLAPPED,
    ) -> None:
        """`loop`: the system's. With several links there are as many devices, and as many queues of prefetches."""
        self.scheduler = scheduler
        self.link = link
        self.metrics = Metrics()
        self.predictor = predictor
        self._compute = compute
        self.clock = clock
        self._free_ns = [0] * link.num_devices  # when each device has computed what was queued for it
        scheduler.queue.window *= link.num_devices
        self._prefetcher: Prefetcher | None = None
        self._wants: frozenset[Want] = frozenset()
        if predictor is not None:
            kind = WaitingPrefetcher if loop == "synchronous" else Prefetcher
            self._prefetcher = kind(scheduler, link, predictor)
            self._wants = predictor.wants
        self._future = future
        self._watcher = watcher
        self._times = times
        self._is_by_id = loop == "by-id"
        self._span_ns = compute.span_ns
        self._tokens: dict[int, int] = {}  # of the running layer's experts; empty: one of each
        self._hits = self._demands = 0  # of decode, before the running iteration

    def preload(self) -> None:
        """Keep every expert before anything runs. It takes no time, as it is part of no request."""
        geometry = self.scheduler.geometry
        for layer in range(geometry.num_layers):
            for expert in range(geometry.layers[layer].num_experts):
                for span in self.scheduler.preload(layer, expert):
                    self.scheduler.loaded(span)

    def run(self, iterations: Iterable[Iteration], progress: Callable[[int], None] | None = None) -> None:
        """Run them all; `progress(rows done)` now and then."""
        for iteration in iterations:
            self._run_iteration(iteration)
            if progress is not None and not iteration.index % 256:
                progress(iteration.first_row)

    def _run_iteration(self, iteration: Iteration) -> None:
        clock, prefetcher, compute = self.clock, self._prefetcher, self._compute
        num_tokens = iteration.num_tokens
        clock.now_ns = max(clock.now_ns, iteration.arrival_ns)
        if self._times is not None and self.scheduler.allocation.is_due:
            self.scheduler.configure(self._times)
        begin_ns, stalled_ns = clock.now_ns, self.link.stall_ns
        if prefetcher is not None:
            prefetcher.begin_iteration(partial(iteration.began, self._wants))
        for router in iteration.layers:
            layer = router.layer
            if self._future is not None:
                self._future.begin_layer(layer)
            self._spend("dense", layer, compute.dense_ns(layer, num_tokens))
            routed: Callable[[], Routed] | None = None
            if prefetcher is not None:
                routed = partial(iteration.routed, router, self._wants) if self._wants else partial(Routed, router)
            self.run_experts(router, routed)
        if prefetcher is not None:
            prefetcher.end_iteration(True)
        self._spend("head", -1, compute.head_ns(num_tokens))
        of_decode = [counters.decode for counters in self.scheduler.counters]
        hits, demands = sum([counts.hits for counts in of_decode]), sum([counts.demands for counts in of_decode])
        stalled_ns = self.link.stall_ns - stalled_ns
        self.metrics.add(iteration, begin_ns, clock.now_ns, stalled_ns, hits - self._hits, demands - self._demands)
        self._hits, self._demands = hits, demands

    def run_experts(self, router: RouterRan, routed: Callable[[], Routed] | None = None) -> None:
        """Compute the experts of one layer, from now on."""
        self._tokens = {}
        if router.batch_tokens > 1:
            self._tokens = dict(zip(router.experts, router.num_tokens, strict=True))
        prefetcher = self._prefetcher
        if self._is_by_id:
            run_by_id(self.scheduler, self.link, router, self._use)
        elif isinstance(prefetcher, WaitingPrefetcher):
            run_layer(self.scheduler, prefetcher, router, self._use, prefetcher, routed)
        else:
            run_layer(self.scheduler, self.link, router, self._use, prefetcher, routed)
        self.clock.now_ns = max(self.clock.now_ns, self.clock.busy_until_ns)

    def _use(self, spans: Sequence[Span]) -> None:
        clock, free_ns, num_open = self.clock, self._free_ns, self.scheduler.num_open
        for layer, expert, _, num_segments, _ in spans:
            device = self.link.device_of(layer, expert)
            begin = max(clock.now_ns, free_ns[device])
            num_tokens = self._tokens.get(expert, 1) if self._tokens else 1
            free_ns[device] = end = begin + self._span_ns(layer, num_tokens, num_segments)
            clock.busy_until_ns = max(clock.busy_until_ns, end)
            num_open -= num_segments
            is_last = num_open <= 0 and not self.scheduler.deferred
            if is_last or len(free_ns) == 1:  # what is prefetched next may evict experts of this layer
                clock.now_ns = clock.busy_until_ns
            if self._watcher is not None:
                self._watcher.computed(f"expert {expert}", layer, begin, end)

    def _spend(self, label: str, layer: int, duration_ns: int) -> None:
        """Compute for so long, except experts."""
        begin = self.clock.now_ns
        self.clock.now_ns = end = begin + duration_ns
        if self._watcher is not None:
            self._watcher.computed(label, layer, begin, end)
