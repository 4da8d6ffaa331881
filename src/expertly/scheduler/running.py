"""The running layer: which of its missing experts are kept, loaded now or wait for slots, and in which order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from expertly.core.geometry import Geometry
from expertly.core.messages import Plan, RouterRan, Span
from expertly.scheduler.cache import Cache
from expertly.scheduler.counters import LayerCounters
from expertly.scheduler.misses import MissSplit
from expertly.scheduler.prefetch import PrefetchQueue
from expertly.scheduler.slots import lowest_bits

_Lacking = tuple[int, int, int]
"""A position, the absent segments of its expert, and those of them that are kept."""


class RunningLayer:
    """Loads everything missing when the router ran; the driver computes resident experts meanwhile. Positions are
    those of the router's list, masks have a bit a segment.
    """

    def __init__(
        self,
        geometry: Geometry,
        cache: Cache,
        queue: PrefetchQueue,
        counters: Sequence[LayerCounters],
        *,
        keeps_best: bool = False,
        split: MissSplit | None = None,
    ) -> None:
        """`keeps_best`: the best of what is kept and needed is kept; otherwise every needed expert is. `split`: how
        many missing experts the host computes; None: none.
        """
        self._split = split
        self.router: RouterRan | None = None
        self.num_open = 0
        """Segments that a plan named and that were not computed yet."""
        self.deferred: deque[tuple[int, int]] = deque()
        """(position, mask) of segments that wait for staging slots."""
        self._geometry = geometry
        self._cache = cache
        self._slots = cache.slots
        self._queue = queue
        self._counters = counters
        self._keeps_best = keeps_best
        self._staged = cache.staged
        self._classes = geometry.size_classes
        self._first_of = [geometry.first_expert_id(layer) for layer in range(geometry.num_layers)]
        self._segment_nbytes = [geometry.segment_nbytes(layer) for layer in range(geometry.num_layers)]

    @property
    def holds_prefetching(self) -> bool:
        """Whether loads wait for slots, so that nothing may be prefetched."""
        return bool(self.deferred)

    @property
    def is_done(self) -> bool:
        """Whether everything that the layer needs was computed. For checks alone: what runs looks at the parts."""
        return not (self.num_open or self.deferred)

    def begin(self, router: RouterRan, ready: list[Span], missing: list[int]) -> Plan:
        """The router ran: `ready` are resident spans, `missing` positions of experts that are not wholly resident."""
        self.router = router
        plan = Plan(ready)
        if missing or self._staged[self._classes[router.layer]] or self._keeps_best:
            self._admit(router, missing, plan)
            self._opened(plan)
        else:
            for span in ready:
                self.num_open += span.num_segments
        return plan

    def computed(self, spans: Sequence[Span]) -> Plan | None:
        """Spans were computed: free those that are staged. Returns what to do next, or None."""
        cache, layer = self._cache, spans[0].layer
        if not (self.deferred or self._staged[self._classes[layer]]):
            for span in spans:
                self.num_open -= span.num_segments
            return None
        first, kept = self._first_of[layer], cache.partitions[layer].kept
        plan: Plan | None = None
        for span in spans:
            self.num_open -= span.num_segments
            eid, mask = first + span.expert, ((1 << span.num_segments) - 1) << span.segment
            if mask & ~kept.get(eid, 0):
                cache.free_staged(layer, eid, mask)
            if self.deferred:
                loaded = Plan()
                self._load_deferred(loaded, is_idle=not self.num_open)
                self._opened(loaded)
                if plan is None:
                    plan = loaded
                else:
                    plan.loads.extend(loaded.loads)
        return plan

    def protected(self, router: RouterRan | None) -> set[int]:
        """Experts that must not be evicted: those that the running layer needs, and predicted or prefetched ones."""
        protected = self._queue.upcoming() if self._queue.is_used else set()
        if router is not None:
            first = self._first_of[router.layer]
            for expert in router.experts:
                protected.add(first + expert)
        return protected

    def clear(self) -> None:
        self.router = None
        self.deferred.clear()
        self.num_open = 0

    def _opened(self, plan: Plan) -> None:
        for spans in (plan.ready, plan.loads, plan.in_flight):
            for span in spans:
                self.num_open += span.num_segments

    def _admit(self, router: RouterRan, missing: list[int], plan: Plan) -> None:
        """Decide what is kept and load it; load the rest as far as there are staging slots."""
        cache, slots, first = self._cache, self._slots, self._first_of[router.layer]
        if missing and self._queue.is_used:
            for position in missing:
                plan.in_flight.extend(slots.await_in_flight(first + router.experts[position]))
        if self._keeps_best:
            needed = [first + expert for expert in router.experts]
            kept = cache.admit_best(router, needed, self._queue.upcoming() if self._queue.is_used else ())
            lacking: list[_Lacking] = []
            for position in missing:
                eid = first + router.experts[position]
                absent = slots.full & ~(slots.resident[eid] | slots.in_flight[eid])
                lacking.append((position, absent, absent & kept[eid]))
            self._bring(router, lacking, plan)
        else:
            self._admit_always(router, missing, plan)
        if self.deferred:
            self._load_deferred(plan, is_idle=not (plan.ready or plan.loads or plan.in_flight))

    def _admit_always(self, router: RouterRan, missing: list[int], plan: Plan) -> None:
        cache, slots, layer, experts = self._cache, self._slots, router.layer, router.experts
        first = self._first_of[layer]
        is_predicted = self._queue.is_used  # otherwise segments that are not kept have no slot either
        if is_predicted:
            missing = [i for i, expert in enumerate(experts) if cache.not_kept(layer, first + expert)]
        protected = self.protected(router)
        evicting, filling = self._in_order(router, missing)
        absent = {i: slots.absent(first + experts[i]) for i in missing}
        lacking = absent
        if is_predicted:
            lacking = {i: cache.not_kept(layer, first + experts[i]) for i in missing}
        if len(evicting) > 1:  # making room for all at once is cheaper, and evicts the same experts
            top = cache.tops[layer]
            cache.make_room(layer, sum([(lacking[i] & top).bit_count() for i in evicting]), protected)
        brought: list[_Lacking] = []
        for spared, positions in ((protected, evicting), (None, filling)):
            for position in positions:
                kept = cache.admit(layer, first + experts[position], lacking[position], spared) & absent[position]
                brought.append((position, absent[position], kept))
        self._bring(router, brought, plan)

    def _bring(self, router: RouterRan, lacking: list[_Lacking], plan: Plan) -> None:
        """Load what is kept of each expert's absent segments; the others wait for staging slots."""
        if self._split is not None and lacking:
            lacking = self._give_to_host(router, lacking, plan, self._split)
        for position, absent, kept in lacking:
            if kept:
                self._load(position, kept, plan.loads)
            if kept != absent:
                self.deferred.append((position, absent & ~kept))

    def _give_to_host(self, router: RouterRan, lacking: list[_Lacking], plan: Plan, split: MissSplit) -> list[_Lacking]:
        """Have the host compute some of the experts that are wholly absent; returns the others. First come those that
        it computes soonest, of these first those that are not kept. One that is kept is loaded all the same, for later
        layers, but only while no prefetch is in flight: more would delay loads, and outputs of the host.
        """
        layer, experts, num_tokens, full = router.layer, router.experts, router.num_tokens, self._slots.full
        whole = [one for one in lacking if one[1] == full]
        whole.sort(key=lambda one: (split.expert_ns(layer, num_tokens[one[0]]), one[2] != 0))
        num_coming = sum([span.num_segments for span in plan.in_flight])
        num_coming += sum([absent.bit_count() for _, absent, _ in lacking if absent != full])
        tokens = [num_tokens[position] for position, _, _ in whole]
        given = whole[: split.num_on_host(layer, tokens, router.batch_tokens, num_coming)]
        for position, _, kept in given:
            plan.on_host.append(experts[position])
            counters = self._counters[layer]
            phase = counters.decode if router.is_decode[position] else counters.prefill
            phase.computed_on_host += num_tokens[position] > 0
            eid = self._first_of[layer] + experts[position]
            if kept and self._queue.num_in_flight:
                self._cache.keep_no_more(layer, eid, kept)
            elif kept:
                plan.following += self._queue.load(layer, eid, kept)
        there = set(given)
        return [one for one in lacking if one not in there]

    def _in_order(self, router: RouterRan, missing: list[int]) -> tuple[list[int], list[int]]:
        """Positions whose experts may evict (those of decode in router order, then those of prompts where prompts may)
        and positions whose experts only take free slots. Prompts and pads: by falling number of tokens, then by id.
        """
        is_decode, experts, num_tokens = router.is_decode, router.experts, router.num_tokens
        evicting = [i for i in missing if is_decode[i] and num_tokens[i]]
        rest = [i for i in missing if not (is_decode[i] and num_tokens[i])] if len(evicting) < len(missing) else []
        rest.sort(key=lambda i: (-num_tokens[i], experts[i]))
        if not self._cache.prompts_evict:
            return evicting, rest
        return evicting + [i for i in rest if num_tokens[i]], [i for i in rest if not num_tokens[i]]

    def _load(self, position: int, mask: int, loads: list[Span], purpose: dict[int, int] | None = None) -> None:
        """Give segments `mask` slots, of which there are enough, and add their spans to `loads`. `purpose`: as which
        they are in flight (see SlotTable); awaited, unless said.
        """
        router = self.router
        assert router is not None
        layer = router.layer
        counters = self._counters[layer]
        phase = counters.decode if router.is_decode[position] else counters.prefill
        phase.loaded_nbytes += mask.bit_count() * self._segment_nbytes[layer]
        eid = self._first_of[layer] + router.experts[position]
        loads.extend(self._cache.allocate(layer, eid, mask, self._slots.awaited if purpose is None else purpose))

    def _load_deferred(self, plan: Plan, *, is_idle: bool) -> None:
        """Load segments that wait for staging slots, an expert at a time: whole where the staging slots can hold that,
        otherwise as much as fits. A layer that `is_idle` takes what fits, too: nothing it computes will free a slot.
        """
        assert self.router is not None
        layer = self.router.layer
        staging = self._cache.staging[self._classes[layer]]
        deferred = self.deferred
        while deferred and (num_free := self._slots.num_free(layer)):
            position, mask = deferred[0]
            count = mask.bit_count()
            if num_free >= count:
                deferred.popleft()
            elif staging >= count and not is_idle:
                return
            else:
                now = lowest_bits(mask, num_free)
                deferred[0] = (position, mask & ~now)
                mask = now
            self._load(position, mask, plan.loads)
            is_idle = False


class TurnByTurn(RunningLayer):
    """A layer whose experts take turns: the baselines of ProMoE's ablation (section 5).

    `by_id`: turns go by rising id, and only the expert whose turn it is and requested ones are protected from eviction.
    Otherwise resident experts go first, then those in flight, then absent ones, and all that the layer needs is
    protected. `is_early` (only `by_id`): missing experts are requested when the router ran, as slots allow. Otherwise a
    missing expert is found when its turn comes.
    """

    def __init__(
        self,
        geometry: Geometry,
        cache: Cache,
        queue: PrefetchQueue,
        counters: Sequence[LayerCounters],
        *,
        by_id: bool,
        is_early: bool,
    ) -> None:
        assert by_id or not is_early, "turns that are early go by id"
        super().__init__(geometry, cache, queue, counters)
        self._by_id = by_id
        self._is_early = is_early
        self._left: dict[int, int] = {}  # experts whose turn has not come -> their positions
        self._missed: deque[int] = deque()  # missing experts, to be requested as slots allow
        self._requested: dict[int, None] = {}  # requested experts whose turn has not come

    @property
    def holds_prefetching(self) -> bool:
        return bool(self.deferred or self._missed)

    @property
    def is_done(self) -> bool:
        return not self._left and super().is_done

    def begin(self, router: RouterRan, ready: list[Span], missing: list[int]) -> Plan:
        self.router = router
        if not router.experts:
            return Plan()
        first, experts = self._geometry.first_expert_id(router.layer), router.experts
        positions = list(range(len(experts)))
        if self._by_id:
            positions.sort(key=experts.__getitem__)
        else:
            evicting, filling = self._in_order(router, positions)
            positions = evicting + filling
        self._left = {first + experts[i]: i for i in positions}
        if self._is_early:
            self._missed.extend([eid for eid in self._left if self._slots.absent(eid)])
        return self._turn()

    def clear(self) -> None:
        super().clear()
        self._left.clear()
        self._missed.clear()
        self._requested.clear()

    def computed(self, spans: Sequence[Span]) -> Plan | None:
        plan = super().computed(spans)
        if plan is None and not self.num_open and not self.deferred and self._left:
            return self._turn()
        return plan

    def _turn(self) -> Plan:
        """Take the next turn: of one expert or, unless turns go by id, of all resident ones."""
        plan, slots = Plan(), self._slots
        if self._by_id:
            running = next(iter(self._left))
            self._reach(running, plan)
            if self._is_early:
                plan.requested.extend(self._request(running))
        else:
            here = [eid for eid in self._left if slots.resident[eid] == slots.full]
            if not here:
                in_flight = [eid for eid in slots.prefetching if eid in self._left]
                here = in_flight[:1] or [next(iter(self._left))]
            for eid in here:
                self._reach(eid, plan)
        self._opened(plan)
        return plan

    def _reach(self, eid: int, plan: Plan) -> None:
        """The turn of an expert has come: compute resident segments, wait for those in flight, load the rest."""
        router, cache, slots = self.router, self._cache, self._slots
        assert router is not None
        layer, position = router.layer, self._left.pop(eid)
        self._requested.pop(eid, None)
        if slots.resident[eid]:
            plan.ready.extend(slots.spans(eid, slots.resident[eid]))
        plan.in_flight.extend(slots.await_in_flight(eid))
        mask = cache.not_kept(layer, eid)
        if mask:
            cache.begin(cache.is_decoding)  # what is protected differs from turn to turn
            absent = slots.absent(eid)
            kept = cache.admit(layer, eid, mask, self._protected_from(position, eid)) & absent
            if kept:
                self._load(position, kept, plan.loads)
            if kept != absent:
                self.deferred.append((position, absent & ~kept))
                self._load_deferred(plan, is_idle=not (plan.ready or plan.loads or plan.in_flight))

    def _request(self, running: int) -> list[Span]:
        """Request missing experts, the lowest id first. Each is kept, or staged if that leaves staging slots for one
        whole expert, the running one. The first that gets no slots waits, and all behind it.
        """
        router, cache, slots = self.router, self._cache, self._slots
        assert router is not None
        spans: list[Span] = []
        layer, num_segments = router.layer, self._geometry.segments_per_expert
        size_class = self._classes[layer]
        while self._missed and self._staged[size_class] <= cache.staging[size_class]:
            eid = self._missed[0]
            absent = slots.absent(eid)
            if eid in self._left and absent:
                position = self._left[eid]
                cache.begin(cache.is_decoding)
                protected = self._protected_from(position, eid, running)
                mask = cache.admit(layer, eid, cache.not_kept(layer, eid), protected) & absent
                left = absent & ~mask
                if left and cache.staging_room(layer) >= left.bit_count() + num_segments:
                    mask = absent
                if mask:
                    self._requested[eid] = None
                    self._load(position, mask, spans, slots.requested)
                if mask != absent:
                    break
            self._missed.popleft()
        return spans

    def _protected_from(self, position: int, *eids: int) -> set[int] | None:
        """Experts that must not be evicted for the one at this position; None: it may evict nothing."""
        router = self.router
        assert router is not None
        if self._by_id:
            return {*eids, *self._requested, *self._queue.upcoming()}
        is_evicting = (router.is_decode[position] or self._cache.prompts_evict) and router.num_tokens[position]
        return self.protected(router) if is_evicting else None
