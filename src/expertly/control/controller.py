"""The decisions of one device tier: what to compute now, what to load where, what to keep, what goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from expertly.control.budget import Budget
from expertly.control.cache import KeptCache
from expertly.control.counters import LayerCounters
from expertly.control.residency import Residency, bits
from expertly.core.geometry import Geometry
from expertly.core.messages import Piece, RouterRan, Step
from expertly.policies.eviction import EvictionPolicy

_NOTHING_REFUSED = 1 << 62


class Controller:
    """Takes observations, returns `Step`s. Pure: no clock, no thread, no file, no tensor.

    A layer goes `begin_layer` -> (`loaded` -> `computed`)* -> `end_layer`. A driver computes what is ready in any
    order, says `loaded` for each piece that has arrived and `computed` for each such piece once its bytes are no
    longer needed; `computed` frees the ring and may return the next loads. `abandon` ends a layer that failed.
    """

    def __init__(
        self,
        geometry: Geometry,
        budget: Budget,
        make_policy: Callable[[int], EvictionPolicy],
        *,
        scope: str = "layer",
        order: str = "resident",
    ) -> None:
        self.geometry = geometry
        self.budget = budget
        self.residency = Residency(geometry, budget.pool_slots())
        self.counters = [LayerCounters() for _ in geometry.layers]
        self._by_id = order == "id"
        num_segments = geometry.segments_per_expert
        if scope == "layer":
            self.caches = [KeptCache(share, make_policy(share // num_segments)) for share in budget.layer_shares]
        else:
            shared = [KeptCache(slots, make_policy(slots // num_segments)) for slots in budget.kept_slots]
            self.caches = [shared[c] for c in geometry.size_classes]
        self._prefill_room = list(budget.layer_shares)  # of each layer, what its share lacks: negative above it
        self._router: RouterRan | None = None
        self._deferred: deque[tuple[int, int]] = deque()  # (position, mask) waiting for ring slots
        self._sequence: deque[int] = deque()  # positions not begun, when experts go one at a time
        self._in_flight: dict[Piece, None] = {}
        self._open = 0  # pieces said and not yet computed
        self._passing = 0  # segments in slots that are not kept: in the ring
        self._refused = _NOTHING_REFUSED  # segments that could not be evicted for this layer: so many cannot be now

    # -- observations ------------------------------------------------------------------------------------------

    def begin_layer(self, router: RouterRan) -> Step:
        """The router has spoken: count hits, admit and evict, and say what to compute and to load."""
        assert self._router is None, "the layer before has not ended"
        self._router = router
        layer = router.layer
        residency = self.residency
        first = self.geometry.first_expert_id(layer)
        resident, whole, full = residency.resident, residency.whole, residency.full
        step = Step()
        ready = step.ready
        missing: list[int] = []
        partial: list[Piece] = []
        for position, expert in enumerate(router.experts):
            piece = whole[first + expert]
            if piece is not None:
                ready.append(piece)
                continue
            mask = resident[first + expert]
            if mask:
                partial += residency.pieces(layer, expert, mask)
            if mask != full:
                missing.append(position)
        ready += partial
        here = [resident[first + router.experts[i]].bit_count() for i in missing]
        nbytes = self.geometry.layers[layer].expert_nbytes
        self.counters[layer].count_demand(router, missing, here, nbytes, self.geometry.segments_per_expert)
        if self._by_id:
            self._sequence.extend(sorted(range(len(router.experts)), key=router.experts.__getitem__))
            return self._next_in_sequence()
        if missing:
            self._demand(router, missing, protected={first + e for e in router.experts}, step=step)
        self._open = len(ready) + len(step.loads)
        return step

    def loaded(self, piece: Piece) -> None:
        """A piece that a step asked for has arrived."""
        del self._in_flight[piece]
        self.residency.arrived(piece)

    def computed(self, piece: Piece) -> Step | None:
        """The bytes of this piece have been used: the ring gets them back. What can be done next, if anything."""
        self._open -= 1
        if self._passing:
            residency = self.residency
            eid = self.geometry.first_expert_id(piece.layer) + piece.expert
            mask = ((1 << piece.num_segments) - 1) << piece.segment
            mask &= ~self.caches[piece.layer].kept.get(eid, 0)
            if mask:
                self._passing -= mask.bit_count()
                residency.release(piece.layer, piece.expert, mask)
        step = None
        if self._deferred:
            step = Step()
            self._load_deferred(piece.layer, step)
            self._open += len(step.loads)
        elif self._sequence and not self._open:
            step = self._next_in_sequence()
        return step

    def end_layer(self) -> None:
        """Everything the layer needed has been computed; the counters of the policy move now."""
        router = self._router
        assert router is not None and not self._open and not self._deferred and not self._sequence
        self._router = None
        layer = router.layer
        first = self.geometry.first_expert_id(layer)
        self.caches[layer].policy.used([first + e for e in router.experts], router.num_tokens, router.batch_tokens)

    def abandon(self) -> None:
        """The layer failed. No transfer may be running: what was in flight is dropped, its slots are free again."""
        for piece in self._in_flight:
            self._drop(piece.layer, piece.expert, ((1 << piece.num_segments) - 1) << piece.segment)
        self._in_flight.clear()
        self._deferred.clear()
        self._sequence.clear()
        self._open = self._passing = 0
        router, self._router = self._router, None
        if router is None:
            return
        first = self.geometry.first_expert_id(router.layer)
        kept = self.caches[router.layer].kept
        for expert in router.experts:
            passing = self.residency.resident[first + expert] & ~kept.get(first + expert, 0)
            if passing:
                self.residency.release(router.layer, expert, passing)

    def preload(self, layer: int, expert: int) -> list[Piece]:
        """Keep a whole expert before anything ran; the pieces to load. For systems that keep everything."""
        eid = self.geometry.expert_id(layer, expert)
        self.caches[layer].keep(eid, self.residency.full)
        self._prefill_room[layer] -= self.geometry.segments_per_expert
        pieces = self.residency.allocate(layer, expert, self.residency.full)
        self._in_flight.update(dict.fromkeys(pieces))
        return pieces

    def check(self) -> None:
        """Between layers: slots, masks and budgets agree, nothing is loading, only what is kept is resident."""
        residency, geometry = self.residency, self.geometry
        residency.check()
        kept: dict[int, int] = {}
        for cache in {id(c): c for c in self.caches}.values():
            assert cache.used == sum(mask.bit_count() for mask in cache.kept.values()) <= cache.capacity
            kept.update(cache.kept)
        for layer, share in enumerate(self.budget.layer_shares):
            ids = range(geometry.first_expert_id(layer), geometry.expert_id(layer, geometry.layers[layer].num_experts))
            here = sum(kept.get(eid, 0).bit_count() for eid in ids)
            assert self._prefill_room[layer] == share - here, "what prefill may fill is what the share lacks"
        if self._router is not None:
            return
        assert not (self._in_flight or self._deferred or self._sequence or self._open or self._passing)
        assert not any(residency.loading)
        assert [kept.get(eid, 0) for eid in range(geometry.num_experts)] == residency.resident
        for pool, ring in zip(residency.pools, self.budget.ring_slots, strict=True):
            assert pool.num_free >= ring, "the ring is free between layers"

    # -- decisions ---------------------------------------------------------------------------------------------

    def _demand(self, router: RouterRan, missing: list[int], protected: set[int], step: Step) -> None:
        """Admit what is missing, free its slots, and load: first what is kept, then as much as the ring takes."""
        layer = router.layer
        residency, first = self.residency, self.geometry.first_expert_id(layer)
        is_decode, experts, num_tokens = router.is_decode, router.experts, router.num_tokens
        # Decode in router order, then prefill and pads by falling number of tokens, ties on the lowest id.
        evicting = [i for i in missing if is_decode[i] and num_tokens[i]]
        filling = [i for i in missing if not (is_decode[i] and num_tokens[i])] if len(evicting) < len(missing) else []
        filling.sort(key=lambda i: (-num_tokens[i], experts[i]))
        full, resident = residency.full, residency.resident
        self._refused = _NOTHING_REFUSED
        if len(evicting) > 1:  # room for all of them at once costs less than for each in turn; the victims are the same
            self._make_room(layer, sum((full & ~resident[first + experts[i]]).bit_count() for i in evicting), protected)
        admitted: list[tuple[int, int]] = []
        for may_evict, positions in ((True, evicting), (False, filling)):
            for position in positions:
                eid = first + experts[position]
                mask = full & ~resident[eid]
                kept = self._admit(layer, eid, mask, protected if may_evict else None)
                if kept:
                    admitted.append((position, kept))
                if kept != mask:
                    self._deferred.append((position, mask & ~kept))
        for position, mask in admitted:
            self._load(layer, position, mask, step)
        if self._deferred:
            self._load_deferred(layer, step)

    def _admit(self, layer: int, eid: int, mask: int, protected: set[int] | None) -> int:
        """The part of `mask` that is kept from now on. Decode evicts what is not `protected`; prefill (None) only fills
        what is empty of the layer's share.
        """
        cache = self.caches[layer]
        count = mask.bit_count()
        if protected is None:
            room = max(0, min(cache.room, self._prefill_room[layer]))
        else:
            room = self._make_room(layer, count, protected)
        if room < count:
            mask = _lowest_bits(mask, room)
        if mask:
            cache.keep(eid, mask)
            self._prefill_room[layer] -= mask.bit_count()
        return mask

    def _make_room(self, layer: int, count: int, protected: set[int]) -> int:
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

    def _evicted(self, eid: int, mask: int) -> None:
        """Counted where it lay, in the phase of the layer that needed the room."""
        geometry, router = self.geometry, self._router
        assert router is not None
        layer = geometry.layer_of_expert(eid)
        self.residency.release(layer, eid - geometry.first_expert_id(layer), mask)
        num_segments = mask.bit_count()
        self._prefill_room[layer] += num_segments
        counters = self.counters[layer]
        phase = counters.decode if True in router.is_decode else counters.prefill
        phase.evicted_nbytes += num_segments * geometry.segment_nbytes(layer)

    def _load(self, layer: int, position: int, mask: int, step: Step) -> None:
        router = self._router
        assert router is not None
        expert = router.experts[position]
        self._passing += (mask & ~self.caches[layer].kept.get(self.geometry.expert_id(layer, expert), 0)).bit_count()
        counters = self.counters[layer]
        phase = counters.decode if router.is_decode[position] else counters.prefill
        phase.loaded_nbytes += mask.bit_count() * self.geometry.segment_nbytes(layer)
        for piece in self.residency.allocate(layer, expert, mask):
            self._in_flight[piece] = None
            step.loads.append(piece)

    def _load_deferred(self, layer: int, step: Step) -> None:
        """Load what waits for the ring: whole experts where the ring can hold one, else what fits."""
        pool = self.residency.pool_of(layer)
        ring = self.budget.ring_slots[self.geometry.size_classes[layer]]
        deferred = self._deferred
        while deferred and pool.num_free:
            position, mask = deferred[0]
            count = mask.bit_count()
            if pool.num_free >= count:
                deferred.popleft()
            elif ring >= count:
                return
            else:
                now = _lowest_bits(mask, pool.num_free)
                deferred[0] = (position, mask & ~now)
                mask = now
            self._load(layer, position, mask, step)

    def _next_in_sequence(self) -> Step:
        """One expert at a time by rising id, only the running one protected (docs/conventions.md, order=id)."""
        router = self._router
        assert router is not None
        position = self._sequence.popleft()
        layer, expert = router.layer, router.experts[position]
        eid = self.geometry.first_expert_id(layer) + expert
        step = Step()
        resident = self.residency.resident[eid]
        if resident:
            step.ready.extend(self.residency.pieces(layer, expert, resident))
        mask = self.residency.full & ~resident
        if mask:
            self._refused = _NOTHING_REFUSED
            kept = self._admit(layer, eid, mask, {eid})
            if kept:
                self._load(layer, position, kept, step)
            if kept != mask:
                self._deferred.append((position, mask & ~kept))
                self._load_deferred(layer, step)
        self._open = len(step.ready) + len(step.loads)
        return step

    def _drop(self, layer: int, expert: int, mask: int) -> None:
        eid = self.geometry.first_expert_id(layer) + expert
        kept = self.caches[layer].kept.get(eid, 0) & mask
        if kept:
            self.caches[layer].drop(eid, kept)
            self._prefill_room[layer] += kept.bit_count()
        self.residency.release(layer, expert, mask)


def _lowest_bits(mask: int, count: int) -> int:
    """The lowest `count` ones of `mask`: an expert's top segments first."""
    return sum(1 << segment for segment in bits(mask)[: max(0, count)])
