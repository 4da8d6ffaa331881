"""Predicted experts, those of them that are prefetched, and how useful that was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan, Span
from expertly.policies.prefetch import PrefetchOrder
from expertly.scheduler.cache import Cache
from expertly.scheduler.counters import LayerCounters, PhaseCounters


@dataclass(slots=True)
class _Prefetched:
    """What was prefetched of an expert of the layer whose router ran last."""

    num_segments: int
    is_needed: bool
    is_in_time: int  # 0 or 1


_Queued = tuple[float, int, int]  # (-score, order of arrival, expert)
_Head = tuple[float, int, int]  # (-priority, order of arrival, layer)


class PrefetchQueue:
    """Predicted experts by falling priority, and the segments in flight for them. Experts are dense ids.

    `window` bounds the segments in flight. `evicts`: prefetches go to the cache, which evicts for them; otherwise they
    take free slots. A layer's newest prediction replaces the one before; it ends when the layer's router runs.
    """

    def __init__(
        self,
        geometry: Geometry,
        cache: Cache,
        counters: Sequence[LayerCounters],
        window: int,
        order: PrefetchOrder,
        *,
        evicts: bool,
    ) -> None:
        self.window = window
        self.now = geometry.num_layers - 1
        """The layer whose router ran last; before a pass, the last layer."""
        self.is_used = False
        """Whether anything was ever predicted."""
        self.needs_slots = False
        """Whether more would have been prefetched, had there been free slots."""
        self.waiting: dict[int, int] = {}
        """Experts prefetched for layers that have not run -> how many segments of each were."""
        self._geometry = geometry
        self._layer_of = [geometry.layer_of_expert(eid) for eid in range(geometry.num_experts)]
        self._cache = cache
        self._slots = cache.slots
        self._counters = counters
        self._evicts = evicts
        self._priority = order.priority
        self._queued: dict[int, list[_Queued]] = {}  # by layer, the most urgent last; no list is empty
        self._heads: list[_Head] | None = None  # a heap of each layer's most urgent expert; None: to be made
        self._order = 0
        self._likely: dict[int, dict[int, None]] = {}  # by layer, predicted experts that should stay
        self._for_decode: dict[int, int] = {}  # segments in flight that were prefetched in decode
        self._predicted: list[dict[int, Prediction]] = [{} for _ in geometry.layers]  # by layer, distance
        self._prefetched: tuple[int, PhaseCounters, dict[int, _Prefetched]] | None = None  # for the layer that ran last

    # -- the queue ---------------------------------------------------------------------------------------------

    def predict(self, prediction: Prediction) -> None:
        """Queue these experts in place of those queued for the layer. Resident ones among the surest top-k, and those
        found resident when their turn to be prefetched comes, are not evicted for other prefetches.
        """
        self.expect()
        layer, experts, order = prediction.layer, prediction.experts, self._order
        self._predicted[layer][prediction.distance] = prediction
        first = self._geometry.first_expert_id(layer)
        num_likely = self._geometry.layers[layer].top_k if self._evicts else 0
        self._likely[layer] = dict.fromkeys([first + expert for expert in experts[:num_likely]])
        self._order += len(experts)
        arrivals = range(order, self._order)
        queued = [
            (-score, arrival, first + expert)
            for score, arrival, expert in zip(prediction.scores, arrivals, experts, strict=True)
        ]
        queued.sort(reverse=True)
        self._unqueue(layer)
        if queued:
            self._queued[layer] = queued
            if self._heads is not None:
                heappush(self._heads, self._head(layer))

    def expect(self) -> None:
        """From now on segments may come that no layer waits for."""
        if not self.is_used:
            self.is_used = True
            self._cache.expect_prefetches()

    def _unqueue(self, layer: int) -> None:
        if self._queued.pop(layer, None):
            self._heads = None

    def _first(self) -> int | None:
        """The most urgent expert, or None. It stays queued until `_pop`."""
        if self._heads is None:
            self._heads = [self._head(layer) for layer in self._queued]
            heapify(self._heads)
        return self._queued[self._heads[0][2]][-1][2] if self._heads else None

    def _pop(self) -> None:
        assert self._heads is not None
        layer = self._heads[0][2]
        queued = self._queued[layer]
        queued.pop()
        if queued:
            heapreplace(self._heads, self._head(layer))
        else:
            del self._queued[layer]
            heappop(self._heads)

    def _head(self, layer: int) -> _Head:
        lowered, order, _ = self._queued[layer][-1]
        num_layers = len(self._predicted)
        return -self._priority(-lowered, (layer - self.now) % num_layers or num_layers), order, layer

    def begin(
        self, router: RouterRan | None, protected: Callable[[RouterRan | None], set[int]], *, waits: bool
    ) -> list[Span]:
        """Spans to load behind every load, as free slots allow: a segment each, so that a load never waits long.
        `router`: of the running layer, if any; `waits`: predictions for it wait until it has run. `protected(router)`:
        experts that must not be evicted.
        """
        begun: list[Span] = []
        self.needs_slots = False
        geometry, cache, slots = self._geometry, self._cache, self._slots
        running = router.layer if waits and router is not None else None
        following = (self.now + 1) % geometry.num_layers
        safe: set[int] | None = None  # made for the first expert that needs room
        num_in_flight = self.num_in_flight
        while (room := self.window - num_in_flight) > 0 and (eid := self._first()) is not None:
            layer = self._layer_of[eid]
            if layer == running:
                break
            mask = slots.absent(eid)
            has_room = True
            if mask:
                count = mask.bit_count()
                if count > room and num_in_flight:
                    break
                if self._evicts and safe is None:
                    safe = protected(router)
                has_room = cache.make_prefetch_room(layer, eid, mask, safe, is_next=layer == following)
                if not has_room and (not self._evicts or not cache.may_evict or mask & ~cache.tops[layer]):
                    self.needs_slots = cache.is_split
                    break  # until a slot is free
            self._pop()
            if not mask:  # resident or in flight: protect it until its layer runs
                if self._likely[layer]:
                    self._likely[layer][eid] = None
                if eid in slots.prefetching:
                    self.waiting.setdefault(eid, 0)
            elif has_room:
                begun += self.load(layer, eid, mask)
                num_in_flight += count
                self.waiting[eid] = self.waiting.get(eid, 0) + count
            if safe is not None:
                safe.add(eid)
        return begun

    def load(self, layer: int, eid: int, mask: int) -> list[Span]:
        """Give segments slots, of which there are enough: the spans, each a segment, to load behind every load."""
        cache, count = self._cache, mask.bit_count()
        if cache.is_decoding:
            self._for_decode[eid] = self._for_decode.get(eid, 0) | mask
        self._phase(layer, cache.is_decoding).count_prefetch(count, self._geometry.segment_nbytes(layer))
        return _single_segments(cache.allocate(layer, eid, mask, self._slots.prefetching))

    # -- in flight ---------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        return sum([mask.bit_count() for mask in self._slots.prefetching.values()])

    def upcoming(self) -> set[int]:
        """Experts that must not be evicted: prefetched and not used yet, or resident and predicted."""
        if not self.is_used:
            return set()
        return {*self.waiting, *self._slots.prefetching}.union(*self._likely.values())

    def cancelled(self, eid: int, span: Span) -> None:
        """A prefetch that did not begin was taken back."""
        mask = _mask_of(span)
        if eid in self.waiting:
            self.waiting[eid] -= span.num_segments
        else:
            self._uncount(eid, span.num_segments)
        self._take_back(eid, mask, span)
        self._cache.forget(span.layer, eid, mask)

    def promoted(self, eid: int, span: Span) -> None:
        """A prefetch that did not begin became a load of the running layer."""
        self._uncount(eid, span.num_segments)
        self._take_back(eid, _mask_of(span), span)

    def cancellable(self, layer: int) -> list[int]:
        """Experts in flight for a layer that its router, which ran, did not choose."""
        first = self._geometry.first_expert_id(layer)
        end = first + self._geometry.layers[layer].num_experts
        return sorted(eid - first for eid in self._slots.prefetching if first <= eid < end and eid not in self.waiting)

    def _uncount(self, eid: int, num_segments: int) -> None:
        if self._prefetched is not None and eid in self._prefetched[2]:
            self._prefetched[2][eid].num_segments -= num_segments

    def _take_back(self, eid: int, mask: int, span: Span) -> None:
        is_decode = bool(self._for_decode.get(eid, 0) & mask)
        nbytes = self._geometry.segment_nbytes(span.layer)
        self._phase(span.layer, is_decode).count_prefetch(-span.num_segments, nbytes)
        self.forget_phase(eid, mask)

    def forget_phase(self, eid: int, mask: int) -> None:
        """Prefetched segments have arrived, or will not come: forget in which phase they were prefetched."""
        if eid in self._for_decode:
            self._for_decode[eid] &= ~mask
            if not self._for_decode[eid]:
                del self._for_decode[eid]

    # -- counting ----------------------------------------------------------------------------------------------

    def router_ran(self, router: RouterRan, is_decoding: bool) -> list[int]:
        """Count how good the predictions for the layer were (ProMoE, section 4), note what was prefetched of it, and
        empty its queue. Experts that only pad tokens chose do not count. Returns the experts that were prefetched.
        """
        layer, experts, geometry = router.layer, router.experts, self._geometry
        if 0 in router.num_tokens:
            experts = [expert for expert, num in zip(experts, router.num_tokens, strict=True) if num]
        shape, first = geometry.layers[layer], geometry.first_expert_id(layer)
        end = first + shape.num_experts
        full, phase = self._slots.full, self._phase(layer, is_decoding)
        is_resident = self._slots.resident[first:end]
        if full > 1:
            is_resident = [mask == full for mask in is_resident]
        needed = set(experts)
        for prediction in self._predicted[layer].values():
            phase.count_prediction(prediction, needed, is_resident, shape.top_k)
        self._predicted[layer].clear()
        self._unqueue(layer)
        self._heads = None  # the layers that are queued are nearer now
        self._likely.pop(layer, None)
        ended = [eid for eid in self.waiting if first <= eid < end]
        if ended:
            outcomes = {
                eid: _Prefetched(self.waiting.pop(eid), eid - first in needed, is_resident[eid - first])
                for eid in ended
            }
            self._prefetched = geometry.segment_nbytes(layer), phase, outcomes
        return ended

    def settle(self) -> None:
        """Count the prefetches for the layer that ran last; none of them is taken back any more."""
        if self._prefetched is None:
            return
        segment_nbytes, phase, outcomes = self._prefetched
        self._prefetched = None
        for one in outcomes.values():
            if one.num_segments:
                phase.prefetched += 1
                if one.is_needed:
                    phase.prefetched_needed += 1
                    phase.prefetched_in_time += one.is_in_time
                else:
                    phase.wasted_nbytes += one.num_segments * segment_nbytes

    def clear(self) -> None:
        self._queued.clear()
        self._heads = None
        self.now = self._geometry.num_layers - 1
        self.waiting.clear()
        self._likely.clear()
        self._for_decode.clear()
        self._prefetched = None
        for predicted in self._predicted:
            predicted.clear()

    def _phase(self, layer: int, is_decoding: bool) -> PhaseCounters:
        counters = self._counters[layer]
        return counters.decode if is_decoding else counters.prefill


def _mask_of(span: Span) -> int:
    return ((1 << span.num_segments) - 1) << span.segment


def _single_segments(spans: list[Span]) -> list[Span]:
    return [
        span if span.num_segments == 1 else Span(span.layer, span.expert, span.segment + i, 1, span.slot + i)
        for span in spans
        for i in range(span.num_segments)
    ]
