"""What a predictor must beat: experts by their numbers, and any experts at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Began, Routed
from expertly.policies.base import option
from expertly.policies.known import NOTHING, Known
from expertly.policies.predictor.base import Predictor, Reach, WidthOptions


@dataclass(frozen=True)
class IndexOptions(WidthOptions):
    """Options of `index`."""

    width: int | None = option(None, "experts named of each layer; all of them, unless said", least=1)


class Index(Predictor):
    """Names the experts 0, 1, 2, ... of the layer `distance` ahead, and of the first layers when a pass begins
    (DeepSpeed, as MoE-Infinity describes it). Scores fall with the layers to go, then with the number: all of a nearer
    layer come before any of a farther one.
    """

    name = "index"
    options = IndexOptions
    gives_probabilities = False

    def __init__(
        self,
        geometry: Geometry,
        distance: int = 1,
        options: IndexOptions = IndexOptions(),
        known: Known = NOTHING,
    ) -> None:
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


class RandomExperts(Predictor):
    """As many experts as a layer chooses, drawn anew each time, of the layer `distance` ahead, and of the first layers
    when a pass begins (MoEpic without its own prefetcher, table 3). The same seed draws the same.
    """

    name = "random"
    options = WidthOptions
    gives_probabilities = False

    def __init__(
        self,
        geometry: Geometry,
        distance: int = 1,
        options: WidthOptions = WidthOptions(),
        known: Known = NOTHING,
    ) -> None:
        super().__init__()
        self._layers = geometry.layers
        self._reach = Reach(geometry, distance)
        self._width = options.width
        self._dice = Random(known.seed)

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
