"""Runs a system over a workload on a virtual clock, with the loop and the scheduler of the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from expertly.core.messages import RouterRan, Span
from expertly.core.observation import Began, Routed, Want
from expertly.policies.allocation.moepic import Timing
from expertly.policies.predictor import Predictor
from expertly.scheduler.loop import Prefetcher, Transport, run_layer
from expertly.scheduler.misses import MissSplit
from expertly.scheduler.observations import InlineChannel, ObservationQueue, Seen, Work
from expertly.scheduler.scheduler import Scheduler
from expertly.sim.compute import ComputeModel
from expertly.sim.decoding import NEVER_NS
from expertly.sim.future import TraceFuture
from expertly.sim.hardware import PredictorCosts
from expertly.sim.link import Clock, SimulationWatcher, VirtualLink
from expertly.sim.metrics import Metrics
from expertly.sim.workload import Iteration

if TYPE_CHECKING:
    from expertly.sim.workers import SimulatedWorkers


class Simulator:
    """One device, which runs one request at a time or the batches of the trace. `run` may be called once.

    Predicting takes the time that `costs` say, beside the device; without costs it takes none. Jobs of the allocation
    are given `times` (those of a decode step) and take no time. `workers` compute their experts while the device
    computes the others, which are all that its scheduler knows.
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
        watcher: SimulationWatcher | None = None,
        times: Timing | None = None,
        workers: SimulatedWorkers | None = None,
        decide_ns: int = 0,
    ) -> None:
        """`decide_ns`: what the system's eviction policy takes of each layer beyond what `compute` has in it."""
        self.scheduler = scheduler
        self.schedulers = [scheduler, *(workers.schedulers if workers is not None else ())]
        self.link = link
        self.metrics = Metrics()
        self.predictor = predictor
        self._compute = compute
        self.clock = clock
        self._predictor_thread: VirtualPredictorThread | None = None
        self._prefetcher: Prefetcher | None = None
        self._wants: frozenset[Want] = frozenset()
        if predictor is not None:
            if costs is None:
                channel = InlineChannel(predictor)
                self._prefetcher = Prefetcher(scheduler, link, channel, None, lambda: clock.now_ns)
            else:
                waiting = ObservationQueue.of_layers(scheduler.geometry.num_layers)
                observe_ns = compute.observe_light_ns if predictor.is_light else compute.observe_ns
                if predictor.is_light and costs.light_ns is not None:
                    costs = replace(costs, call_ns=costs.light_ns)
                if scheduler.is_synchronous:  # the pass itself predicts
                    observe_ns, inline_ns = 0, costs.inline_ns
                    if predictor.is_light and costs.inline_light_ns is not None:
                        inline_ns = costs.inline_light_ns
                    costs = costs if inline_ns is None else replace(costs, call_ns=inline_ns)
                self._predictor_thread = VirtualPredictorThread(
                    predictor, clock, costs, waiting, watcher, observe_ns, compute.plan_ns
                )
                self._prefetcher = _SlowedPrefetcher(scheduler, link, self._predictor_thread, clock, self._spend)
            self._wants = predictor.wants
        self._future = future
        self._watcher = watcher
        self._is_observed = link.decodes_beside_computing or watcher is not None
        self._times = times
        self._workers = workers
        self._host = None if scheduler.split is None else VirtualHost(clock, link, scheduler.split)
        self._slowdown = compute.slowdown_while_loading
        self._decide_ns = decide_ns
        self._span_ns = compute.span_ns
        self._tokens: dict[int, int] = {}  # of the running layer's experts; empty: one of each
        self._hits = self._demands = 0  # of decode, before the running iteration

    @property
    def num_late(self) -> int:
        """Predictions that came after their layer's router ran."""
        return 0 if self._prefetcher is None else self._prefetcher.num_late

    @property
    def num_dropped(self) -> int:
        """Observations that the predictor never read."""
        return 0 if self._predictor_thread is None else self._predictor_thread.num_dropped

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
        if self._predictor_thread is not None:
            self._predictor_thread.close()

    def _run_iteration(self, iteration: Iteration) -> None:
        clock, prefetcher, compute = self.clock, self._prefetcher, self._compute
        num_tokens = iteration.num_tokens
        clock.now_ns = max(clock.now_ns, iteration.arrival_ns)
        if self._times is not None and (job := self.scheduler.allocation.due()) is not None:
            self.scheduler.configure(job(self._times).plan)
        begin_ns, stalled_ns = clock.now_ns, self._stall_ns()
        if prefetcher is not None:
            stack = iteration.stack if self._future is None else None  # who knows the future looks beyond the pass
            prefetcher.begin_iteration(partial(iteration.began, self._wants), stack)
        for router in iteration.layers:
            layer = router.layer
            if self._future is not None:
                self._future.begin_layer(layer)
            self._spend("dense", layer, compute.dense_ns(layer, num_tokens))
            routed: Callable[[], Routed] | None = None
            if prefetcher is not None:
                routed = partial(iteration.routed, router, self._wants) if self._wants else partial(Routed, router)
            if self._workers is None:
                self.run_experts(router, routed)
            else:
                waited_ns = self.link.stall_ns
                part, clock.now_ns = self._workers.begin_layer(router, clock.now_ns)
                self.run_experts(part, routed)
                clock.now_ns = self._workers.end_layer(clock.now_ns, self.link.stall_ns - waited_ns)
        if prefetcher is not None:
            prefetcher.end_iteration(True)
        self._spend("head", -1, compute.head_ns(num_tokens))
        of_decode = [counters.decode for scheduler in self.schedulers for counters in scheduler.counters]
        hits, demands = sum([one.hits for one in of_decode]), sum([one.demands for one in of_decode])
        stalled_ns = self._stall_ns() - stalled_ns
        self.metrics.add(iteration, begin_ns, clock.now_ns, stalled_ns, hits - self._hits, demands - self._demands)
        self._hits, self._demands = hits, demands

    def run_experts(self, router: RouterRan, routed: Callable[[], Routed] | None = None) -> None:
        """Compute the experts of one layer, from now on."""
        if self._decide_ns:
            self._spend("decide", router.layer, self._decide_ns)
        self._tokens = {}
        if router.batch_tokens > 1:
            self._tokens = dict(zip(router.experts, router.num_tokens, strict=True))
        run_layer(self.scheduler, self.link, router, self._use, self._prefetcher, routed, host=self._host)

    def _stall_ns(self) -> int:
        """Time spent waiting for transfers so far and, where transfer is synchronous, for predictions. Of a layer that
        ended with a worker, the time that this worker waited.
        """
        stalled_ns = self.link.stall_ns + (0 if self._workers is None else self._workers.stall_ns)
        return stalled_ns + (0 if self._predictor_thread is None else self._predictor_thread.stall_ns)

    def _use(self, spans: Sequence[Span]) -> None:
        clock = self.clock
        ((layer, expert, _, num_segments, _),) = spans
        begin = clock.now_ns
        num_tokens = self._tokens.get(expert, 1) if self._tokens else 1
        clock.now_ns = end = begin + self._span_ns(layer, num_tokens, num_segments)
        if self._is_observed:
            self.link.computing(begin, end)
            if self._watcher is not None:
                self._watcher.computed(f"expert {expert}", layer, begin, end)

    def _spend(self, what: str, layer: int, duration_ns: int) -> None:
        """Compute for so long, except experts; slower while the link is busy."""
        begin = self.clock.now_ns
        slowdown = 1.0
        if self._slowdown > 1.0:
            busy_ns = self.link.busy_until_ns() - begin
            if busy_ns > 0:
                slow_ns = min(duration_ns * self._slowdown, busy_ns)
                slow_duration_ns = round(slow_ns + duration_ns - slow_ns / self._slowdown)
                slowdown, duration_ns = max(1.0, slow_duration_ns / max(1, duration_ns)), slow_duration_ns
        self.clock.now_ns = end = begin + duration_ns
        if self._is_observed:
            self.link.computing(begin, end, slowdown)
            if self._watcher is not None:
                self._watcher.computed(what, layer, begin, end)


class _SlowedPrefetcher(Prefetcher):
    """What a predictor's thread takes from the pass comes half before the layer that it was shown ends, so that a
    prediction may be there in time, and half after it (bench/fidelity.py: where systems predict, a step takes longer
    outside of its experts by as much as for them and for deciding).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        link: VirtualLink,
        thread: VirtualPredictorThread,
        clock: Clock,
        spend: Callable[[str, int, int], None],
    ) -> None:
        """`spend`: of what is done for which layer, so many nanoseconds of the pass."""
        super().__init__(scheduler, link, thread, thread.catch_up, lambda: clock.now_ns)
        self._link = link
        self._predictor_thread = thread
        self._spend = spend
        self._waited_ns = 0  # for the link, until the running layer's router was shown

    def router_ran(self, routed: Callable[[], Routed] | None) -> None:
        self._waited_ns = self._link.stall_ns
        super().router_ran(routed)

    def layer_ended(self, transport: Transport) -> None:
        takes_ns = self._predictor_thread.layer_ended(self._link.stall_ns - self._waited_ns)
        if not takes_ns:
            super().layer_ended(transport)
            return
        layer = self._step % self._num_layers
        self._spend("observe", layer, takes_ns // 2)
        super().layer_ended(transport)
        self._spend("observe", layer, takes_ns - takes_ns // 2)


class VirtualHost:
    """The host's processors, which compute experts beside the device. Outputs reach it behind the copy under way."""

    def __init__(self, clock: Clock, link: VirtualLink, split: MissSplit) -> None:
        self._clock = clock
        self._link = link
        self._split = split
        self._end_ns = 0

    def begin(self, router: RouterRan, experts: Sequence[int]) -> None:
        tokens = dict(zip(router.experts, router.num_tokens, strict=True))
        takes_ns = self._split.host_ns(router.layer, [tokens[expert] for expert in experts], router.batch_tokens)
        self._end_ns = self._clock.now_ns + takes_ns
        self._link.host_computes(self._end_ns)

    def end(self) -> None:
        self._link.wait_for_host(self._end_ns)


class VirtualPredictorThread:
    """A Channel whose predictor has one thread, as in the engine: it reads one observation after the other, in order.
    Each takes `call_ns` and the time of the work that the predictor counts for it. Nothing waits for it except
    `catch_up`; but each router takes `plan_ns` from the pass, which decides about prefetches, and `observe_ns`, as both
    share an interpreter: less of it, the longer the pass waits meanwhile.

    `observations` decides what waits and what is dropped. The predictor runs when the clock has reached the time at
    which its thread begins, so it never sees what was dropped. With costs of 0 this behaves as an InlineChannel.
    """

    def __init__(
        self,
        predictor: Predictor,
        clock: Clock,
        costs: PredictorCosts,
        observations: ObservationQueue,
        watcher: SimulationWatcher | None = None,
        observe_ns: int = 0,
        plan_ns: int = 0,
    ) -> None:
        self.busy_ns = 0
        """Time that the thread was not idle."""
        self.stall_ns = 0
        """Time that `catch_up` took."""
        self._predictor = predictor
        self._clock = clock
        self._costs = costs
        self._observations = observations
        self._watcher = watcher
        self._observe_ns, self._plan_ns = observe_ns, plan_ns
        self._ready: deque[tuple[int, Seen]] = deque()  # when it is there
        self._free_at_ns = 0
        self._has_waiting = False  # or may have
        self._is_shown = False  # the running layer's router

    @property
    def num_dropped(self) -> int:
        """Observations that were dropped unread."""
        return self._observations.num_dropped

    def begin_iteration(self, step: int, began: Callable[[], Began]) -> None:
        now = self._clock.now_ns
        self._read_until(now)
        self._observations.begin_iteration(step, began, now)
        self._has_waiting = True

    def router_ran(self, step: int, routed: Callable[[], Routed]) -> None:
        now = self._clock.now_ns
        self._read_until(now)
        self._observations.router_ran(step, routed, now)
        self._has_waiting = True
        self._is_shown = True

    def layer_ended(self, waited_ns: int = 0) -> int:
        """What showing the layer's router took from the pass, which has waited for so long since; 0 where it was not
        shown.
        """
        was_shown, self._is_shown = self._is_shown, False
        call_ns = max(1, self._costs.call_ns)
        return self._plan_ns + self._observe_ns * max(0, call_ns - waited_ns) // call_ns if was_shown else 0

    def end_iteration(self, ok: bool) -> None:
        """The pass ended. Learning from it takes time, too."""
        self._observations.end_iteration(ok, self._clock.now_ns)
        self._has_waiting = True

    def take(self) -> Seen | None:
        now = self._clock.now_ns
        if self._has_waiting and self._free_at_ns <= now:
            self._read_until(now)
        ready = self._ready
        return ready.popleft()[1] if ready and ready[0][0] <= now else None

    def catch_up(self) -> None:
        """Move the clock to when the thread has read everything that was published."""
        now = self._clock.now_ns
        self._read_until(NEVER_NS)
        if self._free_at_ns > now:
            self.stall_ns += self._free_at_ns - now
            self._clock.now_ns = self._free_at_ns
            if self._watcher is not None:
                self._watcher.spent("decide", now, self._free_at_ns)

    def close(self) -> None:
        """Read everything left: nothing more will be published."""
        self._read_until(NEVER_NS)

    def _read_until(self, now_ns: int) -> None:
        """Read the published observations that the thread begins with by then."""
        while self._has_waiting and self._free_at_ns <= now_ns:
            work = self._observations.next()
            if work is None:
                self._has_waiting = False
            else:
                self._read(work)

    def _read(self, work: Work) -> None:
        """Read one observation. Each prediction is ready as soon as it is made."""
        done, costs = self._predictor.work, self._costs
        begin = max(self._free_at_ns, work.at_ns)
        called = begin + costs.call_ns
        nbytes, flops = done.read_nbytes, done.flops
        for prediction in work.do(self._predictor):
            made = called + costs.work_ns(done.read_nbytes - nbytes, done.flops - flops)
            self._ready.append((made, Seen(work.step, prediction)))
        self._free_at_ns = called + costs.work_ns(done.read_nbytes - nbytes, done.flops - flops)
        self.busy_ns += self._free_at_ns - begin
        if self._watcher is not None:
            self._watcher.predicted(work.what, begin, self._free_at_ns)
