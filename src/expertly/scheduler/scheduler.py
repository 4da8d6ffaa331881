"""The decisions of one device tier: what to compute now, what to load where, what to keep, what goes."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from expertly.core.geometry import Geometry
from expertly.core.messages import Plan, Prediction, RouterRan, Span
from expertly.policies.allocation import Allocation, Job
from expertly.policies.allocation.uniform import Uniform
from expertly.policies.eviction import EvictionPolicy
from expertly.policies.moepic.plan import SplitPlan
from expertly.policies.prefetch import ByScore, PrefetchOrder
from expertly.scheduler.budget import Budget
from expertly.scheduler.counters import LayerCounters, PhaseCounters
from expertly.scheduler.demands import Demands
from expertly.scheduler.gate import Gate, Moment
from expertly.scheduler.keeper import Keeper, mask_of, whole_tops
from expertly.scheduler.load_ahead import LoadAhead
from expertly.scheduler.sharing import Sharing
from expertly.scheduler.speculation import Speculation
from expertly.scheduler.turns import Turns


class Scheduler:
    """Takes observations, returns `Plan`s. Pure: no clock, no thread, no file, no tensor.

    A layer goes `begin_layer` -> (`loaded` -> `computed`)* -> `end_layer`. A driver computes what is ready in any
    order, says `loaded` for each span that has arrived and `computed` for each such span once its bytes are no
    longer needed; `computed` frees the ring and may return the next loads. `abandon` ends a layer that failed.
    `predict` may come at any time; `load_ahead` then says what to load behind every demand. control.loop drives it.

    `order` and `preemption`: "resident" and "early" demand all that is missing when the router has spoken, and compute
    what is here meanwhile; otherwise see Turns. `transfer`: see Ahead. `admission`: "always" keeps what a layer needs
    and evicts for it; "best" keeps, of what was kept and what is needed, what the policy (a ScoredPolicy) values most,
    and passes the rest through the ring. `ahead`: where what is loaded ahead goes: "cache" evicts for it, "ring" takes
    free places and evicts nothing. `prefetch`: what of it goes first (policies.prefetch). `window`: segments in
    flight ahead. `gate`: what of it is loaded ahead at all; None: everything.
    """

    def __init__(
        self,
        geometry: Geometry,
        budget: Budget,
        make_policy: Callable[[int], EvictionPolicy],
        *,
        scope: str = "layer",
        order: str = "resident",
        preemption: str = "early",
        transfer: str = "asynchronous",
        admission: str = "always",
        ahead: str = "cache",
        prefetch: PrefetchOrder = ByScore(),  # noqa: B008 - holds nothing
        window: int | None = None,
        allocation: Allocation | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.geometry = geometry
        self.budget = budget
        self.counters = [LayerCounters() for _ in geometry.layers]
        self.allocation = allocation or Uniform(geometry)
        tops = self.allocation.tops(budget.layer_shares)
        self.keeper = Keeper(geometry, budget, make_policy, scope, self.counters, tops)
        self.residency, self.caches = self.keeper.residency, self.keeper.caches
        self._sharing: Sharing | None = None
        if self.allocation.is_online:
            shares, is_gated = budget.layer_shares, gate is not None
            self._sharing = Sharing(self.allocation, self.keeper, self.counters, shares, is_gated=is_gated)
        self._keeps_best = admission == "best"
        self._ahead_evicts = ahead == "cache"
        if window is None:  # what one token's experts of a layer take
            window = max(layer.top_k for layer in geometry.layers) * geometry.segments_per_expert
        self.speculation = Speculation(geometry, window, prefetch)
        self.is_synchronous = transfer == "synchronous"
        """Experts do not begin before what was predicted by then is there: whoever drives this waits."""
        self.finds_late = preemption == "late"
        """Guesses for a layer go on when its router has spoken, until `stale` says which do not."""
        self.gate = gate
        self._demands = Demands(geometry, self.keeper, self.speculation, self.counters)
        self._in_flight, self._deferred = self._demands.in_flight, self._demands.deferred
        self._load_ahead = LoadAhead(
            geometry, self.keeper, self.speculation, self._demands, self.counters, gate, evicts=self._ahead_evicts
        )
        self._turns: Turns | None = None
        if order == "id" or self.finds_late:
            by_id, early = order == "id", not self.finds_late
            self._turns = Turns(geometry, self.keeper, self.speculation, self._demands, by_id=by_id, is_early=early)
        self._router: RouterRan | None = None
        self._needed: Container[int] = frozenset()  # by the running layer, where anything is predicted
        self._open = 0  # spans said and not yet computed

    # -- observations ------------------------------------------------------------------------------------------

    def begin_layer(self, router: RouterRan, withdrawn: Sequence[Span] = ()) -> Plan:
        """The router has spoken: count hits, admit and evict, and say what to compute and to load.

        `withdrawn`: spans of this layer that were to be loaded ahead and have not been begun; they will not come.
        """
        assert self._router is None, "the layer before has not ended"
        self._router = router
        layer = router.layer
        residency = self.residency
        first = self.geometry.first_expert_id(layer)
        self.keeper.begin(router.serves_decode)
        self.speculation.now = layer
        if self.gate is not None:
            self.gate.router_ran(router)
        if self.speculation.is_used:
            self._settle(router, withdrawn)
        resident, whole, full = residency.resident, residency.whole, residency.full
        step = Plan()
        ready = step.ready
        missing: list[int] = []
        partial: list[Span] = []
        for position, expert in enumerate(router.experts):
            span = whole[first + expert]
            if span is not None:
                ready.append(span)
                continue
            mask = resident[first + expert]
            if mask:
                partial += residency.spans(layer, expert, mask)
            if mask != full:
                missing.append(position)
        ready += partial
        here = [resident[first + router.experts[i]].bit_count() for i in missing]
        nbytes = self.geometry.layers[layer].expert_nbytes
        self.counters[layer].count_demand(router, missing, here, nbytes, self.geometry.segments_per_expert)
        if self._turns is not None:
            if router.experts:
                step = self._turns.begin(router)
        elif self._keeps_best:
            self._demands.best(router, missing, step)
        elif missing or self.keeper.passing[self.geometry.size_classes[layer]]:
            self._demands.all(router, missing, step)
        if self.gate is not None:
            self.gate.asked(layer, self._in_flight)
        self._open = len(step.ready) + len(step.loads) + len(step.joined)
        return step

    def promote(self, spans: Sequence[Span]) -> None:
        """Of what a Plan says is joined: these had not been begun, and are demanded now."""
        router = self._router
        assert router is not None and self.finds_late
        first, nbytes = self.geometry.first_expert_id(router.layer), self.geometry.segment_nbytes(router.layer)
        for span in spans:
            is_decoding = self._in_flight[span]
            assert is_decoding is not None, "a demand needs no promotion"
            self._in_flight[span] = None
            self.speculation.taken_back(first + span.expert, span.num_segments)
            self._phase(router.layer, is_decoding).count_ahead(-span.num_segments, nbytes)
            needs_decode = router.is_decode[router.experts.index(span.expert)]
            self._phase(router.layer, needs_decode).loaded_nbytes += span.num_segments * nbytes

    def loaded(self, span: Span) -> bool:
        """A span has arrived. True where the running layer waits for it, False where it was loaded ahead, or asked for
        and its turn has not come.
        """
        self.residency.arrived(span)
        if span in self._in_flight:
            del self._in_flight[span]
            return True
        eid = self.geometry.first_expert_id(span.layer) + span.expert
        if self._turns is not None and self._turns.arrived(eid, span):
            return False
        self.speculation.ended(eid, span)
        if eid not in self.speculation.waiting and eid not in self._needed:  # its layer has run without it
            self.keeper.free_passing(span.layer, eid, mask_of(span))
        return False

    def computed(self, span: Span) -> Plan | None:
        """The bytes of this span have been used: the ring gets them back. What can be done next, if anything."""
        self._open -= 1
        layer = span.layer
        if self.keeper.passing[self.geometry.size_classes[layer]]:
            self.keeper.free_passing(layer, self.geometry.first_expert_id(layer) + span.expert, mask_of(span))
        step = None
        if self._deferred:
            assert self._router is not None
            step = Plan()
            self._demands.load_deferred(self._router, step, is_idle=not self._open)
            self._open += len(step.loads)
        elif self._turns is not None and not self._open and self._turns.left:
            step = self._turns.next()
            self._open = len(step.ready) + len(step.loads) + len(step.joined)
        return step

    def at(self, moment: Moment, now_ns: int) -> None:
        """Where there is a `gate`: it is that late. Between layers, or while one runs, as the moment is."""
        assert self.gate is not None
        self.gate.at(moment, now_ns)

    def stale(self) -> list[int]:
        """Experts of the running layer that it does not need, but that are in flight for it."""
        assert self._router is not None
        if not self.finds_late:
            return []  # they were withdrawn when the router had spoken
        layer = self._router.layer
        return [
            expert
            for expert in range(self.geometry.layers[layer].num_experts)
            if self.speculation.is_stale(self.geometry.first_expert_id(layer) + expert)
        ]

    def end_layer(self, withdrawn: Sequence[Span] = ()) -> None:
        """Everything the layer needed has been computed; the counters of the policy move now. `withdrawn`: of what is
        `stale`, spans that have not been begun; they will not come.
        """
        router = self._router
        assert router is not None and not self._open and not self._deferred
        assert self._turns is None or not self._turns.left
        assert self.finds_late or not withdrawn, "what is early was withdrawn when the router had spoken"
        if self.finds_late:
            self._withdraw(router.layer, withdrawn)
            self.speculation.layer_ended()
        self._router = None
        self._needed = frozenset()
        layer = router.layer
        first = self.geometry.first_expert_id(layer)
        self.caches[layer].policy.used([first + e for e in router.experts], router.num_tokens, router.batch_tokens)
        if self._sharing is not None:
            self._sharing.layer_ended(router, self.speculation.guessed)

    def predict(self, prediction: Prediction) -> None:
        """What a layer will need, from now until its router has spoken. Of the running layer: when it runs next."""
        layer = prediction.layer
        self.speculation.predict(prediction, self.geometry.layers[layer].top_k if self._ahead_evicts else 0)
        if self._sharing is not None:
            self.allocation.predicted(prediction)
        Scheduler.foresee(self, prediction)  # it is one call: no subclass shall see two

    def foresee(self, prediction: Prediction) -> None:
        """From what came too late to load anything, eviction may still learn."""
        layer, probabilities = prediction.layer, prediction.probabilities
        if probabilities is not None:
            self.caches[layer].policy.predicted(self.geometry.first_expert_id(layer), probabilities)
        if prediction.outlook is not None:
            for cache in self.keeper.distinct_caches:
                cache.policy.expected(prediction.outlook)

    def load_ahead(self) -> list[Span]:
        """What to load behind every demand, in this order; single segments, so that a demand never waits for more."""
        if self._deferred or (self._turns is not None and self._turns.is_waiting):
            return self._load_ahead.none()  # demands wait for slots
        return self._load_ahead.next(self._router, has_turns=self._turns is not None)

    @property
    def is_short(self) -> bool:
        """More would have been loaded ahead if parts of experts that pass had left places. They may have since."""
        return self._load_ahead.is_short

    def abandon(self) -> None:
        """The layer failed. No transfer may be running: what was in flight is dropped, its slots are free again."""
        speculation = self.speculation
        if self.gate is not None:
            self.gate.abandon()
        coming = [*self._in_flight, *(span for spans in speculation.in_flight.values() for span in spans)]
        if self._turns is not None:
            coming += self._turns.coming()
            self._turns.clear()
        for span in coming:
            self.keeper.forget(span)
        left = list(speculation.waiting)
        speculation.clear()
        self._demands.clear()
        self._open = 0
        self._needed = frozenset()
        router, self._router = self._router, None
        if router is not None:
            first = self.geometry.first_expert_id(router.layer)
            left += [first + expert for expert in router.experts]
        for eid in left:
            self.keeper.free_passing(self.geometry.layer_of_expert(eid), eid, self.residency.full)

    def configuration_due(self) -> Job | None:
        """Between layers: what to work out, beside the model, for `configure`; None: nothing, or nothing yet. A job is
        said once, holds nothing of this, and takes the times of a decode step.
        """
        return self.allocation.due()

    def configure(self, plan: SplitPlan) -> None:
        """Between layers: keep what the plan says from now on, as soon as what is loaded ahead allows. A layer whose
        budget holds more tops than the plan counts on keeps them, too; what is left of one is the ring's.

        Raises ConfigError where it is of other experts, or keeps more than there is room for.
        """
        assert self._router is None, "a layer runs"
        plan.check_fits(self.geometry)
        tops = [layer.kept_segments or self.geometry.segments_per_expert for layer in plan.layers]
        shares = [
            whole_tops(self.geometry, number, layer.budget_segments, top)
            for number, (layer, top) in enumerate(zip(plan.layers, tops, strict=True))
        ]
        self.keeper.resize(shares, tops)
        self.allocation.configured(plan)
        self.keeper.rearrange(self.speculation.guessed())

    def preload(self, layer: int, expert: int) -> list[Span]:
        """Keep a whole expert before anything ran; the spans to load. For systems that keep everything."""
        eid = self.geometry.expert_id(layer, expert)
        self.keeper.keep(layer, eid, self.residency.full)
        spans = self.keeper.allocate(layer, eid, self.residency.full)
        self._in_flight.update(dict.fromkeys(spans))
        return spans

    def check(self) -> None:
        """Between layers: slots, masks and budgets agree, and only what is kept or loaded ahead has slots."""
        self.keeper.check()
        if self._router is not None:
            return
        assert not (self._in_flight or self._deferred or self._open)
        residency, speculation = self.residency, self.speculation
        coming = [span for spans in speculation.in_flight.values() for span in spans]
        assert speculation.num_in_flight == sum(span.num_segments for span in coming)
        assert len(coming) == sum(map(int.bit_count, residency.loading))
        for eid in range(self.geometry.num_experts):
            if self.keeper.unkept(self.geometry.layer_of_expert(eid), eid):
                assert eid in speculation.waiting or eid in speculation.in_flight
        for pool, ring, num in zip(residency.pools, self.keeper.ring, self.keeper.passing, strict=True):
            assert pool.num_free >= ring - num, "the ring is free between layers, but for what is loaded ahead"

    # -- what is loaded ahead ----------------------------------------------------------------------------------

    def _settle(self, router: RouterRan, withdrawn: Sequence[Span]) -> None:
        """The layer's router has spoken: count what was predicted of it, and take back what was not begun."""
        layer, first, speculation = router.layer, self.geometry.first_expert_id(router.layer), self.speculation
        self._withdraw(layer, withdrawn)
        experts = router.experts
        if 0 in router.num_tokens:
            experts = [e for e, num in zip(experts, router.num_tokens, strict=True) if num]
        is_resident = [mask == self.residency.full for mask in self._of_layer(self.residency.resident, layer)]
        self._needed = frozenset([first + expert for expert in router.experts])
        for eid in speculation.settle(layer, experts, is_resident, self._phase(layer, self.keeper.is_decoding)):
            if eid not in self._needed:  # what still comes is freed when it has
                self.keeper.free_passing(layer, eid, self.residency.resident[eid])
        if not self.finds_late:
            speculation.layer_ended()  # nothing of it is withdrawn any more

    def _withdraw(self, layer: int, spans: Sequence[Span]) -> None:
        """What was to be loaded ahead for this layer will not come."""
        first = self.geometry.first_expert_id(layer)
        for span in spans:
            assert span.layer == layer, "only what was to be loaded ahead for this layer is withdrawn"
            phase = self._phase(layer, self.speculation.withdrawn(first + span.expert, span))
            phase.count_ahead(-span.num_segments, self.geometry.segment_nbytes(layer))
            self.keeper.forget(span)

    def _phase(self, layer: int, is_decoding: bool) -> PhaseCounters:
        counters = self.counters[layer]
        return counters.decode if is_decoding else counters.prefill

    def _of_layer(self, masks: list[int], layer: int) -> list[int]:
        first = self.geometry.first_expert_id(layer)
        return masks[first : first + self.geometry.layers[layer].num_experts]
