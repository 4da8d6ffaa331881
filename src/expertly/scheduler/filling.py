"""What layers are to keep since their shares changed, and lack: loaded while nothing else is (MoEpic, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence

from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan, Span
from expertly.policies.eviction.base import ScoredPolicy
from expertly.scheduler.counters import LayerCounters
from expertly.scheduler.demands import Demands
from expertly.scheduler.keeper import Keeper, single_segments
from expertly.scheduler.speculation import Speculation


class Filling:
    """A layer is to keep the tops of as many experts as its share holds: those that its policy values most, of the kept
    ones and of those that decode has needed. Only others go for them. Without scores nobody knows an absent expert's
    worth: what is kept in part is made whole then.

    A layer of which no more is lacking, or for which there is no room, is done until shares change again.
    """

    def __init__(
        self,
        geometry: Geometry,
        keeper: Keeper,
        speculation: Speculation,
        demands: Demands,
        counters: Sequence[LayerCounters],
    ) -> None:
        self._geometry = geometry
        self._keeper = keeper
        self._speculation = speculation
        self._demands = demands
        self._counters = counters
        self._was_needed = [False] * geometry.num_experts

    def layer_ended(self, router: RouterRan) -> None:
        """What decode needs is known from then on."""
        first = self._geometry.first_expert_id(router.layer)
        for expert, num, is_decode in zip(router.experts, router.num_tokens, router.is_decode, strict=True):
            if num and is_decode:
                self._was_needed[first + expert] = True

    def is_due(self) -> bool:
        """Whether layers lack anything, while decode runs and nothing is in flight."""
        keeper, demands = self._keeper, self._demands
        if not keeper.unfilled or keeper.targets is not None or not keeper.is_decoding:
            return False
        return not (demands.in_flight or demands.deferred or self._speculation.in_flight)

    def load(self, running: RouterRan | None) -> list[Span]:
        """An expert's worth of single segments, which have slots from now on. Layers whose turn is the farthest away go
        first, and that which runs waits: what goes elsewhere for it is then the least likely to be predicted.
        """
        geometry, keeper, speculation = self._geometry, self._keeper, self._speculation
        spans: list[Span] = []
        protected = self._demands.protected(running)
        for back in range(geometry.num_layers):
            layer = (speculation.now - back) % geometry.num_layers
            if layer not in keeper.unfilled or (running is not None and layer == running.layer):
                continue
            wanted = self._wanted(layer)
            protected.update(wanted)
            for eid in wanted:
                mask = keeper.fill(layer, eid, protected)
                if mask:
                    single = single_segments(keeper.allocate(layer, eid, mask))
                    speculation.filling(eid, single, keeper.is_decoding)
                    counters = self._counters[layer].decode
                    counters.count_ahead(len(single), geometry.segment_nbytes(layer), is_fill=True)
                    spans += single
                if len(spans) >= geometry.segments_per_expert:
                    return spans
            del keeper.unfilled[layer]
        return spans

    def _wanted(self, layer: int) -> list[int]:
        """What the layer is to keep, the most valuable first."""
        keeper = self._keeper
        cache, first = keeper.caches[layer], self._geometry.first_expert_id(layer)
        policy = cache.policy
        if isinstance(policy, ScoredPolicy):
            experts = range(first, first + self._geometry.layers[layer].num_experts)
            known = [eid for eid in experts if eid in cache.kept or self._was_needed[eid]]
            known.sort(key=lambda eid: (policy.score(eid), eid), reverse=True)
        else:
            known = list(policy.victims(()))[::-1]
        return known[: keeper.shares[layer] // keeper.tops[layer].bit_count()]
