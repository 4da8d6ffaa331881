"""What is predicted of layers that have not run, in the order in which it is prefetched, and how good that was."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan
from expertly.policies.prefetch import PrefetchOrder
from expertly.scheduler.counters import PhaseCounters

_Queued = tuple[float, int, int, float]  # (-priority beside others of the layer, order of arrival, expert, score)
_Head = tuple[float, int, int]  # (-priority, order of arrival, layer)


class PrefetchQueue:
    """Predicted experts by falling priority; of equal ones, what was predicted first. Experts are dense ids.

    A layer's newest prediction replaces the one before; it ends when the layer's router runs.
    """

    def __init__(self, geometry: Geometry, order: PrefetchOrder, *, evicts: bool) -> None:
        """`evicts`: prefetches go to the cache, which evicts for them; otherwise they take free slots."""
        # Units that are prefetched at a time: as many as one token's experts of a layer have.
        self.window = max(layer.top_k for layer in geometry.layers) * geometry.segments_per_expert
        self.now = geometry.num_layers - 1  # the layer whose router ran last; before a pass, the last layer
        self.needs_slots = False  # whether more would have been prefetched, had there been free slots
        self.evicts = evicts
        self.waiting: dict[int, int] = {}  # experts prefetched for layers that have not run -> units of each
        self.likely: dict[int, dict[int, None]] = {}  # by layer, predicted experts that should stay
        self._geometry = geometry
        self._priority = order.priority
        self._queued: dict[int, list[_Queued]] = {}  # by layer, the most urgent last; no list is empty
        self._heads: list[_Head] | None = None  # a heap of each layer's most urgent expert; None: to be made
        self._num_arrived = 0
        self._predicted: list[dict[int, Prediction]] = [{} for _ in geometry.layers]  # by layer, distance

    def predict(self, prediction: Prediction) -> None:
        """Queue these experts in place of those queued for the layer. Resident ones among the surest top-k, and those
        found resident when their turn to be prefetched comes, are not evicted for other prefetches.
        """
        layer, experts = prediction.layer, prediction.experts
        self._predicted[layer][prediction.distance] = prediction
        first = self._geometry.first_expert_id(layer)
        num_likely = self._geometry.layers[layer].top_k if self.evicts else 0
        self.likely[layer] = dict.fromkeys([first + expert for expert in experts[:num_likely]])
        queued = [
            (-self._priority(score, 1), arrival, first + expert, score)
            for arrival, (expert, score) in enumerate(zip(experts, prediction.scores, strict=True), self._num_arrived)
        ]
        self._num_arrived += len(experts)
        self._unqueue(layer)
        if queued:
            self._queued[layer] = sorted(queued, reverse=True)
            if self._heads is not None:
                heappush(self._heads, self._head(layer))

    def first(self) -> int | None:
        """The most urgent expert, or None. It stays queued until `pop`."""
        if self._heads is None:
            self._heads = [self._head(layer) for layer in self._queued]
            heapify(self._heads)
        return self._queued[self._heads[0][2]][-1][2] if self._heads else None

    def pop(self) -> None:
        assert self._heads is not None
        layer = self._heads[0][2]
        queued = self._queued[layer]
        queued.pop()
        if queued:
            heapreplace(self._heads, self._head(layer))
        else:
            del self._queued[layer]
            heappop(self._heads)

    def _unqueue(self, layer: int) -> None:
        if self._queued.pop(layer, None):
            self._heads = None

    def _head(self, layer: int) -> _Head:
        _, arrival, _, score = self._queued[layer][-1]
        num_layers = self._geometry.num_layers
        return -self._priority(score, (layer - self.now) % num_layers or num_layers), arrival, layer

    def router_ran(self, router: RouterRan, phase: PhaseCounters, num_resident: Sequence[int]) -> list[int]:
        """Count how good the predictions for the layer were (ProMoE, section 4), and what was prefetched of it, and
        empty its queue. `num_resident`: units of each of its experts that are there. Experts that only pad tokens chose
        do not count. Returns the experts that were prefetched.
        """
        layer = self.now = router.layer
        shape, first = self._geometry.layers[layer], self._geometry.first_expert_id(layer)
        is_resident = [num == self._geometry.segments_per_expert for num in num_resident]
        needed = {expert for expert, num in zip(router.experts, router.num_tokens, strict=True) if num}
        for prediction in self._predicted[layer].values():
            phase.predicted += len(prediction.experts)
            phase.predicted_needed += len(needed.intersection(prediction.experts))
            phase.predicted_resident += sum([is_resident[expert] for expert in prediction.experts])
            phase.predicted_of += len(needed)
        self._predicted[layer].clear()
        self._unqueue(layer)
        self._heads = None  # the layers that are queued are nearer now
        self.likely.pop(layer, None)
        ended = [eid for eid in self.waiting if first <= eid < first + shape.num_experts]
        for eid in ended:
            num_units, expert = self.waiting.pop(eid), eid - first
            phase.prefetched += num_units > 0
            if num_units and expert in needed:
                phase.prefetched_needed += 1
                phase.prefetched_in_time += is_resident[expert]
            elif num_units:
                phase.wasted_nbytes += num_units * self._geometry.segment_nbytes(layer)
        return ended

    def clear(self) -> None:
        self._queued.clear()
        self._heads = None
        self.now = self._geometry.num_layers - 1
        self.waiting.clear()
        self.likely.clear()
        for predicted in self._predicted:
            predicted.clear()
