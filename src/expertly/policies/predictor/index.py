"""The experts of the next layers by their numbers, whoever asks (DeepSpeed, as MoE-Infinity describes it)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Began, Routed
from expertly.policies.predictor.base import Predictor
from expertly.policies.predictor.ranking import Reach, WidthOptions


@dataclass(frozen=True, slots=True)
class IndexOptions(WidthOptions):
    """Options of `Index`; its `width` is all of a layer unless said."""


class Index(Predictor):
    """Names the experts 0, 1, 2, ... of the layer `distance` ahead, and of the first layers when a pass begins. Scores
    fall with the layers to go, then with the number: all of a nearer layer come before any of a farther one.
    """

    def __init__(self, geometry: Geometry, distance: int = 1, options: IndexOptions = IndexOptions()) -> None:
        super().__init__()
        self._num_experts = [layer.num_experts for layer in geometry.layers]
        self._reach = Reach(geometry, distance)
        self._width = options.width

    def begin_iteration(self, began: Began) -> Iterator[Prediction]:
        for layer in self._reach.at_begin(began.layers):
            yield self._prediction(layer, layer + 1)

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        ahead = self._reach.after(routed.layer)
        if ahead is not None:
            yield self._prediction(ahead, self._reach.distance)

    def _prediction(self, layer: int, distance: int) -> Prediction:
        self.work.num_calls += 1
        num_experts = self._num_experts[layer]
        experts = list(range(min(self._width or num_experts, num_experts)))
        return Prediction(layer, experts, [1 / (distance + expert / num_experts) for expert in experts], distance)
