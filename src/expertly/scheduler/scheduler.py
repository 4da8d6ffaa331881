"""The decisions of one device: which units of experts to compute, to load into which slots, to keep and to evict."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat
from operator import add

from expertly.core.geometry import Geometry
from expertly.core.messages import Plan, Prediction, RouterRan, Span
from expertly.policies.allocation import Allocation, Uniform
from expertly.policies.eviction import MakePolicy
from expertly.policies.moepic import Timing
from expertly.policies.prefetch import ByScore, PrefetchOrder
from expertly.scheduler.budget import Budget
from expertly.scheduler.cache import Cache
from expertly.scheduler.counters import LayerCounters
from expertly.scheduler.prefetch import PrefetchQueue
from expertly.scheduler.slots import ABSENT, LOADING, PREFETCHING, QUEUED, RESIDENT


class Scheduler:
    """Takes observations, returns plans. Pure: no clock, no thread, no file, no tensor.

    A layer goes `begin_layer` -> (`loaded` -> `computed`)* -> `end_layer`. The driver computes ready spans in any
    order. It calls `loaded` for each span that has arrived, and `computed` for spans whose bytes it no longer needs:
    that frees staging slots and returns the next loads. `abandon` ends a layer that failed. `predict` may come at
    any time; `prefetch` then returns what to load behind every load. `loop.run_layer` is the driver's loop.
    """

    def __init__(
        self,
        geometry: Geometry,
        budget: Budget,
        make_policy: MakePolicy,
        *,
        scope: str = "layer",
        admission: str = "always",
        prefill: str = "stream",
        ahead: str = "cache",
        prefetch: PrefetchOrder = ByScore(),  # noqa: B008 - holds nothing
        allocation: Allocation | None = None,
        predicts: bool = True,
    ) -> None:
        """`admission`: "always" keeps all that a layer needs; "best" what the eviction policy (a ScoredPolicy) values
        most among what is kept and what is needed, in prompts too.
        `prefill`, where all needed is kept: with "evict" a prompt's experts are kept as those of decode are; with
        "stream" they and what is prefetched meanwhile evict nothing: they take free slots, the rest is staged.
        `ahead`: prefetches go to the "cache", which evicts for them, or to free "staging" slots.
        `prefetch`: the order of the prefetch queue. `predicts`: whether `predict` may be called.
        """
        self.geometry = geometry
        self.budget = budget
        self.counters = [LayerCounters() for _ in geometry.layers]
        self.allocation = allocation or Uniform(geometry)
        self.predicts = predicts  # whether units may come that no layer waits for
        self.prompts_evict = prefill == "evict"
        self.keeps_best = admission == "best"
        self.cache = Cache(
            *(geometry, budget, make_policy, scope, self.counters, self.allocation.tops(budget.layer_quotas)),
            prompts_evict=self.prompts_evict,
        )
        self.slots = self.cache.slots
        if self.allocation.is_online:
            self.allocation.begin(budget.layer_quotas)
        self.queue = PrefetchQueue(geometry, prefetch, evicts=ahead == "cache")
        self.router: RouterRan | None = None  # of the running layer
        self.needed: list[int] = []  # its experts, by dense id
        self.num_open = 0  # units of the running layer that a plan named and that were not computed yet
        self.deferred: deque[tuple[int, list[int]]] = deque()  # its (position, units) that wait for staging slots
        self._best: list[int] = []  # experts to keep as their layers have room, the best last
        self._began_in_decode = [False] * len(self.slots.state)  # of the units being prefetched

    # -- one layer ---------------------------------------------------------------------------------------------

    def begin_layer(self, router: RouterRan, cancelled: Sequence[Span] = ()) -> Plan:
        """Count hits, admit and evict; returns what to compute and to load. `cancelled`: prefetches for this layer
        that the driver took back before they began.
        """
        assert self.router is None, "the layer before has not ended"
        layer, slots = router.layer, self.slots
        first, whole, num_parts = slots.first_of[layer], slots.whole, slots.num_parts
        self.router = router
        self.needed = list(map(add, router.experts, repeat(first)))
        self.cache.is_decoding = router.is_part_of_decode or True in router.is_decode
        if self.predicts:
            self._settle_predictions(router, cancelled)
        ready: list[Span] = []
        partial: list[Span] = []
        missing: list[int] = []
        parts_there: list[int] = []
        for position, eid in enumerate(self.needed):
            span = whole[eid]
            if span is not None:
                ready.append(span)
                continue
            num = slots.num_resident[eid]
            if num:
                partial += slots.spans(slots.in_state(eid, RESIDENT))
            if num < num_parts:
                missing.append(position)
                parts_there.append(num)
        self.num_open = len(ready) * num_parts
        if partial:
            self.num_open += _num_units(partial)
        self.counters[layer].count_demand(router, missing, parts_there, num_parts, slots.segment_nbytes[layer])
        plan = Plan(ready + partial)
        if missing or self.cache.staged[self.geometry.size_classes[layer]] or self.keeps_best:
            self._admit(router, missing, plan)
        return plan

    def loaded(self, span: Span) -> bool:
        """A span has arrived. Returns whether the running layer waits for it."""
        if self.slots.arrived(span):
            return True
        units = self.slots.units_of(span)
        eid = units.start // self.slots.num_parts
        if eid not in self.queue.waiting and eid not in self.needed:  # its layer has run
            self.cache.free_staged(eid, units)
        return False

    def is_coming(self, span: Span) -> bool:
        """Whether the running layer waits for other units of the span's expert."""
        eid = self.slots.first_of[span.layer] + span.expert
        return bool(self.slots.in_state(eid, LOADING))

    def computed(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Spans of the running layer were computed: free those that are staged. Returns what to load next."""
        loads: list[Span] = []
        layer, slots, staged = spans[0].layer, self.slots, self.cache.staged
        size_class = self.geometry.size_classes[layer]
        for span in spans:
            self.num_open -= span.num_segments
            if self.deferred or staged[size_class]:
                eid = slots.first_of[layer] + span.expert
                first = eid * slots.num_parts + span.segment
                self.cache.free_staged(eid, range(first, first + span.num_segments))
                if self.deferred:
                    self._load_deferred(loads)
        return loads

    def end_layer(self) -> None:
        """Everything that the layer needs was computed: tell its policy."""
        router, needed = self.router, self.needed
        assert router is not None and not (self.num_open or self.deferred)
        self.router, self.needed = None, []
        self.cache.partitions[router.layer].policy.used(needed, router.num_tokens, router.batch_tokens)
        if self.allocation.is_online:
            quotas = self.allocation.ran(router, self._recall)
            if quotas is not None:
                self.cache.resize(quotas, self.allocation.tops(quotas))
                self.keep_best()
            if self.cache.targets is not None:
                self.cache.rearrange(self.upcoming())

    def abandon(self) -> None:
        """The layer failed and no transfer runs: forget what was in flight and free its slots."""
        slots, unused = self.slots, [*self.queue.waiting, *self.needed]
        for unit, state in enumerate(slots.state):
            if state in (LOADING, PREFETCHING):
                self.cache.forget(unit // slots.num_parts, [unit])
            elif state == QUEUED:
                slots.state[unit] = ABSENT
        self.queue.clear()
        self._best.clear()
        self.router, self.needed, self.num_open = None, [], 0
        self.deferred.clear()
        for eid in unused:
            self.cache.free_staged(eid, slots.units(eid))

    # -- what the running layer needs --------------------------------------------------------------------------

    def _admit(self, router: RouterRan, missing: list[int], plan: Plan) -> None:
        """Decide what is kept and load it; load the rest as far as there are staging slots. `missing`: positions of
        experts that are not wholly resident.
        """
        slots, needed, num_parts = self.slots, self.needed, self.slots.num_parts
        for position in missing if slots.prefetching else ():
            plan.in_flight += slots.await_prefetched(needed[position])
        if plan.in_flight:
            self.num_open += _num_units(plan.in_flight)
        if self.keeps_best:
            self.cache.admit_best(router, needed, self.upcoming() if self.predicts else ())
        else:
            missing = self._admit_all(router, missing, needed)
        every_kept = self.cache.partitions[router.layer].kept
        for position in missing:
            eid = needed[position]
            # Where experts are whole, the unit is the expert.
            is_absent = num_parts > 1 or slots.state[eid] == ABSENT
            absent = slots.in_state(eid, ABSENT) if num_parts > 1 else [eid]
            if not (is_absent and absent):
                continue
            kept = every_kept.get(eid, ())
            to_keep = absent if len(kept) == num_parts else [unit for unit in absent if unit in kept]
            if to_keep:
                self._load(position, to_keep, plan.loads)
            if len(to_keep) < len(absent):
                waiting = [unit for unit in absent if unit not in to_keep]
                self.deferred.append((position, waiting))
                for unit in waiting:
                    slots.state[unit] = QUEUED
        if self.deferred:
            self._load_deferred(plan.loads)

    def _admit_all(self, router: RouterRan, missing: list[int], needed: list[int]) -> list[int]:
        """Keep what can be kept of what is needed. Experts of decode may evict, in router order, then those of prompts
        where prompts may; the others only take free slots. Prompts and pads: by falling number of tokens, then by id.
        Returns positions in the order in which their experts are loaded.
        """
        cache, num_tokens, is_decode = self.cache, router.num_tokens, router.is_decode
        if cache.staged[self.geometry.size_classes[router.layer]]:  # what is resident, but not kept, is admitted too
            missing = [i for i, eid in enumerate(needed) if len(cache.kept(eid)) < self.slots.num_parts]
        evicting = [i for i in missing if is_decode[i] and num_tokens[i]]
        filling: list[int] = []
        if len(evicting) < len(missing):
            filling = [i for i in missing if not (is_decode[i] and num_tokens[i])]
            filling.sort(key=lambda i: (-num_tokens[i], needed[i]))
            if self.prompts_evict:
                evicting += [i for i in filling if num_tokens[i]]
                filling = [i for i in filling if not num_tokens[i]]
        eids = list(map(needed.__getitem__, evicting)), list(map(needed.__getitem__, filling))
        cache.admit(router.layer, *eids, self._protected() if evicting else ())
        return evicting + filling

    def _load(self, position: int, units: Sequence[int], loads: list[Span]) -> None:
        """Give units slots, of which there are enough, and add their spans to `loads`."""
        router = self.router
        assert router is not None
        counters = self.counters[router.layer]
        phase = counters.decode if router.is_decode[position] else counters.prefill
        phase.loaded_nbytes += len(units) * self.slots.segment_nbytes[router.layer]
        loads += self.cache.allocate(units[0] // self.slots.num_parts, units, LOADING)
        self.num_open += len(units)

    def _load_deferred(self, loads: list[Span]) -> None:
        """Load units that wait for staging slots, an expert at a time: whole where the staging slots can hold that,
        otherwise as much as fits. A layer that has nothing else to compute takes what fits, too: nothing would free a
        slot.
        """
        assert self.router is not None
        pool = self.slots.pool_of[self.router.layer]
        staging = self.cache.staging[self.geometry.size_classes[self.router.layer]]
        while self.deferred and pool.num_free:
            position, units = self.deferred[0]
            if pool.num_free < len(units) <= staging and self.num_open:
                return
            self.deferred.popleft()
            if len(units) > pool.num_free:
                self.deferred.appendleft((position, units[pool.num_free :]))
            self._load(position, units[: pool.num_free], loads)

    # -- what is predicted -------------------------------------------------------------------------------------

    def predict(self, prediction: Prediction) -> None:
        """A layer will need these experts when it runs next. Valid until its router runs."""
        assert self.predicts
        layer, probabilities = prediction.layer, prediction.probabilities
        self.cache.evicts_whole = True
        self.queue.predict(prediction)
        if self.allocation.is_online:
            self.allocation.predicted(prediction)
        if probabilities is not None:
            self.cache.partitions[layer].policy.predicted(self.slots.first_of[layer], probabilities)
        if prediction.outlook is not None:
            for partition in self.cache.distinct_partitions():
                partition.policy.expected(prediction.outlook)

    def prefetch(self) -> list[Span]:
        """Spans to prefetch, in this order, behind every load. Each is one unit, so that a load never waits long."""
        queue, cache, slots = self.queue, self.cache, self.slots
        begun: list[Span] = []
        queue.needs_slots = False
        if self.deferred:  # loads wait for slots
            return begun
        following = (queue.now + 1) % self.geometry.num_layers
        protected: set[int] | None = None  # made for the first expert that needs room
        num_coming = sum(slots.prefetching.values())
        while num_coming < queue.window and (eid := queue.first()) is not None:
            layer, units, has_room = slots.layer_of[eid], slots.in_state(eid, ABSENT), True
            if units:
                if num_coming and num_coming + len(units) > queue.window:
                    break
                if queue.evicts and protected is None:
                    protected = self._protected()
                has_room = cache.make_prefetch_room(eid, units, protected, is_next=layer == following)
                is_beyond_top = units[-1] % slots.num_parts >= cache.tops[layer]
                if not has_room and (not queue.evicts or not cache.may_evict or is_beyond_top):
                    queue.needs_slots = cache.is_split
                    break  # until a slot is free
            queue.pop()
            if not units:  # resident or in flight: protect it until its layer runs
                if queue.likely[layer]:
                    queue.likely[layer][eid] = None
                if eid in slots.prefetching:
                    queue.waiting.setdefault(eid, 0)
            elif has_room:
                begun += self._prefetch(eid, units)
                num_coming += len(units)
                queue.waiting[eid] = queue.waiting.get(eid, 0) + len(units)
            if protected is not None:
                protected.add(eid)
        return begun if begun or num_coming else self._load_best()

    def keep_best(self) -> None:
        """Quotas have changed: when nothing is in flight or can be prefetched, keep and load each layer's best experts,
        as it has room.
        """
        ranks = [
            (rank, first + expert)
            for layer, first in enumerate(self.slots.first_of)
            for rank, expert in enumerate(self.allocation.best_of(layer))
        ]
        self._best = [eid for _, eid in sorted(ranks, reverse=True)]

    def _load_best(self) -> list[Span]:
        cache, slots = self.cache, self.slots
        while self._best and cache.targets is None:
            eid = self._best.pop()
            layer = slots.layer_of[eid]
            units = [unit for unit in slots.units(eid)[: cache.tops[layer]] if slots.state[unit] == ABSENT]
            if units and cache.partitions[layer].room >= len(units) <= slots.pool_of[layer].num_free:
                cache.keep(eid, units)
                return self._prefetch(eid, units)
        return []

    def _prefetch(self, eid: int, units: Sequence[int]) -> list[Span]:
        """Give units slots, of which there are enough: the spans, each a unit, to load behind every load."""
        for unit in units:
            self._began_in_decode[unit] = self.cache.is_decoding
        self._count_prefetch(self.slots.layer_of[eid], self.cache.is_decoding, len(units))
        self.cache.allocate(eid, units, PREFETCHING)
        return [span for unit in units for span in self.slots.spans([unit])]

    def _settle_predictions(self, router: RouterRan, cancelled: Sequence[Span]) -> None:
        """Count how good the predictions for the layer were and drop prefetches that did not begin."""
        layer, slots, queue = router.layer, self.slots, self.queue
        for span in cancelled:
            assert span.layer == layer, "only prefetches for this layer are cancelled"
            units = slots.units_of(span)
            eid = units.start // slots.num_parts
            if eid in queue.waiting:
                queue.waiting[eid] -= len(units)
            self._count_prefetch(layer, self._began_in_decode[units.start], -len(units))
            self.cache.forget(eid, units)
        first = slots.first_of[layer]
        num_resident = slots.num_resident[first : first + self.geometry.layers[layer].num_experts]
        needed = set(self.needed)
        for eid in queue.router_ran(router, self.counters[layer].phase(self.cache.is_decoding), num_resident):
            if eid not in needed:  # units still in flight are freed as they arrive
                self.cache.free_staged(eid, slots.in_state(eid, RESIDENT))

    def _count_prefetch(self, layer: int, is_decode: bool, num_units: int) -> None:
        """So many units are prefetched; a negative number: were cancelled."""
        phase, nbytes = self.counters[layer].phase(is_decode), num_units * self.slots.segment_nbytes[layer]
        phase.loaded_nbytes += nbytes
        phase.prefetched_nbytes += nbytes

    def upcoming(self) -> set[int]:
        """Experts that must not be evicted: prefetched and not used yet, or resident and predicted."""
        return {*self.queue.waiting, *self.slots.prefetching}.union(*self.queue.likely.values())

    def _protected(self) -> set[int]:
        """The same, and those that the running layer needs."""
        return self.upcoming().union(self.needed)

    # -- what layers keep --------------------------------------------------------------------------------------

    def configure(self, timing: Timing) -> None:
        """Between passes, where the allocation is due: what layers keep is to be worked out with these times."""
        assert self.router is None, "a layer runs"
        self.allocation.configure(timing)

    def preload(self, layer: int, expert: int) -> list[Span]:
        """Keep a whole expert before anything runs; returns the spans to load. For systems that keep everything."""
        eid = self.geometry.expert_id(layer, expert)
        self.cache.keep(eid, self.slots.units(eid))
        return self.cache.allocate(eid, self.slots.units(eid), LOADING)

    def _recall(self, layer: int) -> float:
        """The share of the experts needed by a layer's decode that predictions named in time."""
        decode = self.counters[layer].decode
        return decode.predicted_needed / max(1, decode.predicted_of, decode.demands)

    def check(self) -> None:
        """Assert that slots and budgets agree, and that between layers only kept or prefetched units have slots."""
        self.cache.check()
        slots = self.slots
        queued = [unit for _, units in self.deferred for unit in units]
        assert sorted(queued) == [unit for unit, state in enumerate(slots.state) if state == QUEUED]
        if self.router is not None:
            return
        assert not self.num_open and not queued and LOADING not in slots.state
        for eid in range(self.geometry.num_experts):
            if self.cache.staged_of(eid):
                assert eid in self.queue.waiting or eid in slots.prefetching
        for pool, staging, num in zip(slots.pools, self.cache.staging, self.cache.staged, strict=True):
            assert pool.num_free >= staging - num, "between layers only prefetches hold staging slots"


def _num_units(spans: Sequence[Span]) -> int:
    return sum([span.num_segments for span in spans])
