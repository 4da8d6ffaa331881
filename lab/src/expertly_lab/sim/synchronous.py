"""How layers run in baselines of the papers, where less goes on at a time than in an engine: for simulation alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from expertly.core.messages import RouterRan, Span
from expertly.core.observation import Routed
from expertly.policies.prediction import Predictor
from expertly.scheduler.cache import ABSENT, LOADING, RESIDENT
from expertly.scheduler.loop import Prefetcher, Transport
from expertly.scheduler.scheduler import Scheduler


class WaitingPrefetcher(Prefetcher):
    """`loop=synchronous`: no expert of a layer is computed before the predictor has read all that was published and all
    that it predicts has arrived; what had no room is waited for after the layer. It is the layer's transport, too,
    which hands out first what arrived for the layer meanwhile.
    """

    def __init__(self, scheduler: Scheduler, transport: Transport, predictor: Predictor) -> None:
        super().__init__(scheduler, transport, predictor)
        self.submit, self.prefetch, self.cancel = transport.submit, transport.prefetch, transport.cancel
        self._arrived: deque[Span] = deque()  # that the running layer awaits

    def poll(self) -> Span | None:
        return self._arrived.popleft() if self._arrived else self._transport.poll()

    def wait(self) -> Span:
        return self._arrived.popleft() if self._arrived else self._transport.wait()

    def router_ran(self, routed: Callable[[], Routed] | None) -> None:
        super().router_ran(routed)
        self._wait_for_all()

    def computed(self) -> None:
        """While experts are computed nothing more is prefetched."""

    def layer_ended(self) -> None:
        super().layer_ended()
        self._wait_for_all()
        assert not self._arrived, "between layers nobody waits for a span"

    def _wait_for_all(self) -> None:
        scheduler, cache = self._scheduler, self._scheduler.cache
        while cache.prefetching:
            span = self._transport.wait()
            if cache.state[cache.units_of(span)[0]] == LOADING:
                self._arrived.append(span)
            else:
                scheduler.loaded(span)
                self.refill()


def run_by_id(
    scheduler: Scheduler, transport: Transport, router: RouterRan, compute: Callable[[Sequence[Span]], None]
) -> None:
    """`loop=by-id`: each expert is looked for when its turn comes, by rising id, and only it is protected then: one of
    the same layer may be evicted and loaded again (ProMoE's baseline, section 5.3). Hits are those when the router ran.
    """
    cache, layer, geometry = scheduler.cache, router.layer, scheduler.geometry
    counters = cache.counters[layer]
    cache.is_decoding = router.serves_decode
    eids = [geometry.expert_id(layer, expert) for expert in router.experts]
    missing = [i for i, eid in enumerate(eids) if cache.num_resident(eid) < cache.num_parts]
    there = [cache.num_resident(eids[i]) for i in missing]
    cache.count_demand(router, missing, there)
    for position in sorted(range(len(eids)), key=eids.__getitem__):
        eid = eids[position]
        ready, absent = cache.spans(cache.in_state(eid, RESIDENT)), cache.in_state(eid, ABSENT)
        loads: list[Span] = []
        if absent:
            counters.phase(router.is_decode[position]).loaded_nbytes += len(absent) * geometry.unit_nbytes[layer]
            (lacking,) = cache.lacking(layer, [eid])
            cache.keep([lacking[: cache.make_room(layer, len(lacking), {eid})]])
            if kept := [unit for unit in absent if cache.kept[unit]]:
                loads += cache.allocate(kept, LOADING)
                absent = [unit for unit in absent if unit not in kept]
        while ready or loads or absent:
            if staged := absent[: cache.partitions[layer].pool.num_free]:
                loads += cache.allocate(staged, LOADING)
                absent = absent[len(staged) :]
            if loads:
                transport.submit(loads)
            for span in ready:
                compute((span,))
            for _ in loads:
                span = transport.wait()
                cache.arrived(span)
                compute((span,))
            ready, loads = [], []
            cache.free_staged(cache.units(eid))
    cache.partitions[layer].policy.used(eids, router.num_tokens, router.batch_tokens)
