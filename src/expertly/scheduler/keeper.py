"""Who has slots and why: what is kept between layers, in one cache a scope, and what passes through the ring."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.policies.eviction import EvictionPolicy
from expertly.scheduler.budget import Budget, check_shares
from expertly.scheduler.cache import KeptCache
from expertly.scheduler.counters import LayerCounters
from expertly.scheduler.slot_table import SlotTable, bits

_NOTHING_REFUSED = 1 << 62


class Keeper:
    """A segment with a slot is kept (some cache counts it) or passing. Experts are dense ids, masks are of segments."""

    def __init__(
        self,
        geometry: Geometry,
        budget: Budget,
        make_policy: Callable[[int], EvictionPolicy],
        scope: str,
        counters: list[LayerCounters],
        tops: Sequence[int] | None = None,
    ) -> None:
        self._geometry = geometry
        self._budget = budget
        self._counters = counters
        self.residency = SlotTable(geometry, budget.pool_slots(), in_parts=tops is not None)
        num_segments = geometry.segments_per_expert
        self.is_split = tops is not None
        """Whether layers keep parts of experts; what that leaves of their shares is the ring's."""
        self.tops = [self.residency.full] * geometry.num_layers if tops is None else [top_mask(num) for num in tops]
        """Of each layer, what is kept of an expert that is: the rest of it passes."""
        self.shares = list(budget.layer_shares)  # of each layer, now: where caches are per layer, their capacities
        if tops is not None:
            assert scope == "layer", "a cache over all layers has no splits"
            given = zip(self.shares, tops, strict=True)
            self.shares = [whole_tops(geometry, layer, *one) for layer, one in enumerate(given)]
        self.ring = list(budget.ring_slots)
        """Slots of each size class that no share holds."""
        self._find_ring()
        if scope == "layer":
            self.caches = [
                KeptCache(share, make_policy(share // top.bit_count()))
                for share, top in zip(self.shares, self.tops, strict=True)
            ]
        else:
            shared = [KeptCache(slots, make_policy(slots // num_segments)) for slots in budget.kept_slots]
            self.caches = [shared[c] for c in geometry.size_classes]
        self.distinct_caches = list({id(cache): cache for cache in self.caches}.values())
        self.targets: list[int] | None = None  # the shares to come, where they are others
        self._prefill_room = list(self.shares)  # of each layer, what its share lacks: negative above it
        self.passing = [0] * geometry.num_size_classes  # segments in slots that are not kept
        self._refused = _NOTHING_REFUSED  # segments that could not be evicted for this layer: so many cannot be now
        self.is_decoding = True  # the running layer, or the last: evictions are counted in its phase

    def begin(self, is_decoding: bool) -> None:
        """Another layer decides."""
        self.is_decoding = is_decoding
        self._refused = _NOTHING_REFUSED

    def absent(self, eid: int) -> int:
        """Segments without a slot."""
        return self.residency.full & ~(self.residency.resident[eid] | self.residency.loading[eid])

    def not_kept(self, layer: int, eid: int) -> int:
        """Segments that are not kept, with a slot or without."""
        return self.residency.full & ~self.caches[layer].kept.get(eid, 0)

    def unkept(self, layer: int, eid: int) -> int:
        """Segments with a slot that are not kept."""
        held = self.residency.resident[eid] | self.residency.loading[eid]
        return held & ~self.caches[layer].kept.get(eid, 0)

    def ring_room(self, layer: int) -> int:
        """Segments that may pass beside those that do."""
        size_class = self._geometry.size_classes[layer]
        return max(0, self.ring[size_class] - self.passing[size_class])

    # -- keeping -----------------------------------------------------------------------------------------------

    def keep(self, layer: int, eid: int, mask: int) -> None:
        """Keep `mask` from now on; there is room. What of it was passing no longer is."""
        if self.passing[self._geometry.size_classes[layer]]:
            self._pass(layer, -(self.unkept(layer, eid) & mask).bit_count())
        self.caches[layer].keep(eid, mask)
        self._prefill_room[layer] -= mask.bit_count()

    def admit(self, layer: int, eid: int, mask: int, protected: Container[int] | None) -> int:
        """The part of `mask` (which is not kept) that is kept from now on, of the top that the layer keeps. Decode
        evicts what is not `protected`; prefill (None) only fills what is empty of the layer's share.
        """
        mask &= self.tops[layer]
        count = mask.bit_count()
        if protected is None:
            room = max(0, min(self.caches[layer].room, self._prefill_room[layer]))
        else:
            room = self.make_room(layer, count, protected)
        if room < count:
            mask = lowest_bits(mask, room)
        if mask:
            self.keep(layer, eid, mask)
        return mask

    def make_room(self, layer: int, count: int, protected: Container[int]) -> int:
        """Evict so that `count` segments fit, or nothing where that cannot be; the room there is."""
        cache = self.caches[layer]
        missing = count - cache.room
        if 0 < missing < self._refused:
            victims = cache.evict(missing, protected)
            if victims is None:
                self._refused = missing
                return cache.room
            for victim, gone in victims:
                self._evicted(victim, gone)
        return cache.room

    def evict(self, eid: int, mask: int) -> None:
        """No longer keep `mask`, which is resident, and free its slots."""
        self.caches[self._geometry.layer_of_expert(eid)].drop(eid, mask)
        self._evicted(eid, mask)

    def let_pass(self, layer: int, eid: int, mask: int) -> None:
        """No longer keep `mask`, but leave it in its slots until it is computed."""
        self.caches[layer].drop(eid, mask)
        self._prefill_room[layer] += mask.bit_count()
        self._pass(layer, mask.bit_count())
        self._count_evicted(layer, mask)

    def has_room_ahead(
        self, layer: int, eid: int, mask: int, protected: Container[int] | None, *, is_next: bool = False
    ) -> bool:
        """Find places for `mask`, which is loaded ahead. What the layer keeps of an expert is kept, evicting for it
        what is not `protected`, and the rest takes free places of the ring. With None all does, or only that rest and
        the cache has free places. False where there are none; nothing has changed then.

        Of the ring an expert's worth stays free: a demand never waits for a guess. Where layers keep parts of experts
        and the layer `is_next` to run, a segment does: those of its guesses that are wrong go when it is asked for.
        """
        count = mask.bit_count()
        pool, cache = self.residency.pool_of(layer), self.caches[layer]
        size_class = self._geometry.size_classes[layer]
        ring = self.ring[size_class] - (1 if self.is_split and is_next else self._geometry.segments_per_expert)
        top = mask & self.tops[layer]
        num_kept = top.bit_count()
        has_ring = num_kept == count or self.passing[size_class] + count - num_kept <= ring
        if protected is None:
            if self.passing[size_class] + count <= ring and pool.num_free >= count:
                return True
            if not has_ring or cache.room < num_kept or pool.num_free < count:
                return False
        else:
            room = cache.room if self.is_decoding else min(cache.room, self._prefill_room[layer])
            if not has_ring:
                return False
            if room < num_kept:
                missing = num_kept - cache.room
                if not self.is_decoding or pool.num_free + missing < count:
                    return False
                self._refused = _NOTHING_REFUSED
                if self.make_room(layer, num_kept, protected) < num_kept:
                    return False
            if pool.num_free < count:
                return False
        if top:
            self.keep(layer, eid, top)
        return True

    # -- shares ------------------------------------------------------------------------------------------------

    def resize(self, shares: Sequence[int], tops: Sequence[int] | None = None) -> None:
        """Layers shall keep these shares, in segments, and of an expert as many as `tops` says. Without that, the sum
        in each size class is what they have now; with it, no more than the budget keeps: the rest is the ring's.
        `rearrange` gets there. Where there is one cache a layer.
        """
        assert len(self.distinct_caches) == len(self.caches), "a cache over all layers has no shares"
        sums, most = check_shares(self._geometry, shares), self._budget.kept_slots
        if tops is not None and any(num > accepted for num, accepted in zip(sums, most, strict=True)):
            raise ConfigError(f"allocation: shares={list(shares)}: must be at most {list(most)} in each size class")
        if tops is None and sums != check_shares(self._geometry, self.targets or self.shares):
            raise ConfigError(
                f"allocation: shares={list(shares)}: must have the sum of {self.shares} in each size class"
            )
        self.targets = list(shares)
        if tops is not None:
            self.is_split = True
            self.tops = [top_mask(num) for num in tops]

    def rearrange(self, protected: Container[int]) -> None:
        """Between layers, once or until `targets` is None: what lies beyond the tops that layers keep goes, layers that
        shrink evict by their policies, but nothing that is `protected`; those that grow, the lowest first, get the room
        there is then. An expert of which less is kept than the top is filled when it is needed next.
        """
        if self.targets is None:
            return
        self._refused = _NOTHING_REFUSED
        is_cut = not self.is_split or self._cut(protected)
        for layer, (cache, target) in enumerate(zip(self.caches, self.targets, strict=True)):
            if target < self.shares[layer]:
                for victim, gone in cache.shrink(target, protected):
                    assert not self.residency.loading[victim] & gone, "what is in flight is protected"
                    self._evicted(victim, gone)
                self._share(layer, cache.capacity)
        num_segments = self._geometry.segments_per_expert
        passing = [num and num + num_segments for num in self.passing]  # with room for a demand beside it
        every = zip(self.residency.pools, self._budget.ring_slots, passing, self._kept_slots(), strict=True)
        room = [pool.num_slots - max(ring, least) - kept for pool, ring, least, kept in every]
        for layer, target in enumerate(self.targets):
            size_class = self._geometry.size_classes[layer]
            more = min(target - self.shares[layer], room[size_class])
            if more > 0:
                room[size_class] -= more
                self.caches[layer].capacity += more
                self._share(layer, self.caches[layer].capacity)
        self._find_ring()
        if is_cut and self.shares == self.targets:
            self.targets = None

    def _cut(self, protected: Container[int]) -> bool:
        """Drop what is kept beyond the tops; whether nothing is left of it."""
        is_cut = True
        for cache, top in zip(self.caches, self.tops, strict=True):
            for eid, mask in list(cache.kept.items()):
                if mask & ~top and eid in protected:
                    is_cut = False
                elif mask & ~top:
                    self.evict(eid, mask & ~top)
        return is_cut

    def _kept_slots(self) -> list[int]:
        """Of each size class, the sum of the shares."""
        kept = [0] * self._geometry.num_size_classes
        for size_class, share in zip(self._geometry.size_classes, self.shares, strict=True):
            kept[size_class] += share
        return kept

    def _find_ring(self) -> None:
        if self.is_split:
            pools = zip(self.residency.pools, self._kept_slots(), strict=True)
            self.ring = [pool.num_slots - kept for pool, kept in pools]

    def _share(self, layer: int, share: int) -> None:
        self._prefill_room[layer] += share - self.shares[layer]
        self.shares[layer] = share

    # -- slots -------------------------------------------------------------------------------------------------

    def allocate(self, layer: int, eid: int, mask: int) -> list[Span]:
        """Slots for `mask`; the spans to load. What is not kept of it is passing."""
        passing = mask & ~self.caches[layer].kept.get(eid, 0)
        if passing:
            self._pass(layer, passing.bit_count())
        return self.residency.allocate(layer, eid - self._geometry.first_expert_id(layer), mask)

    def free_passing(self, layer: int, eid: int, mask: int) -> None:
        """Free the slots of what of `mask` is not kept."""
        mask &= self.unkept(layer, eid)
        if mask:
            self._pass(layer, -mask.bit_count())
            self.residency.release(layer, eid - self._geometry.first_expert_id(layer), mask)

    def forget(self, span: Span) -> None:
        """A span will not come: neither kept nor in its slots any more."""
        layer = span.layer
        eid = self._geometry.first_expert_id(layer) + span.expert
        mask = mask_of(span)
        kept = self.caches[layer].kept.get(eid, 0) & mask
        if kept:
            self.caches[layer].drop(eid, kept)
            self._prefill_room[layer] += kept.bit_count()
        if mask & ~kept:
            self._pass(layer, -(mask & ~kept).bit_count())
        self.residency.release(layer, span.expert, mask)

    def _pass(self, layer: int, num_segments: int) -> None:
        self.passing[self._geometry.size_classes[layer]] += num_segments

    def _evicted(self, eid: int, mask: int) -> None:
        layer = self._geometry.layer_of_expert(eid)
        self.residency.release(layer, eid - self._geometry.first_expert_id(layer), mask)
        self._prefill_room[layer] += mask.bit_count()
        self._count_evicted(layer, mask)

    def _count_evicted(self, layer: int, mask: int) -> None:
        """Counted where it lay, in the phase of the layer that needed the room."""
        counters = self._counters[layer]
        phase = counters.decode if self.is_decoding else counters.prefill
        phase.evicted_nbytes += mask.bit_count() * self._geometry.segment_nbytes(layer)

    def check(self) -> None:
        """Slots, masks and budgets agree."""
        residency, geometry = self.residency, self._geometry
        residency.check()
        kept: dict[int, int] = {}
        for cache in self.distinct_caches:
            assert cache.used == sum(mask.bit_count() for mask in cache.kept.values()) <= cache.capacity
            kept.update(cache.kept)
        passing = [0] * geometry.num_size_classes
        is_cut = self.targets is None
        is_shared = len(self.distinct_caches) < len(self.caches)
        assert is_shared or self.shares == [cache.capacity for cache in self.caches]
        given = [0] * geometry.num_size_classes
        for layer, share in enumerate(self.shares):
            given[geometry.size_classes[layer]] += share
            ids = range(geometry.first_expert_id(layer), geometry.expert_id(layer, geometry.layers[layer].num_experts))
            here = sum(kept.get(eid, 0).bit_count() for eid in ids)
            assert self._prefill_room[layer] == share - here, "what prefill may fill is what the share lacks"
            for eid in ids:
                held = residency.resident[eid] | residency.loading[eid]
                assert not (is_cut and kept.get(eid, 0) & ~self.tops[layer]), "only tops are kept"
                assert not kept.get(eid, 0) & ~held, "what is kept has slots"
                passing[geometry.size_classes[layer]] += (held & ~kept.get(eid, 0)).bit_count()
        assert all(num <= most for num, most in zip(given, self._budget.kept_slots, strict=True)), "no share is lent"
        assert passing == self.passing, "what is not kept is passing"


def whole_tops(geometry: Geometry, layer: int, share: int, top: int) -> int:
    """Of a share of a layer, the segments that hold whole tops of so many segments each."""
    return min(share // top, geometry.layers[layer].num_experts) * top


def top_mask(num_segments: int) -> int:
    """The first so many segments of an expert."""
    return (1 << num_segments) - 1


def mask_of(span: Span) -> int:
    """The segments of a span."""
    return ((1 << span.num_segments) - 1) << span.segment


def lowest_bits(mask: int, count: int) -> int:
    """The lowest `count` ones of `mask`: an expert's top segments first."""
    return sum(1 << segment for segment in bits(mask)[: max(0, count)])


def highest_bits(mask: int, count: int) -> int:
    """The highest `count` ones of `mask`: an expert's last segments first."""
    return mask & ~lowest_bits(mask, mask.bit_count() - count) if count < mask.bit_count() else mask


def single_segments(spans: list[Span]) -> list[Span]:
    """The same, a span a segment."""
    return [
        span if span.num_segments == 1 else Span(span.layer, span.expert, span.segment + i, 1, span.slot + i)
        for span in spans
        for i in range(span.num_segments)
    ]
