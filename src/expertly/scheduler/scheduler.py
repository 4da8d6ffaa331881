"""The decisions of one device: which segments to compute, to load into which slots, to keep and to evict."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import repeat
from operator import add

from expertly.core.geometry import Geometry
from expertly.core.messages import Plan, Prediction, RouterRan, Span
from expertly.policies.admission import Admission, AdmitAlways
from expertly.policies.allocation import Allocation
from expertly.policies.allocation.moepic import SplitPlan
from expertly.policies.allocation.uniform import Uniform
from expertly.policies.eviction import MakePolicy
from expertly.policies.prefetch import ByScore, PrefetchOrder
from expertly.scheduler.budget import Budget
from expertly.scheduler.cache import Cache
from expertly.scheduler.counters import LayerCounters, PhaseCounters
from expertly.scheduler.misses import MissSplit
from expertly.scheduler.prefetch import PrefetchQueue
from expertly.scheduler.prefetch_gate import Moment, PrefetchGate
from expertly.scheduler.running import RunningLayer, TurnByTurn


class Scheduler:
    """Takes observations, returns plans. Pure: no clock, no thread, no file, no tensor.

    A layer goes `begin_layer` -> (`loaded` -> `computed`)* -> `end_layer`. The driver computes ready spans in any
    order. It calls `loaded` for each span that has arrived, and `computed` for spans whose bytes it no longer needs:
    that frees staging slots and may return the next loads. `abandon` ends a layer that failed. `predict` may come at
    any time; `prefetch` then returns what to load behind every load. `loop.run_layer` is the driver's loop.
    """

    def __init__(
        self,
        geometry: Geometry,
        budget: Budget,
        make_policy: MakePolicy,
        *,
        scope: str = "layer",
        order: str = "resident",
        preemption: str = "early",
        transfer: str = "asynchronous",
        admission: Admission = AdmitAlways(),  # noqa: B008 - holds nothing
        prefill: str = "stream",
        ahead: str = "cache",
        prefetching: str = "always",
        prefetch: PrefetchOrder = ByScore(),  # noqa: B008 - holds nothing
        window: int | None = None,
        allocation: Allocation | None = None,
        gate: PrefetchGate | None = None,
        split: MissSplit | None = None,
    ) -> None:
        """`order` and `preemption`: with "resident" and "early" a layer loads all that it lacks when its router ran,
        and computes the resident experts meanwhile; otherwise experts take turns (`TurnByTurn`).
        `transfer`: with "synchronous" no expert is computed before everything predicted so far has arrived.
        `admission`: keeps all that a layer needs, or what the eviction policy (a ScoredPolicy) values most among what
        is kept and what is needed, in prompts too.
        `prefill`, where all needed is kept: with "evict" a prompt's experts are kept as those of decode are; with
        "stream" they and what is prefetched meanwhile evict nothing: they take free slots, the rest is staged.
        `ahead`: prefetches go to the "cache", which evicts for them, or to free "staging" slots.
        `prefetching`: "always", or only while the layer that ran last served "decode".
        `split`: how many missing experts the host computes; only where a layer loads all that it lacks when its router
        ran, and waits for no prefetch.
        `prefetch`: the order of the prefetch queue. `window`: most segments in flight for predictions; None: as many as
        one token's experts of a layer have.
        """
        self.geometry = geometry
        self.budget = budget
        self.counters = [LayerCounters() for _ in geometry.layers]
        self.allocation = allocation or Uniform(geometry)
        self.gate = gate
        self.is_synchronous = transfer == "synchronous"
        """The driver waits for prefetches before it computes experts."""
        self.finds_late = preemption == "late"
        """A missing expert is found when its turn comes; until then, prefetches for the layer continue."""
        tops, prompts_evict = self.allocation.tops(budget.layer_quotas), prefill == "evict"
        worth = admission.worth if admission.has_worth else None
        self.cache = Cache(
            geometry, budget, make_policy, scope, self.counters, tops, prompts_evict=prompts_evict, worth=worth
        )
        self.slots = self.cache.slots
        if self.allocation.is_online:
            self.allocation.begin(budget.layer_quotas)
        if window is None:
            window = max(layer.top_k for layer in geometry.layers) * geometry.segments_per_expert
        self.queue = PrefetchQueue(
            geometry,
            self.cache,
            self.counters,
            window,
            prefetch,
            evicts=ahead == "cache",
        )
        self._prefetches_always = prefetching == "always"
        self._running: RunningLayer
        self._takes_turns = order == "id" or self.finds_late
        self._always_decides = admission.weighs_scores or self._takes_turns or self.allocation.is_online
        self.computes_at_once = not (self._takes_turns or self.is_synchronous)
        """Resident experts are computed as soon as the router has chosen them, whatever else is to come."""
        assert split is None or self.computes_at_once
        self.split = split
        """How many missing experts the host computes; None: none."""
        if self._takes_turns:
            by_id, is_early = order == "id", not self.finds_late
            self._running = TurnByTurn(geometry, self.cache, self.queue, self.counters, by_id=by_id, is_early=is_early)
        else:
            best = admission.weighs_scores
            if split is not None:
                self.queue.expect()
            parts = geometry, self.cache, self.queue, self.counters
            self._running = RunningLayer(*parts, keeps_best=best, split=split)
        self._needed: Container[int] = frozenset()  # experts of the running layer, where anything is predicted
        self.computed = self._running.computed
        """`computed(spans)`: spans of the running layer were computed; returns what to do next, or None."""
        self._first_of = [geometry.first_expert_id(layer) for layer in range(geometry.num_layers)]
        self._expert_nbytes = [layer.expert_nbytes for layer in geometry.layers]

    # -- one layer ---------------------------------------------------------------------------------------------

    def begin_layer(self, router: RouterRan, cancelled: Sequence[Span] = ()) -> Plan:
        """Count hits, admit and evict; returns what to compute and to load. `cancelled`: prefetches for this layer
        that the driver took back before they began.
        """
        assert self._running.router is None, "the layer before has not ended"
        layer, cache, slots, queue = router.layer, self.cache, self.slots, self.queue
        first = self._first_of[layer]
        queue.now = layer
        num_spared = 0  # experts that are resident thanks to prefetching
        if queue.is_used:
            cache.begin(router.is_part_of_decode or True in router.is_decode)
            num_spared = self._settle_predictions(router, cancelled)
        whole = slots.whole
        ready: list[Span] = []
        partial: list[Span] = []
        missing: list[int] = []
        here: list[int] = []
        for position, expert in enumerate(router.experts):
            span = whole[first + expert]
            if span is not None:
                ready.append(span)
                continue
            mask = slots.resident[first + expert]
            if mask:
                partial += slots.spans(first + expert, mask)
            if mask != slots.full:
                missing.append(position)
                here.append(mask.bit_count())
        ready += partial
        if (missing or self._always_decides) and not queue.is_used:
            cache.begin(router.is_part_of_decode or True in router.is_decode)
        num_segments = self.geometry.segments_per_expert
        count_demand(self.counters[layer], router, missing, here, self._expert_nbytes[layer], num_segments)
        if self.gate is not None:
            self.gate.router_ran(router, (len(missing) + num_spared) * self._expert_nbytes[layer])
        return self._running.begin(router, ready, missing)

    def promote(self, spans: Sequence[Span]) -> None:
        """Turn prefetches that the running layer needs and that have not begun into loads."""
        router = self._running.router
        assert router is not None and self.finds_late
        nbytes = self.geometry.segment_nbytes(router.layer)
        counters = self.counters[router.layer]
        for span in spans:
            self.queue.promoted(self._first_of[router.layer] + span.expert, span)
            is_decode = router.is_decode[router.experts.index(span.expert)]
            phase = counters.decode if is_decode else counters.prefill
            phase.loaded_nbytes += span.num_segments * nbytes

    def loaded(self, span: Span) -> bool:
        """A span has arrived. Returns whether the running layer waits for it; it does not for one that was prefetched,
        or requested for an expert whose turn has not come.
        """
        eid = self._first_of[span.layer] + span.expert
        mask = ((1 << span.num_segments) - 1) << span.segment
        slots = self.slots
        if slots.awaited.get(eid, 0) & mask:
            slots.arrived(eid, mask, slots.awaited)
            if self.queue.is_used:
                self.queue.forget_phase(eid, mask)
            return True
        if slots.requested.get(eid, 0) & mask:
            slots.arrived(eid, mask, slots.requested)
            return False
        slots.arrived(eid, mask, slots.prefetching)
        self.queue.forget_phase(eid, mask)
        if eid not in self.queue.waiting and eid not in self._needed:  # its layer has run without it
            self.cache.free_staged(span.layer, eid, mask)
        return False

    def end_layer(self, cancelled: Sequence[Span] = ()) -> None:
        """Everything that the layer needs was computed: tell its policy. `cancelled`: prefetches for `cancellable`
        experts that the driver took back before they began.
        """
        running = self._running
        router = running.router
        assert router is not None and running.is_done
        assert self.finds_late or not cancelled, "early prefetches were cancelled when the router ran"
        if self.finds_late:
            self._cancel(router.layer, cancelled)
            self.queue.settle()
        running.router = None
        self._needed = frozenset()
        first = self._first_of[router.layer]
        policy = self.cache.partitions[router.layer].policy
        policy.used(list(map(add, router.experts, repeat(first))), router.num_tokens, router.batch_tokens)
        if self.allocation.is_online:
            quotas = self.allocation.ran(router, self._recall)
            if quotas is not None:
                self.cache.resize(quotas)
            if self.cache.targets is not None:
                self.cache.rearrange(self.queue.upcoming())

    def abandon(self) -> None:
        """The layer failed and no transfer runs: forget what was in flight and free its slots."""
        if self.gate is not None:
            self.gate.abandon()
        left = list(self.queue.waiting)
        router = self._running.router
        for eid, mask in enumerate(self.slots.in_flight):
            if mask:
                self.cache.forget(self.geometry.layer_of_expert(eid), eid, mask)
        self.queue.clear()
        self._running.clear()
        self._needed = frozenset()
        if router is not None:
            left += [self._first_of[router.layer] + expert for expert in router.experts]
        for eid in left:
            self.cache.free_staged(self.geometry.layer_of_expert(eid), eid, self.slots.full)

    # -- what is predicted -------------------------------------------------------------------------------------

    def predict(self, prediction: Prediction) -> None:
        """A layer will need these experts when it runs next. Valid until its router runs."""
        self.queue.predict(prediction)
        if self.allocation.is_online:
            self.allocation.predicted(prediction)
        self.foresee(prediction)

    def foresee(self, prediction: Prediction) -> None:
        """Tell eviction policies what is predicted. This is all that a prediction does which comes too late to load
        anything.
        """
        layer, probabilities = prediction.layer, prediction.probabilities
        if probabilities is not None:
            self.cache.partitions[layer].policy.predicted(self._first_of[layer], probabilities)
        if prediction.outlook is not None:
            for partition in self.cache.distinct_partitions:
                partition.policy.expected(prediction.outlook)

    def prefetch(self) -> list[Span]:
        """Spans to prefetch, in this order, behind every load. Each is one segment, so that a load never waits long."""
        is_held = self._running.holds_prefetching or (self.gate is not None and not self.gate.is_open)
        if is_held or not (self._prefetches_always or self.cache.is_decoding):
            self.queue.needs_slots = False
            return []
        return self.queue.begin(self._running.router, self._running.protected, waits=self._takes_turns)

    def cancellable(self) -> list[int]:
        """Experts in flight for the running layer that its router did not choose."""
        if not self.finds_late:
            return []  # cancelled when the router ran
        assert self._running.router is not None
        return self.queue.cancellable(self._running.router.layer)

    def at(self, moment: Moment, now_ns: int) -> None:
        """Tell the prefetch gate when a pass began or ended."""
        assert self.gate is not None
        self.gate.at(moment, now_ns)

    def _settle_predictions(self, router: RouterRan, cancelled: Sequence[Span]) -> int:
        """Count how good the predictions for the layer were and drop prefetches that did not begin. Returns how many
        needed experts are resident thanks to prefetching.
        """
        layer, first, queue = router.layer, self._first_of[router.layer], self.queue
        self._cancel(layer, cancelled)
        self._needed = frozenset(map(add, router.experts, repeat(first)))
        num_spared = 0
        for eid in queue.router_ran(router, self.cache.is_decoding):
            if eid in self._needed:
                num_spared += self.slots.resident[eid] == self.slots.full
            else:  # segments still in flight are freed as they arrive
                self.cache.free_staged(layer, eid, self.slots.resident[eid])
        if not self.finds_late:
            queue.settle()  # nothing more is cancelled
        return num_spared

    def _cancel(self, layer: int, spans: Sequence[Span]) -> None:
        for span in spans:
            assert span.layer == layer, "only prefetches for this layer are cancelled"
            self.queue.cancelled(self._first_of[layer] + span.expert, span)

    # -- what layers keep --------------------------------------------------------------------------------------

    def configure(self, plan: SplitPlan) -> None:
        """Between layers: keep what the plan says, as soon as prefetches in flight allow; the rest is for staging.

        Raises ConfigError where the plan is of another model, or keeps more than there is room for.
        """
        assert self._running.router is None, "a layer runs"
        self.cache.resize(*self.allocation.configured(plan))
        self.cache.rearrange(self.queue.upcoming())

    def preload(self, layer: int, expert: int) -> list[Span]:
        """Keep a whole expert before anything runs; returns the spans to load. For systems that keep everything."""
        eid = self.geometry.expert_id(layer, expert)
        self.cache.keep(layer, eid, self.slots.full)
        return self.cache.allocate(layer, eid, self.slots.full, self.slots.awaited)

    def _recall(self, layer: int) -> float:
        """The share of the experts needed by a layer's decode that predictions named in time; with a gate, the share
        of its misses that prefetching spared.
        """
        decode = self.counters[layer].decode
        if self.gate is not None:
            return decode.coverage or 0.0
        return decode.predicted_needed / max(1, decode.predicted_of, decode.demands)

    def check(self) -> None:
        """Assert that slots, masks and budgets agree, and that between layers only kept or prefetched segments have
        slots.
        """
        self.cache.check()
        if self._running.router is not None:
            return
        slots, queue = self.slots, self.queue
        assert self._running.is_done and not (slots.awaited or slots.requested)
        for eid in range(self.geometry.num_experts):
            if self.cache.staged_of(self.geometry.layer_of_expert(eid), eid):
                assert eid in queue.waiting or eid in slots.prefetching
        for pool, staging, num in zip(slots.pools, self.cache.staging, self.cache.staged, strict=True):
            assert pool.num_free >= staging - num, "between layers only prefetches hold staging slots"


def count_demand(
    counters: LayerCounters,
    router: RouterRan,
    missing: list[int],
    segments_here: list[int],
    expert_nbytes: int,
    num_segments: int,
) -> None:
    """Count the experts that real tokens demand, before anything is admitted. Experts that only pad tokens chose do
    not count.

    `missing`: positions in the router's list of experts that are not wholly resident; `segments_here`: how many
    segments of each are.
    """
    if not router.batch_tokens:
        return
    is_decode, num_tokens = router.is_decode, router.num_tokens
    counted: list[tuple[PhaseCounters, int, list[int]]] = []
    if 0 not in num_tokens and not (True in is_decode and False in is_decode):  # nearly always
        counted.append((counters.decode if True in is_decode else counters.prefill, len(num_tokens), segments_here))
    else:
        here = dict(zip(missing, segments_here, strict=True))
        for phase, of_decode in ((counters.decode, True), (counters.prefill, False)):
            positions = [i for i, num in enumerate(num_tokens) if num and is_decode[i] == of_decode]
            counted.append((phase, len(positions), [here[i] for i in positions if i in here]))
    for phase, num, segments in counted:
        hits = num - len(segments)
        phase.hits += hits
        phase.demanded_nbytes += num * expert_nbytes
        phase.hit_nbytes += hits * expert_nbytes
        for num_here in segments:
            if num_here:
                phase.partial_hits += 1
                phase.hit_nbytes += num_here * expert_nbytes // num_segments
            else:
                phase.misses += 1
