"""A layer whose experts have turns, one after the other: every way to run one but the default (ProMoE, section 5)."""

from __future__ import annotations

from collections import deque

from expertly.core.geometry import Geometry
from expertly.core.messages import Plan, RouterRan, Span
from expertly.scheduler.demands import Demands, in_order
from expertly.scheduler.keeper import Keeper
from expertly.scheduler.speculation import Speculation


class Turns:
    """`by_id`: experts go by rising id, and only the running one and what was asked for are protected; else what is
    here goes first, then what is under way, then the absent ones, and what the layer needs is protected. `is_early`,
    where they go by id: what is missing when the router speaks is asked for at once, as places allow; else an expert
    that is missing is found when its turn has come.
    """

    def __init__(
        self,
        geometry: Geometry,
        keeper: Keeper,
        speculation: Speculation,
        demands: Demands,
        *,
        by_id: bool,
        is_early: bool,
    ) -> None:
        assert by_id or not is_early, "what is not by id and early goes all at once"
        self._geometry = geometry
        self._keeper = keeper
        self._speculation = speculation
        self._demands = demands
        self._by_id = by_id
        self._is_early = is_early
        self._router: RouterRan | None = None
        self.left: dict[int, int] = {}
        """Experts whose turn has not come -> positions in the router's list."""
        self._missed: deque[int] = deque()  # experts to ask for before their turn, as soon as there are places
        self._asked: dict[int, dict[Span, bool | None]] = {}  # those that were -> what has not arrived of them

    @property
    def is_waiting(self) -> bool:
        """Demands wait for places: nothing is to be loaded ahead."""
        return bool(self._missed)

    def begin(self, router: RouterRan) -> Plan:
        """The router has spoken: the first turn."""
        first, experts = self._geometry.first_expert_id(router.layer), router.experts
        self._router = router
        positions = list(range(len(experts)))
        if self._by_id:
            positions.sort(key=experts.__getitem__)
        else:
            evicting, filling = in_order(router, positions)
            positions = evicting + filling
        self.left = {first + experts[i]: i for i in positions}
        if self._is_early:
            self._missed.extend([eid for eid in self.left if self._keeper.absent(eid)])
        return self.next()

    def next(self) -> Plan:
        """The next turn: of one expert, or of all that are here where they need not go by id."""
        step = Plan()
        if self._by_id:
            eid = next(iter(self.left))
            self._reach(eid, step)
            return Plan(step.ready, step.loads, step.joined, self._ask(eid)) if self._is_early else step
        residency = self._keeper.residency
        here = [eid for eid in self.left if residency.resident[eid] == residency.full]
        if not here:
            under_way = [eid for eid in self._speculation.in_flight if eid in self.left]
            here = under_way[:1] or [next(iter(self.left))]
        for eid in here:
            self._reach(eid, step)
        return step

    def arrived(self, eid: int, span: Span) -> bool:
        """Whether the span was asked for before its turn, and that has not come."""
        spans = self._asked.get(eid, {})
        if span not in spans:
            return False
        del spans[span]
        return True

    def coming(self) -> list[Span]:
        """What was asked for before its turn and has not arrived."""
        return [span for spans in self._asked.values() for span in spans]

    def clear(self) -> None:
        """No layer runs."""
        self.left.clear()
        self._missed.clear()
        self._asked.clear()

    def _reach(self, eid: int, step: Plan) -> None:
        """The turn of an expert: compute what is here of it, wait for what is under way, load the rest."""
        router, keeper, demands = self._router, self._keeper, self._demands
        assert router is not None
        layer, position = router.layer, self.left.pop(eid)
        resident = keeper.residency.resident[eid]
        if resident:
            step.ready.extend(keeper.residency.spans(layer, router.experts[position], resident))
        asked = self._asked.pop(eid, {})
        demands.in_flight.update(asked)
        step.joined.extend(asked)
        demands.join([eid], step)
        mask = keeper.not_kept(layer, eid)
        if mask:
            keeper.begin(keeper.is_decoding)  # other experts are protected than before
            absent = keeper.absent(eid)
            kept = keeper.admit(layer, eid, mask, self._protected(position, eid)) & absent
            if kept:
                demands.load(router, position, kept, step.loads)
            if kept != absent:
                demands.deferred.append((position, absent & ~kept))
                demands.load_deferred(router, step, is_idle=not (step.ready or step.loads or step.joined))

    def _ask(self, running: int) -> tuple[Span, ...]:
        """Ask for what was missing, the lowest id first: it is kept, or goes through the ring if an expert's worth of
        that stays free for the running one. The first for which there is no place waits, and all behind it.
        """
        router, keeper = self._router, self._keeper
        spans: list[Span] = []
        assert router is not None
        layer, num_segments = router.layer, self._geometry.segments_per_expert
        ring = keeper.ring[self._geometry.size_classes[layer]]
        while self._missed and keeper.passing[self._geometry.size_classes[layer]] <= ring:
            eid = self._missed[0]
            absent = keeper.absent(eid)
            if eid in self.left and absent:
                position = self.left[eid]
                keeper.begin(keeper.is_decoding)
                mask = keeper.admit(layer, eid, keeper.not_kept(layer, eid), self._protected(position, eid, running))
                mask &= absent
                left = absent & ~mask
                if left and keeper.ring_room(layer) >= left.bit_count() + num_segments:
                    mask = absent
                if mask:
                    self._demands.load(router, position, mask, spans, self._asked.setdefault(eid, {}))
                if mask != absent:
                    break
            self._missed.popleft()
        return tuple(spans)

    def _protected(self, position: int, *eids: int) -> set[int] | None:
        """What must not be evicted for an expert; None: it evicts nothing."""
        router = self._router
        assert router is not None
        if self._by_id:
            return {*eids, *self._asked, *self._speculation.guessed()}
        is_evicting = router.is_decode[position] and router.num_tokens[position]
        return self._demands.protected(router) if is_evicting else None
