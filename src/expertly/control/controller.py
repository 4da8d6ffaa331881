"""The decisions of one device tier: what to compute now, what to load where, what to keep, what goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from functools import partial

from expertly.control.admission import keep_best
from expertly.control.budget import Budget
from expertly.control.counters import LayerCounters, PhaseCounters
from expertly.control.keeper import Keeper, lowest_bits, mask_of
from expertly.control.speculation import Speculation
from expertly.core.geometry import Geometry
from expertly.core.messages import Piece, Prediction, RouterRan, Step
from expertly.policies.eviction import EvictionPolicy
from expertly.policies.prefetch import PREFETCHES


class Controller:
    """Takes observations, returns `Step`s. Pure: no clock, no thread, no file, no tensor.

    A layer goes `begin_layer` -> (`loaded` -> `computed`)* -> `end_layer`. A driver computes what is ready in any
    order, says `loaded` for each piece that has arrived and `computed` for each such piece once its bytes are no
    longer needed; `computed` frees the ring and may return the next loads. `abandon` ends a layer that failed.
    `predict` may come at any time; `load_ahead` then says what to load behind every demand. control.loop drives it.

    `admission`: "always" keeps what a layer needs and evicts for it; "best" keeps, of what was kept and what is needed,
    what the policy (a ScoredPolicy) values most, and passes the rest through the ring. `ahead`: where what is loaded
    ahead goes: "cache" evicts for it, "ring" takes free places and evicts nothing. `prefetch`: what of it goes first (a
    key of PREFETCHES). `window`: segments in flight ahead.
    """

    def __init__(
        self,
        geometry: Geometry,
        budget: Budget,
        make_policy: Callable[[int], EvictionPolicy],
        *,
        scope: str = "layer",
        order: str = "resident",
        admission: str = "always",
        ahead: str = "cache",
        prefetch: str = "score",
        window: int | None = None,
    ) -> None:
        self.geometry = geometry
        self.budget = budget
        self.counters = [LayerCounters() for _ in geometry.layers]
        self.keeper = Keeper(geometry, budget, make_policy, scope, self.counters)
        self.residency, self.caches = self.keeper.residency, self.keeper.caches
        self._by_id = order == "id"
        self._keeps_best = admission == "best"
        self._ahead_evicts = ahead == "cache"
        if window is None:  # what one token's experts of a layer take
            window = max(layer.top_k for layer in geometry.layers) * geometry.segments_per_expert
        self.speculation = Speculation(geometry, window, PREFETCHES[prefetch])
        self._router: RouterRan | None = None
        self._needed: Container[int] = frozenset()  # by the running layer, where anything is predicted
        self._deferred: deque[tuple[int, int]] = deque()  # (position, mask) waiting for ring slots
        self._sequence: deque[int] = deque()  # positions not begun, when experts go one at a time
        self._in_flight: dict[Piece, None] = {}  # what the running layer waits for
        self._open = 0  # pieces said and not yet computed

    # -- observations ------------------------------------------------------------------------------------------

    def begin_layer(self, router: RouterRan, withdrawn: Sequence[Piece] = ()) -> Step:
        """The router has spoken: count hits, admit and evict, and say what to compute and to load.

        `withdrawn`: pieces of this layer that were to be loaded ahead and have not been begun; they will not come.
        """
        assert self._router is None, "the layer before has not ended"
        self._router = router
        layer = router.layer
        residency = self.residency
        first = self.geometry.first_expert_id(layer)
        self.keeper.begin(True in router.is_decode)
        self.speculation.now = layer
        if self.speculation.is_used:
            self._settle(router, withdrawn)
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
        if self._by_id and router.experts:
            self._sequence.extend(sorted(range(len(router.experts)), key=router.experts.__getitem__))
            return self._next_in_sequence()
        if self._keeps_best:
            self._demand_best(router, missing, step)
        elif missing or self.keeper.passing[self.geometry.size_classes[layer]]:
            self._demand(router, missing, step)
        self._open = len(ready) + len(step.loads) + len(step.joined)
        return step

    def loaded(self, piece: Piece) -> bool:
        """A piece has arrived. True where the running layer waits for it, False where it was loaded ahead."""
        self.residency.arrived(piece)
        if piece in self._in_flight:
            del self._in_flight[piece]
            return True
        eid = self.geometry.first_expert_id(piece.layer) + piece.expert
        self.speculation.ended(eid, piece)
        if eid not in self.speculation.waiting and eid not in self._needed:  # its layer has run without it
            self.keeper.free_passing(piece.layer, eid, mask_of(piece))
        return False

    def computed(self, piece: Piece) -> Step | None:
        """The bytes of this piece have been used: the ring gets them back. What can be done next, if anything."""
        self._open -= 1
        layer = piece.layer
        if self.keeper.passing[self.geometry.size_classes[layer]]:
            self.keeper.free_passing(layer, self.geometry.first_expert_id(layer) + piece.expert, mask_of(piece))
        step = None
        if self._deferred:
            step = Step()
            self._load_deferred(layer, step)
            self._open += len(step.loads)
        elif self._sequence and not self._open:
            step = self._next_in_sequence()
        return step

    def end_layer(self) -> None:
        """Everything the layer needed has been computed; the counters of the policy move now."""
        router = self._router
        assert router is not None and not self._open and not self._deferred and not self._sequence
        self._router = None
        self._needed = frozenset()
        layer = router.layer
        first = self.geometry.first_expert_id(layer)
        self.caches[layer].policy.used([first + e for e in router.experts], router.num_tokens, router.batch_tokens)

    def predict(self, prediction: Prediction) -> None:
        """What a layer will need, from now until its router has spoken. Of the running layer: when it runs next."""
        layer = prediction.layer
        self.speculation.predict(prediction, self.geometry.layers[layer].top_k if self._ahead_evicts else 0)
        Controller.foresee(self, prediction)  # it is one call: no subclass shall see two

    def foresee(self, prediction: Prediction) -> None:
        """From what came too late to load anything, eviction may still learn."""
        layer, probabilities = prediction.layer, prediction.probabilities
        if probabilities is not None:
            self.caches[layer].policy.predicted(self.geometry.first_expert_id(layer), probabilities)
        if prediction.outlook is not None:
            for cache in self.keeper.distinct_caches:
                cache.policy.expected(prediction.outlook)

    def load_ahead(self) -> list[Piece]:
        """What to load behind every demand, in this order; single segments, so that a demand never waits for more."""
        pieces: list[Piece] = []
        if self._deferred or self._sequence:
            return pieces  # demands wait for slots
        speculation, keeper = self.speculation, self.keeper
        protected: set[int] | None = None  # from the first expert that needs room; what went before is guessed by then
        while (room := speculation.window - speculation.num_in_flight) > 0 and (eid := speculation.next()) is not None:
            layer = self.geometry.layer_of_expert(eid)
            mask = keeper.absent(eid)
            has_room = True
            if mask:
                count = mask.bit_count()
                if count > room and speculation.num_in_flight:
                    break
                if self._ahead_evicts and protected is None:
                    protected = self._protected()
                has_room = keeper.has_room_ahead(layer, eid, mask, protected)
                if not has_room and not self._ahead_evicts:
                    break  # until a place is free
            speculation.taken()
            if not mask:
                speculation.stays(layer, eid)
            elif has_room:
                ahead = _single_segments(keeper.allocate(layer, eid, mask))
                speculation.submitted(eid, ahead, keeper.is_decoding)
                self._phase(layer, keeper.is_decoding).count_ahead(count, self.geometry.segment_nbytes(layer))
                pieces += ahead
            if protected is not None:
                protected.add(eid)
        return pieces

    def abandon(self) -> None:
        """The layer failed. No transfer may be running: what was in flight is dropped, its slots are free again."""
        speculation = self.speculation
        for piece in [*self._in_flight, *(piece for pieces in speculation.in_flight.values() for piece in pieces)]:
            self.keeper.forget(piece)
        left = list(speculation.waiting)
        speculation.clear()
        self._in_flight.clear()
        self._deferred.clear()
        self._sequence.clear()
        self._open = 0
        self._needed = frozenset()
        router, self._router = self._router, None
        if router is not None:
            first = self.geometry.first_expert_id(router.layer)
            left += [first + expert for expert in router.experts]
        for eid in left:
            self.keeper.free_passing(self.geometry.layer_of_expert(eid), eid, self.residency.full)

    def preload(self, layer: int, expert: int) -> list[Piece]:
        """Keep a whole expert before anything ran; the pieces to load. For systems that keep everything."""
        eid = self.geometry.expert_id(layer, expert)
        self.keeper.keep(layer, eid, self.residency.full)
        pieces = self.keeper.allocate(layer, eid, self.residency.full)
        self._in_flight.update(dict.fromkeys(pieces))
        return pieces

    def check(self) -> None:
        """Between layers: slots, masks and budgets agree, and only what is kept or loaded ahead has slots."""
        self.keeper.check()
        if self._router is not None:
            return
        assert not (self._in_flight or self._deferred or self._sequence or self._open)
        residency, speculation = self.residency, self.speculation
        coming = [piece for pieces in speculation.in_flight.values() for piece in pieces]
        assert speculation.num_in_flight == sum(piece.num_segments for piece in coming)
        assert speculation.num_in_flight == sum(mask.bit_count() for mask in residency.loading)
        for eid in range(self.geometry.num_experts):
            if self.keeper.unkept(self.geometry.layer_of_expert(eid), eid):
                assert eid in speculation.waiting or eid in speculation.in_flight
        for pool, ring, num in zip(residency.pools, self.budget.ring_slots, self.keeper.passing, strict=True):
            assert pool.num_free >= ring - num, "the ring is free between layers, but for what is loaded ahead"

    # -- decisions ---------------------------------------------------------------------------------------------

    def _demand(self, router: RouterRan, missing: list[int], step: Step) -> None:
        """Admit what is missing, free its slots, and load: first what is kept, then as much as the ring takes."""
        layer = router.layer
        keeper, first = self.keeper, self.geometry.first_expert_id(layer)
        is_decode, experts, num_tokens = router.is_decode, router.experts, router.num_tokens
        protected = self._protected()
        is_used = self.speculation.is_used
        lacking: Callable[[int], int] = keeper.absent  # the same as what is not kept, where nothing is loaded ahead
        if is_used:
            lacking = partial(keeper.not_kept, layer)
            self._join([first + experts[i] for i in missing], step)
            missing = [i for i, expert in enumerate(experts) if lacking(first + expert)]
        # Decode in router order, then prefill and pads by falling number of tokens, ties on the lowest id.
        evicting = [i for i in missing if is_decode[i] and num_tokens[i]]
        filling = [i for i in missing if not (is_decode[i] and num_tokens[i])] if len(evicting) < len(missing) else []
        filling.sort(key=lambda i: (-num_tokens[i], experts[i]))
        if len(evicting) > 1:  # room for all of them at once costs less than for each in turn; the victims are the same
            keeper.make_room(layer, sum(lacking(first + experts[i]).bit_count() for i in evicting), protected)
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
                    self._deferred.append((position, absent & ~kept))
        for position, mask in admitted:
            self._load(layer, position, mask, step)
        if self._deferred:
            self._load_deferred(layer, step)

    def _demand_best(self, router: RouterRan, missing: list[int], step: Step) -> None:
        """The same with the admission `best`."""
        layer, first = router.layer, self.geometry.first_expert_id(router.layer)
        if missing and self.speculation.is_used:
            self._join([first + router.experts[i] for i in missing], step)
        kept = keep_best(self.keeper, layer, [first + expert for expert in router.experts], self._guessed())
        for position in missing:
            eid = first + router.experts[position]
            absent = self.keeper.absent(eid)
            if absent & kept[eid]:
                self._load(layer, position, absent & kept[eid], step)
            if absent & ~kept[eid]:
                self._deferred.append((position, absent & ~kept[eid]))
        if self._deferred:
            self._load_deferred(layer, step)

    def _load(self, layer: int, position: int, mask: int, step: Step) -> None:
        router = self._router
        assert router is not None
        counters = self.counters[layer]
        phase = counters.decode if router.is_decode[position] else counters.prefill
        phase.loaded_nbytes += mask.bit_count() * self.geometry.segment_nbytes(layer)
        for piece in self.keeper.allocate(layer, self.geometry.expert_id(layer, router.experts[position]), mask):
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
                now = lowest_bits(mask, pool.num_free)
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
        self._join([eid], step)
        mask = self.keeper.not_kept(layer, eid)
        if mask:
            self.keeper.begin(self.keeper.is_decoding)
            absent = self.keeper.absent(eid)
            kept = self.keeper.admit(layer, eid, mask, {eid, *self._guessed()}) & absent
            if kept:
                self._load(layer, position, kept, step)
            if kept != absent:
                self._deferred.append((position, absent & ~kept))
                self._load_deferred(layer, step)
        self._open = len(step.ready) + len(step.loads) + len(step.joined)
        return step

    # -- what is loaded ahead ----------------------------------------------------------------------------------

    def _settle(self, router: RouterRan, withdrawn: Sequence[Piece]) -> None:
        """The layer's router has spoken: count what was predicted of it, and take back what was not begun."""
        layer, first, speculation = router.layer, self.geometry.first_expert_id(router.layer), self.speculation
        for piece in withdrawn:
            assert piece.layer == layer, "only what was to be loaded ahead for this layer is withdrawn"
            phase = self._phase(layer, speculation.withdrawn(first + piece.expert, piece))
            phase.count_ahead(-piece.num_segments, self.geometry.segment_nbytes(layer))
            self.keeper.forget(piece)
        experts = router.experts
        if 0 in router.num_tokens:
            experts = [e for e, num in zip(experts, router.num_tokens, strict=True) if num]
        is_resident = [mask == self.residency.full for mask in self._of_layer(self.residency.resident, layer)]
        self._needed = frozenset([first + expert for expert in router.experts])
        for eid in speculation.settle(layer, experts, is_resident, self._phase(layer, self.keeper.is_decoding)):
            if eid not in self._needed:  # what still comes is freed when it has
                self.keeper.free_passing(layer, eid, self.residency.resident[eid])

    def _join(self, eids: list[int], step: Step) -> None:
        """Wait for what is in flight of the missing experts of the running layer."""
        for eid in eids:
            for piece in self.speculation.join(eid):
                self._in_flight[piece] = None
                step.joined.append(piece)

    def _protected(self) -> set[int]:
        """What must not be evicted: what the running layer needs, and what guesses keep."""
        protected = self._guessed()
        if self._router is not None:
            first = self.geometry.first_expert_id(self._router.layer)
            protected.update([first + expert for expert in self._router.experts])
        return protected

    def _guessed(self) -> set[int]:
        """What is loaded ahead, came and was not used yet, or is here and predicted to be needed."""
        speculation = self.speculation
        if not speculation.is_used:
            return set()
        return {*speculation.waiting, *speculation.in_flight}.union(*speculation.likely.values())

    def _phase(self, layer: int, is_decoding: bool) -> PhaseCounters:
        counters = self.counters[layer]
        return counters.decode if is_decoding else counters.prefill

    def _of_layer(self, masks: list[int], layer: int) -> list[int]:
        first = self.geometry.first_expert_id(layer)
        return masks[first : first + self.geometry.layers[layer].num_experts]


def _single_segments(pieces: list[Piece]) -> list[Piece]:
    return [
        piece if piece.num_segments == 1 else Piece(piece.layer, piece.expert, piece.segment + i, 1, piece.slot + i)
        for piece in pieces
        for i in range(piece.num_segments)
    ]
