"""The decisions of one device: which units of experts to compute, to load into which slots, to keep and to evict."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from itertools import repeat
from operator import add

from expertly.core.geometry import Geometry
from expertly.core.messages import Plan, Prediction, RouterRan, Span
from expertly.policies.allocation import Allocation, Uniform
from expertly.policies.eviction import MakePolicy, ScoredPolicy
from expertly.policies.moepic import Timing
from expertly.scheduler.budget import Budget
from expertly.scheduler.cache import ABSENT, LOADING, PREFETCHING, QUEUED, RESIDENT, Cache
from expertly.scheduler.counters import LayerCounters
from expertly.scheduler.prefetch import PrefetchQueue


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
        prefetch: str = "score",
        allocation: Allocation | None = None,
        predicts: bool = True,
    ) -> None:
        """`admission`: "always" keeps each needed expert if room can be made; "best" keeps the experts that the
        eviction policy (a ScoredPolicy) scores highest, kept or needed, in prompts too.
        `prefill`, with "always": with "evict" prompts keep experts as decode does; with "stream" prompts, and
        prefetches meanwhile, evict nothing, but take free slots and staging slots.
        `ahead`: prefetches go to the "cache", which evicts for them, or to free "staging" slots.
        `prefetch`: the order of the prefetch queue, a key of PRIORITIES. `predicts`: whether `predict` may be called.
        """
        self.geometry = geometry
        self.budget = budget
        self.allocation = allocation or Uniform(geometry)
        self.predicts = predicts  # whether `predict` may be called, so that units come that no layer waits for
        self.prompts_evict = prefill == "evict"
        self.keeps_best = admission == "best"
        self.cache = Cache(geometry, budget, make_policy, scope, self.allocation.tops(budget.layer_quotas))
        if self.allocation.is_online:
            self.allocation.begin(budget.layer_quotas)
        self.queue = PrefetchQueue(geometry, prefetch, evicts=ahead == "cache")
        self.router: RouterRan | None = None  # of the running layer
        self.needed: list[int] = []  # its experts, by dense id
        self.num_open = 0  # units of the running layer that a plan named and that were not computed yet
        self.num_coming = 0  # of these, units in flight
        self.deferred: deque[tuple[int, Sequence[int]]] = deque()  # its (position, units) that wait for staging slots
        self.held: dict[int, list[int]] = {}  # its experts -> resident units that wait for units in flight
        self._to_fill: list[int] = []  # experts to keep as new quotas have room, the best last

    @property
    def counters(self) -> list[LayerCounters]:
        return self.cache.counters

    # -- one layer ---------------------------------------------------------------------------------------------

    def begin_layer(self, router: RouterRan, cancelled: Sequence[Span] = ()) -> Plan:
        """Count hits, admit and evict; returns what to compute and to load. `cancelled`: prefetches for this layer
        that the driver took back before they began.
        """
        assert self.router is None, "the layer before has not ended"
        layer, cache, num_parts = router.layer, self.cache, self.cache.num_parts
        self.router = router
        self.needed = list(map(add, router.experts, repeat(self.geometry.first_ids[layer])))
        cache.is_decoding = router.is_part_of_decode or True in router.is_decode
        if self.predicts:
            self._end_predictions(router, cancelled)
        plan = Plan()
        partial: list[int] = []  # experts that are resident in part, or in several spans
        missing: list[int] = []  # positions of experts that are not wholly resident
        parts_there: list[int] = []
        for position, eid in enumerate(self.needed):
            span = cache.whole[eid]
            if span is not None:
                plan.ready.append(span)
                continue
            num = cache.num_resident(eid) if num_parts > 1 else 0
            if num:
                partial.append(eid)
                self.num_open += num
            if num < num_parts:
                missing.append(position)
                parts_there.append(num)
        self.num_open += len(plan.ready) * num_parts
        cache.count_demand(router, missing, parts_there)
        pool = cache.partitions[layer].pool
        if missing or self.keeps_best or pool.num_free + pool.num_kept < pool.num_slots:  # pool.num_staged, inlined
            self._admit(router, missing, plan)
        if partial:
            self._plan_parts(partial, plan)
        return plan

    def _plan_parts(self, partial: Sequence[int], plan: Plan) -> None:
        """Resident units of an expert wait for its units that are loading. Where layers keep tops, decode computes them
        meanwhile (MoEpic, section 3.1).
        """
        cache = self.cache
        for eid in partial:
            units = cache.in_state(eid, RESIDENT)
            if cache.in_state(eid, LOADING) and not (cache.is_split and cache.is_decoding):
                self.held[eid] = list(units)
            else:
                plan.ready += cache.spans(units)

    def loaded(self, span: Span) -> Sequence[Span] | None:
        """A span has arrived. Returns what the running layer can compute now, None where it does not wait for the span.
        An expert that arrives in several spans is computed once none of its units is loading: units still queued may
        need the slots that this frees.
        """
        cache = self.cache
        if not cache.arrived(span):
            eid = self.geometry.first_ids[span.layer] + span.expert
            forecast = self.queue.forecasts.get(span.layer)
            if eid not in self.needed and not (forecast and eid in forecast.prefetched):  # its layer has run
                cache.free_staged(cache.units_of(span))
            return None
        self.num_coming -= span.num_segments
        if span.num_segments == cache.num_parts:
            return (span,)
        eid = self.geometry.first_ids[span.layer] + span.expert
        held = self.held.setdefault(eid, [])
        held += cache.units_of(span)
        return () if cache.in_state(eid, LOADING) else cache.spans(sorted(self.held.pop(eid)))

    def computed(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Spans of the running layer were computed: free those that are staged. Returns what to load next."""
        loads: list[Span] = []
        cache, pool = self.cache, self.cache.partitions[spans[0].layer].pool
        has_staged, first = pool.num_free + pool.num_kept < pool.num_slots, self.geometry.first_ids[spans[0].layer]
        for _, expert, segment, num, _ in spans:
            self.num_open -= num
            unit = (first + expert) * cache.num_parts + segment
            if has_staged and False in cache.kept[unit : unit + num]:
                cache.free_staged(range(unit, unit + num))
            if self.deferred:
                self._load_deferred(loads)
        return loads

    def end_layer(self) -> None:
        """Everything that the layer needs was computed: tell its policy."""
        router, needed = self.router, self.needed
        assert router is not None and not (self.num_open or self.num_coming or self.deferred)
        self.router, self.needed = None, []
        self.cache.partitions[router.layer].policy.used(needed, router.num_tokens, router.batch_tokens)
        if self.allocation.is_online:
            quotas = self.allocation.ran(router, self._recall)
            if quotas is not None:
                self.cache.resize(quotas, self.allocation.tops(quotas))
                self.fill_quotas()
            if self.cache.targets is not None:
                self.cache.rearrange(self.upcoming())

    def count_ran(
        self, layers: Iterable[tuple[int, list[int], int]], predictions: Iterable[Prediction | None] = repeat(None)
    ) -> int:
        """Native code ran a decoded token through these layers, (layer, experts, nanoseconds), with all experts
        resident, and so were those predicted from each. Counts each as `begin_layer`, `predict` and `end_layer` do, up
        to the first for which these would decide something. Returns how many layers were counted.
        """
        cache, queue, num_ran, first_ids = self.cache, self.queue, 0, self.geometry.first_ids
        for (layer, experts, expert_ns), prediction in zip(layers, predictions, strict=False):
            num, partition = len(experts), cache.partitions[layer]
            pool, policy = partition.pool, partition.policy
            if self.allocation.is_online or pool.num_free + pool.num_kept < pool.num_slots or len(set(experts)) < num:
                break
            needed, ones = list(map(add, experts, repeat(first_ids[layer]))), [1] * num
            cache.is_decoding, counters = True, cache.counters[layer].decode
            if self.predicts or self.keeps_best:
                router = RouterRan(layer, experts, ones, [True] * num, 1)
                if self.predicts:
                    queue.router_ran(router, counters, cache.count_resident)
                if isinstance(policy, ScoredPolicy) and self.keeps_best:
                    policy.needed(needed, router)
                if prediction is not None:
                    self.predict(prediction, is_resident=True)
            nbytes = num * cache.num_parts * self.geometry.unit_nbytes[layer]
            counters.hits += num
            counters.demanded_nbytes += nbytes
            counters.hit_nbytes += nbytes
            counters.expert_ns += expert_ns
            policy.used(needed, ones, 1)
            num_ran += 1
        return num_ran

    @property
    def is_quiet(self) -> bool:
        """Between layers: nothing is to be prefetched, in flight, unused or staged. Then a layer that finds resident
        all that it needs and all that is predicted from it changes nothing but counters and the order of experts.
        """
        cache = self.cache
        is_idle = not cache.prefetching and not self._to_fill and self.queue.is_idle
        return is_idle and not any(pool.num_staged for pool in cache.pools)

    def abandon(self) -> None:
        """The layer failed and no transfer runs: forget what was in flight and free its slots."""
        cache = self.cache
        for unit, state in enumerate(cache.state):
            if state == QUEUED:
                cache.state[unit] = ABSENT
            elif state in (LOADING, PREFETCHING):
                cache.release([unit])
            elif state == RESIDENT:
                cache.free_staged([unit])
        self.queue.clear()
        self._to_fill.clear()
        self.router, self.needed = None, []
        self.num_open = self.num_coming = 0
        self.deferred.clear()
        self.held.clear()

    # -- what the running layer needs --------------------------------------------------------------------------

    def _admit(self, router: RouterRan, missing: list[int], plan: Plan) -> None:
        """Decide what is kept and plan its loads, and those of the rest as staging slots allow. `missing`: positions of
        experts that are not wholly resident.
        """
        cache, needed = self.cache, self.needed
        for position in missing if cache.prefetching else ():
            plan.in_flight += cache.await_prefetched(needed[position])
        if plan.in_flight:
            self.num_coming = sum([span.num_segments for span in plan.in_flight])
            self.num_open += self.num_coming
        if self.keeps_best:
            cache.admit_best(router, needed, self.upcoming() if self.predicts else ())
        else:
            missing = self._keep_needed(router, missing)
        to_load: list[tuple[int, Sequence[int]]] = []
        for position, absent in zip(missing, cache.absent(map(needed.__getitem__, missing)), strict=True):
            to_keep = list(filter(cache.kept.__getitem__, absent))
            if to_keep:
                to_load.append((position, to_keep))
            if len(to_keep) < len(absent):
                waiting = [unit for unit in absent if not cache.kept[unit]]
                self.deferred.append((position, waiting))
                for unit in waiting:
                    cache.state[unit] = QUEUED
        self._load(to_load, plan.loads)
        if self.deferred:
            self._load_deferred(plan.loads)

    def _keep_needed(self, router: RouterRan, missing: list[int]) -> list[int]:
        """Keep what can be kept of what is needed; returns positions in the order in which their experts are loaded."""
        cache, layer, needed = self.cache, router.layer, self.needed
        pool = cache.partitions[layer].pool
        if pool.num_free + pool.num_kept < pool.num_slots:  # what is staged is admitted, too
            missing = [i for i, eid in enumerate(needed) if len(cache.kept_of(eid)) < cache.num_parts]
        evicting, filling = missing, list[int]()
        if False in router.is_decode or 0 in router.num_tokens:
            evicting, filling = self._evicting_and_filling(router, missing)
        if evicting:
            lacking = cache.lacking(layer, map(needed.__getitem__, evicting))
            protected, num_units = self._protected(), sum(map(len, lacking))
            # Room for all at once is cheaper, and evicts the same experts.
            if cache.make_room(layer, num_units, protected) >= num_units:
                cache.keep(lacking)
                lacking = []
            for units in lacking:
                cache.keep([units[: cache.make_room(layer, len(units), protected)]])
        if filling:
            room = cache.room_of_prompts(layer)
            for units in cache.lacking(layer, map(needed.__getitem__, filling)):
                cache.keep([units[:room]])
                room -= len(units[:room])
        return evicting + filling

    def _evicting_and_filling(self, router: RouterRan, missing: Sequence[int]) -> tuple[list[int], list[int]]:
        """Positions of experts that may evict: decode's, in router order, then prompts' where these may; and of those
        that only take free quota. Prompts and pads go by falling number of tokens, then by id.
        """
        num_tokens = router.num_tokens
        evicting = [i for i in missing if router.is_decode[i] and num_tokens[i]]
        filling = [i for i in missing if not (router.is_decode[i] and num_tokens[i])]
        filling.sort(key=lambda i: (-num_tokens[i], self.needed[i]))
        if self.prompts_evict:
            evicting += [i for i in filling if num_tokens[i]]
            filling = [i for i in filling if not num_tokens[i]]
        return evicting, filling

    def _load(self, wanted: Iterable[tuple[int, Sequence[int]]], loads: list[Span]) -> None:
        """Allocate slots for `wanted`: (position in the router's list, units of that expert). Enough are free. Adds the
        spans to `loads`.
        """
        router = self.router
        assert router is not None
        counters = self.cache.counters[router.layer]
        for position, units in wanted:
            phase = counters.decode if router.is_decode[position] else counters.prefill
            phase.loaded_nbytes += len(units) * self.geometry.unit_nbytes[router.layer]
            loads += self.cache.allocate(units, LOADING)
            self.num_open += len(units)
            self.num_coming += len(units)

    def _load_deferred(self, loads: list[Span]) -> None:
        """Load units that wait for staging slots, an expert at a time: whole if staging can hold it, else what
        fits. A layer with nothing else to compute also takes what fits: nothing else would free a slot.
        """
        assert self.router is not None
        pool = self.cache.partitions[self.router.layer].pool
        while self.deferred and pool.num_free:
            position, units = self.deferred[0]
            if pool.num_free < len(units) <= pool.staging and self.num_open:
                return
            self.deferred.popleft()
            if len(units) > pool.num_free:
                self.deferred.appendleft((position, units[pool.num_free :]))
            self._load([(position, units[: pool.num_free])], loads)

    # -- what is predicted -------------------------------------------------------------------------------------

    def predict(self, prediction: Prediction, *, is_resident: bool = False) -> None:
        """A layer will need these experts when it runs next. Valid until its router runs. `is_resident`: all of them
        are, so that nothing is to be prefetched.
        """
        assert self.predicts
        layer, probabilities = prediction.layer, prediction.probabilities
        self.cache.evicts_whole = True
        self.queue.predict(prediction, is_resident=is_resident)
        if self.allocation.is_online:
            self.allocation.predicted(prediction)
        if probabilities is not None:
            self.cache.partitions[layer].policy.predicted(self.geometry.first_ids[layer], probabilities)
        if prediction.outlook is not None:
            for partition in self.cache.distinct_partitions():
                partition.policy.expected(prediction.outlook)

    def prefetch(self) -> list[Span]:
        """Spans to prefetch, in this order, behind every load. Each is one unit, so that a load never waits long."""
        queue, cache, num_parts = self.queue, self.cache, self.cache.num_parts
        begun: list[Span] = []
        queue.needs_slots = False
        if self.deferred:  # loads wait for slots
            return begun
        may_evict = queue.evicts and (cache.is_decoding or self.prompts_evict)
        protected: set[int] | None = None  # made for the first expert that may evict
        for layer, eid, forecast in queue.by_urgency():
            states = cache.state[eid * num_parts : (eid + 1) * num_parts]
            if len(cache.prefetching) + (states.count(ABSENT) or 1) > queue.window:
                break
            if ABSENT in states:
                units = cache.in_state(eid, ABSENT)
                if queue.evicts and protected is None:
                    protected = self._protected()
                if self._make_prefetch_room(layer, units, protected or ()):
                    begun += self._prefetch(layer, units)
                    forecast.prefetched.setdefault(eid, []).extend(units)
                elif not (may_evict and cache.is_top(units[-1])):  # else other partitions may have room
                    queue.needs_slots = cache.is_split
                    break  # until a slot is free
            else:  # protect it until its layer runs
                if forecast.likely:
                    forecast.likely[eid] = None
                if PREFETCHING in states:
                    forecast.prefetched.setdefault(eid, [])
            if protected is not None:
                protected.add(eid)
        return begun + self._load_to_fill() if self._to_fill else begun

    def _make_prefetch_room(self, layer: int, units: Sequence[int], protected: Container[int]) -> bool:
        """Make room for a prefetch of these units of one expert; returns False, with nothing changed, if there is none.
        The expert's top is kept, evicting experts outside `protected`; the rest is staged. Nothing is evicted in a
        prompt that must not evict, or where prefetches go to staging slots: then all units are staged, or the top is
        kept if the partition has room.

        Staging slots for one expert stay free, so that a load never waits for a prefetch. One free slot is enough where
        layers keep tops and this layer runs next: its router frees wrong prefetches.
        """
        cache, queue, geometry = self.cache, self.queue, self.geometry
        pool, partition = cache.partitions[layer].pool, cache.partitions[layer]
        is_next = layer == (queue.now + 1) % geometry.num_layers
        room_to_stage = pool.staging - pool.num_staged - (1 if cache.is_split and is_next else cache.num_parts)
        can_stage = len(units) <= min(room_to_stage, pool.num_free)
        if can_stage and not queue.evicts:
            return True
        top = list(filter(cache.is_top, units))
        may_keep = cache.is_decoding or self.prompts_evict or not queue.evicts
        if not may_keep and cache.room_of_prompts(layer) < len(top):
            return can_stage
        short = max(0, len(top) - partition.room)
        if len(units) - len(top) > max(0, room_to_stage) or pool.num_free + short < len(units):
            return False
        if short and (not queue.evicts or cache.make_room(layer, len(top), protected) < len(top)):
            return False
        cache.keep([top])
        return True

    def _prefetch(self, layer: int, units: Sequence[int]) -> list[Span]:
        """Allocate slots for prefetching units of one expert; returns one span a unit. Enough slots are free."""
        self._count_prefetch(layer, self.cache.is_decoding, len(units))
        spans = self.cache.allocate(units, PREFETCHING)
        return spans if len(units) == 1 else [span for unit in units for span in self.cache.spans([unit])]

    def _count_prefetch(self, layer: int, is_decode: bool, num_units: int) -> None:
        """Count prefetched units; a negative number takes cancelled ones back."""
        phase, nbytes = self.cache.counters[layer].phase(is_decode), num_units * self.geometry.unit_nbytes[layer]
        phase.loaded_nbytes += nbytes
        phase.prefetched_nbytes += nbytes

    def _end_predictions(self, router: RouterRan, cancelled: Sequence[Span]) -> None:
        """Count how good the predictions for the layer were and drop prefetches that did not begin."""
        layer, cache, queue = router.layer, self.cache, self.queue
        for span in cancelled:
            assert span.layer == layer, "only prefetches for this layer are cancelled"
            units = cache.units_of(span)
            queue.cancelled(layer, units[0] // cache.num_parts, units)
            self._count_prefetch(layer, cache.prefetching[units[0]], -len(units))
            cache.release(units)
        phase = cache.counters[layer].phase(cache.is_decoding)
        for eid in queue.router_ran(router, phase, cache.count_resident):
            if eid not in self.needed:  # units still in flight are freed as they arrive
                cache.free_staged(cache.in_state(eid, RESIDENT))

    def upcoming(self) -> set[int]:
        """Experts that must not be evicted: the queue's, and those of which a prefetch is in flight."""
        num_parts = self.cache.num_parts
        return self.queue.upcoming().union([unit // num_parts for unit in self.cache.prefetching])

    def _protected(self) -> set[int]:
        """`upcoming`, and the experts that the running layer needs."""
        return self.upcoming().union(self.needed) if self.predicts else set(self.needed)

    # -- what layers keep --------------------------------------------------------------------------------------

    def configure(self, timing: Timing) -> None:
        """Between passes, when the allocation is due: give it these times to work out quotas."""
        assert self.router is None, "a layer runs"
        self.allocation.configure(timing)

    def preload(self, layer: int, expert: int) -> list[Span]:
        """Keep a whole expert before anything runs; returns the spans to load. For systems that keep everything."""
        units = self.cache.units(self.geometry.expert_id(layer, expert))
        self.cache.keep([units])
        self.num_coming += len(units)
        return self.cache.allocate(units, LOADING)

    def fill_quotas(self) -> None:
        """Quotas have changed: list each layer's best experts. `prefetch` keeps and loads them, as there is room, once
        no prefetch is in flight and the quotas are reached.
        """
        ranks = [
            (rank, first + expert)
            for layer, first in enumerate(self.geometry.first_ids)
            for rank, expert in enumerate(self.allocation.best_of(layer))
        ]
        self._to_fill = [eid for _, eid in sorted(ranks, reverse=True)]

    def _load_to_fill(self) -> list[Span]:
        cache = self.cache
        while self._to_fill and not cache.prefetching and cache.targets is None:
            eid = self._to_fill.pop()
            layer = self.geometry.layer_of[eid]
            pool = cache.partitions[layer].pool
            units = list(filter(cache.is_top, cache.in_state(eid, ABSENT)))
            if 0 < len(units) <= min(pool.num_free, cache.partitions[layer].room):
                cache.keep([units])
                return self._prefetch(layer, units)
        return []

    def _recall(self, layer: int) -> float:
        """The share of the experts needed by a layer's decode that predictions named in time."""
        decode = self.counters[layer].decode
        return decode.predicted_needed / max(1, decode.predicted_of, decode.demands)

    def check(self) -> None:
        """Assert that slots and budgets agree, and that between layers only kept or prefetched units have slots."""
        cache = self.cache
        cache.check()
        queued = [unit for _, units in self.deferred for unit in units]
        assert sorted(queued) == [unit for unit, state in enumerate(cache.state) if state == QUEUED]
        if self.router is None:
            assert not (self.num_open or self.num_coming or queued or self.held) and LOADING not in cache.state
            self._check_staged()

    def _check_staged(self) -> None:
        cache = self.cache
        coming = {eid for forecast in self.queue.forecasts.values() for eid in forecast.prefetched}
        for unit, slot in enumerate(cache.slot):
            if slot >= 0 and not cache.kept[unit]:
                assert unit // cache.num_parts in coming or unit in cache.prefetching
        for pool in cache.pools:
            assert pool.num_free >= pool.staging - pool.num_staged, "between layers only prefetches hold staging slots"
