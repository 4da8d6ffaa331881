"""Baselines that a predictor must beat: experts by their numbers, and random experts."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.policies.base import option
from expertly.policies.known import Known
from expertly.policies.predictor.base import FixedDistancePredictor, WidthOptions


@dataclass(frozen=True)
class IndexOptions(WidthOptions):
    """Options of `index`."""

    width: int | None = option(None, "experts named of each layer; all of them, unless said", least=1)


class Index(FixedDistancePredictor):
    """Names the experts 0, 1, 2, ... of the layer `distance` ahead, and of the first layers when a pass begins
    (DeepSpeed, as MoE-Infinity describes it). Scores fall with the layers to go, then with the number: all experts of a
    nearer layer come before any of a farther one.
    """

    name = "index"
    is_light = True
    options = IndexOptions
    gives_probabilities = False

    def _predict(self, layer: int, distance: int) -> Prediction:
        self.work.num_calls += 1
        num_experts = self._layers[layer].num_experts
        experts = list(range(min(self._width or num_experts, num_experts)))
        return Prediction(layer, experts, [1 / (distance + expert / num_experts) for expert in experts], distance)


class RandomExperts(FixedDistancePredictor):
    """Names as many experts as a layer chooses, drawn anew each time, of the layer `distance` ahead, and of the first
    layers when a pass begins (MoEpic without its own prefetcher, table 3). Equal seeds draw equally.
    """

    name = "random"
    is_light = True
    gives_probabilities = False

    def __init__(self, geometry: Geometry, distance: int, options: WidthOptions, known: Known) -> None:
        super().__init__(geometry, distance, options, known)
        self._dice = Random(known.seed)

    def _predict(self, layer: int, distance: int) -> Prediction:
        self.work.num_calls += 1
        shape = self._layers[layer]
        experts = self._dice.sample(range(shape.num_experts), min(self._width or shape.top_k, shape.num_experts))
        scores = [1 / (distance + place / len(experts)) for place in range(len(experts))]
        return Prediction(layer, experts, scores, distance)
