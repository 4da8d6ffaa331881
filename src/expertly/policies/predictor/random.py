"""Any experts: what a prefetcher must beat (MoEpic without its own, table 3)."""

from __future__ import annotations

import random
from collections.abc import Iterator

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Began, Routed
from expertly.policies.predictor.base import Predictor
from expertly.policies.predictor.ranking import Reach, WidthOptions


class RandomExperts(Predictor):
    """As many experts as a layer chooses, drawn anew each time, of the layer `distance` ahead, and of the first layers
    when a pass begins. The same seed draws the same.
    """

    def __init__(
        self,
        geometry: Geometry,
        seed: int = 0,
        distance: int = 1,
        options: WidthOptions = WidthOptions(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__()
        self._layers = geometry.layers
        self._reach = Reach(geometry, distance)
        self._width = options.width
        self._dice = random.Random(seed)

    def begin_iteration(self, began: Began) -> Iterator[Prediction]:
        for layer in self._reach.at_begin(began.layers):
            yield self._prediction(layer, layer + 1)

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        ahead = self._reach.after(routed.layer)
        if ahead is not None:
            yield self._prediction(ahead, self._reach.distance)

    def _prediction(self, layer: int, distance: int) -> Prediction:
        self.work.num_calls += 1
        shape = self._layers[layer]
        experts = self._dice.sample(range(shape.num_experts), min(self._width or shape.top_k, shape.num_experts))
        scores = [1 / (distance + place / len(experts)) for place in range(len(experts))]
        return Prediction(layer, experts, scores, distance)
