"""Predicts experts by their numbers (DeepSpeed, as MoE-Infinity describes it)."""

from __future__ import annotations

from dataclasses import dataclass

from expertly.core.messages import Prediction
from expertly.policies.base import option
from expertly.policies.prediction import WidthOptions
from expertly_lab.baselines.fixed_distance import FixedDistancePredictor


@dataclass(frozen=True)
class IndexOptions(WidthOptions):
    width: int | None = option(None, "experts named of each layer; all of them, unless said", least=1)


class Index(FixedDistancePredictor):
    """Names the experts 0, 1, 2, ... of the layer `distance` ahead, and of the first layers when a pass begins
    (DeepSpeed, as MoE-Infinity describes it). Scores fall with the layers to go, then with the number: all experts of a
    nearer layer come before any of a farther one.
    """

    name = "index"
    options = IndexOptions
    gives_probabilities = False

    def _predict(self, layer: int, distance: int) -> Prediction:
        num_experts = self._layers[layer].num_experts
        experts = list(range(min(self._width or num_experts, num_experts)))
        return Prediction(layer, experts, [1 / (distance + expert / num_experts) for expert in experts], distance)
