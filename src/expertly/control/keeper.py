"""Who has slots and why: what is kept between layers, in one cache a scope, and what passes through the ring."""

from __future__ import annotations

from collections.abc import Callable, Container

from expertly.control.budget import Budget
from expertly.control.cache import KeptCache
from expertly.control.counters import LayerCounters
from expertly.control.residency import Residency, bits
from expertly.core.geometry import Geometry
from expertly.core.messages import Piece
from expertly.policies.eviction import EvictionPolicy

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
    ) -> None:
        self._geometry = geometry
        self._budget = budget
        self._counters = counters
        self.residency = Residency(geometry, budget.pool_slots())
        num_segments = geometry.segments_per_expert
        if scope == "layer":
            self.caches = [KeptCache(share, make_policy(share // num_segments)) for share in budget.layer_shares]
        else:
            shared = [KeptCache(slots, make_policy(slots // num_segments)) for slots in budget.kept_slots]
            self.caches = [shared[c] for c in geometry.size_classes]
        self.distinct_caches = list({id(cache): cache for cache in self.caches}.values())
        self._prefill_room = list(budget.layer_shares)  # of each layer, what its share lacks: negative above it
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
        return max(0, self._budget.ring_slots[size_class] - self.passing[size_class])

    # -- keeping -----------------------------------------------------------------------------------------------

    def keep(self, layer: int, eid: int, mask: int) -> None:
        """Keep `mask` from now on; there is room. What of it was passing no longer is."""
        if self.passing[self._geometry.size_classes[layer]]:
            self._pass(layer, -(self.unkept(layer, eid) & mask).bit_count())
        self.caches[layer].keep(eid, mask)
        self._prefill_room[layer] -= mask.bit_count()

    def admit(self, layer: int, eid: int, mask: int, protected: Container[int] | None) -> int:
        """The part of `mask` (which is not kept) that is kept from now on. Decode evicts what is not `protected`;
        prefill (None) only fills what is empty of the layer's share.
        """
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

    def has_room_ahead(self, layer: int, eid: int, mask: int, protected: Container[int] | None) -> bool:
        """Find places for `mask`, which is loaded ahead. It is kept, evicting for it what is not `protected`; with None
        it takes free places of the ring (an expert's worth stays free: a demand never waits for a guess), then of the
        cache. False where there are none; nothing has changed then.
        """
        count = mask.bit_count()
        pool, cache = self.residency.pool_of(layer), self.caches[layer]
        size_class = self._geometry.size_classes[layer]
        if protected is None:
            ring = self._budget.ring_slots[size_class] - self._geometry.segments_per_expert
            if self.passing[size_class] + count <= ring and pool.num_free >= count:
                return True
            if cache.room < count or pool.num_free < count:
                return False
            self.keep(layer, eid, mask)
            return True
        room = cache.room if self.is_decoding else min(cache.room, self._prefill_room[layer])
        if room < count:
            missing = count - cache.room
            if not self.is_decoding or pool.num_free + missing < count:
                return False
            self._refused = _NOTHING_REFUSED
            if self.make_room(layer, count, protected) < count:
                return False
        if pool.num_free < count:
            return False
        self.keep(layer, eid, mask)
        return True

    # -- slots -------------------------------------------------------------------------------------------------

    def allocate(self, layer: int, eid: int, mask: int) -> list[Piece]:
        """Slots for `mask`; the pieces to load. What is not kept of it is passing."""
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

    def forget(self, piece: Piece) -> None:
        """A piece will not come: neither kept nor in its slots any more."""
        layer = piece.layer
        eid = self._geometry.first_expert_id(layer) + piece.expert
        mask = mask_of(piece)
        kept = self.caches[layer].kept.get(eid, 0) & mask
        if kept:
            self.caches[layer].drop(eid, kept)
            self._prefill_room[layer] += kept.bit_count()
        if mask & ~kept:
            self._pass(layer, -(mask & ~kept).bit_count())
        self.residency.release(layer, piece.expert, mask)

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
        for layer, share in enumerate(self._budget.layer_shares):
            ids = range(geometry.first_expert_id(layer), geometry.expert_id(layer, geometry.layers[layer].num_experts))
            here = sum(kept.get(eid, 0).bit_count() for eid in ids)
            assert self._prefill_room[layer] == share - here, "what prefill may fill is what the share lacks"
            for eid in ids:
                held = residency.resident[eid] | residency.loading[eid]
                assert not kept.get(eid, 0) & ~held, "what is kept has slots"
                passing[geometry.size_classes[layer]] += (held & ~kept.get(eid, 0)).bit_count()
        assert passing == self.passing, "what is not kept is passing"


def mask_of(piece: Piece) -> int:
    """The segments of a piece."""
    return ((1 << piece.num_segments) - 1) << piece.segment


def lowest_bits(mask: int, count: int) -> int:
    """The lowest `count` ones of `mask`: an expert's top segments first."""
    return sum(1 << segment for segment in bits(mask)[: max(0, count)])


def highest_bits(mask: int, count: int) -> int:
    """The highest `count` ones of `mask`: an expert's last segments first."""
    return mask & ~lowest_bits(mask, mask.bit_count() - count) if count < mask.bit_count() else mask
