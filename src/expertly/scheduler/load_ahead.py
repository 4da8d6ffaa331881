"""Which of the wanted experts are loaded ahead now, as places and the gate allow."""

from __future__ import annotations

from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan, Span
from expertly.scheduler.counters import LayerCounters
from expertly.scheduler.demands import Demands
from expertly.scheduler.gate import Gate
from expertly.scheduler.keeper import Keeper, single_segments
from expertly.scheduler.speculation import Speculation


class LoadAhead:
    """`evicts`: what is loaded ahead goes where the cache keeps, for which others go; else into free places."""

    def __init__(
        self,
        geometry: Geometry,
        keeper: Keeper,
        speculation: Speculation,
        demands: Demands,
        counters: list[LayerCounters],
        gate: Gate | None,
        *,
        evicts: bool,
    ) -> None:
        self._geometry = geometry
        self._keeper = keeper
        self._speculation = speculation
        self._demands = demands
        self._counters = counters
        self._gate = gate
        self._evicts = evicts
        self.is_short = False
        """More would have been loaded ahead if parts of experts that pass had left places. They may have since."""

    def none(self) -> list[Span]:
        """Nothing is to be loaded ahead now."""
        self.is_short = False
        return []

    def next(self, router: RouterRan | None, *, has_turns: bool) -> list[Span]:
        """What to load behind every demand, in this order; single segments, so that a demand never waits for more.
        `router`: of the layer that runs, if one does.
        """
        spans: list[Span] = []
        self.is_short = False
        running = router.layer if has_turns and router is not None else None
        speculation, keeper, gate = self._speculation, self._keeper, self._gate
        following = (speculation.now + 1) % self._geometry.num_layers
        protected: set[int] | None = None  # from the first expert that needs room; what went before is guessed by then
        while (room := speculation.window - speculation.num_in_flight) > 0 and (eid := speculation.next()) is not None:
            layer = self._geometry.layer_of_expert(eid)
            if layer == running:
                break  # until it has run: what it needs now is no guess
            mask = keeper.absent(eid)
            has_room = True
            if mask:
                count = mask.bit_count()
                if count > room and speculation.num_in_flight:
                    break
                if gate is not None and not self._pays(gate, layer, eid, count):
                    speculation.taken()
                    continue
                if self._evicts and protected is None:
                    protected = self._demands.protected(router)
                has_room = keeper.has_room_ahead(layer, eid, mask, protected, is_next=layer == following)
                if not has_room and (not self._evicts or mask & ~keeper.tops[layer]):
                    self.is_short = keeper.is_split
                    break  # until a place is free
            speculation.taken()
            if not mask:
                speculation.stays(layer, eid)
            elif has_room:
                ahead = single_segments(keeper.allocate(layer, eid, mask))
                speculation.submitted(eid, ahead, keeper.is_decoding)
                counters = self._counters[layer]
                phase = counters.decode if keeper.is_decoding else counters.prefill
                phase.count_ahead(count, self._geometry.segment_nbytes(layer))
                spans += ahead
            if protected is not None:
                protected.add(eid)
        return spans

    def _pays(self, gate: Gate, layer: int, eid: int, count: int) -> bool:
        """Is the expert that is wanted most, of which `count` segments are not here, worth loading ahead?"""
        keeper, speculation = self._keeper, self._speculation
        evicts = self._evicts and keeper.is_decoding and keeper.caches[layer].room < count
        queued = speculation.num_in_flight
        return gate.lets(layer, eid, speculation.guess(), speculation.now, count, queued, evicts=evicts)
