"""What the running layer waits for: what is missing is admitted, then loaded, or waits for the ring."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from expertly.core.geometry import Geometry
from expertly.core.messages import Plan, RouterRan, Span
from expertly.scheduler.admission import keep_best
from expertly.scheduler.counters import LayerCounters
from expertly.scheduler.keeper import Keeper, lowest_bits
from expertly.scheduler.speculation import Speculation


class Demands:
    """Of one layer at a time. Positions are those of the router's list, masks are of segments."""

    def __init__(
        self,
        geometry: Geometry,
        keeper: Keeper,
        speculation: Speculation,
        counters: list[LayerCounters],
    ) -> None:
        self._geometry = geometry
        self._keeper = keeper
        self._speculation = speculation
        self._counters = counters
        self.in_flight: dict[Span, bool | None] = {}
        """What the layer waits for; of what was asked for ahead, whether decode had."""
        self.deferred: deque[tuple[int, int]] = deque()
        """(position, mask) that wait for ring slots."""

    def all(self, router: RouterRan, missing: list[int], step: Plan) -> None:
        """Admit what is missing, free its slots, and load: first what is kept, then as much as the ring takes."""
        layer = router.layer
        keeper, first = self._keeper, self._geometry.first_expert_id(layer)
        experts = router.experts
        protected = self.protected(router)
        is_used = self._speculation.is_used
        lacking: Callable[[int], int] = keeper.absent  # the same as what is not kept, where nothing is loaded ahead
        if is_used:
            lacking = partial(keeper.not_kept, layer)
            self.join([first + experts[i] for i in missing], step)
            missing = [i for i, expert in enumerate(experts) if lacking(first + expert)]
        evicting, filling = in_order(router, missing)
        if len(evicting) > 1:  # room for all of them at once costs less than for each in turn; the victims are the same
            top = keeper.tops[layer]
            keeper.make_room(layer, sum((lacking(first + experts[i]) & top).bit_count() for i in evicting), protected)
        admitted: list[tuple[int, int]] = []
        for may_evict, positions in ((True, evicting), (False, filling)):
            for position in positions:
                eid = first + experts[position]
                mask = lacking(eid)
                absent = mask & keeper.absent(eid) if is_used else mask
                kept = keeper.admit(layer, eid, mask, protected if may_evict else None) & absent
                if kept:
                    admitted.append((position, kept))
                if kept != absent:
                    self.deferred.append((position, absent & ~kept))
        for position, mask in admitted:
            self.load(router, position, mask, step.loads)
        if self.deferred:
            self.load_deferred(router, step, is_idle=not (step.ready or step.loads or step.joined))

    def best(self, router: RouterRan, missing: list[int], step: Plan) -> None:
        """The same with the admission `best`."""
        first = self._geometry.first_expert_id(router.layer)
        if missing and self._speculation.is_used:
            self.join([first + router.experts[i] for i in missing], step)
        needed = [first + expert for expert in router.experts]
        kept = keep_best(self._keeper, router, needed, self._speculation.guessed())
        for position in missing:
            eid = first + router.experts[position]
            absent = self._keeper.absent(eid)
            if absent & kept[eid]:
                self.load(router, position, absent & kept[eid], step.loads)
            if absent & ~kept[eid]:
                self.deferred.append((position, absent & ~kept[eid]))
        if self.deferred:
            self.load_deferred(router, step, is_idle=not (step.ready or step.loads or step.joined))

    def load(
        self,
        router: RouterRan,
        position: int,
        mask: int,
        loads: list[Span],
        in_flight: dict[Span, bool | None] | None = None,
    ) -> None:
        """Add to `loads` what of an expert is loaded from now on because the layer needs it: `mask`, which has slots.
        The layer waits for it, or it is noted in `in_flight`.
        """
        if in_flight is None:
            in_flight = self.in_flight
        layer = router.layer
        counters = self._counters[layer]
        phase = counters.decode if router.is_decode[position] else counters.prefill
        phase.loaded_nbytes += mask.bit_count() * self._geometry.segment_nbytes(layer)
        for span in self._keeper.allocate(layer, self._geometry.expert_id(layer, router.experts[position]), mask):
            in_flight[span] = None
            loads.append(span)

    def load_deferred(self, router: RouterRan, step: Plan, *, is_idle: bool) -> None:
        """Load what waits for the ring: whole experts where the ring can hold one, else what fits, as where the layer
        `is_idle`: nothing else of it will leave a place.
        """
        layer = router.layer
        pool = self._keeper.residency.pool_of(layer)
        ring = self._keeper.ring[self._geometry.size_classes[layer]]
        deferred = self.deferred
        while deferred and pool.num_free:
            position, mask = deferred[0]
            count = mask.bit_count()
            if pool.num_free >= count:
                deferred.popleft()
            elif ring >= count and not is_idle:
                return
            else:
                now = lowest_bits(mask, pool.num_free)
                deferred[0] = (position, mask & ~now)
                mask = now
            self.load(router, position, mask, step.loads)
            is_idle = False

    def join(self, eids: list[int], step: Plan) -> None:
        """Wait for what is in flight of these experts of the running layer."""
        for eid in eids:
            spans = self._speculation.join(eid)
            self.in_flight.update(spans)
            step.joined.extend(spans)

    def protected(self, router: RouterRan | None) -> set[int]:
        """What must not be evicted: what the running layer needs, and what guesses keep."""
        protected = self._speculation.guessed()
        if router is not None:
            first = self._geometry.first_expert_id(router.layer)
            protected.update([first + expert for expert in router.experts])
        return protected

    def clear(self) -> None:
        """The layer waits for nothing."""
        self.in_flight.clear()
        self.deferred.clear()


def in_order(router: RouterRan, missing: list[int]) -> tuple[list[int], list[int]]:
    """Positions that may evict, in router order: decode's; and prefill's and pads', by falling number of tokens, ties
    on the lowest id, which only fill.
    """
    is_decode, experts, num_tokens = router.is_decode, router.experts, router.num_tokens
    evicting = [i for i in missing if is_decode[i] and num_tokens[i]]
    filling = [i for i in missing if not (is_decode[i] and num_tokens[i])] if len(evicting) < len(missing) else []
    filling.sort(key=lambda i: (-num_tokens[i], experts[i]))
    return evicting, filling
