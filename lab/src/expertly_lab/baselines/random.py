"""Random eviction, and random experts as a prediction: what every policy must beat."""

from __future__ import annotations

from collections.abc import Container, Iterator
from random import Random
from typing import Any

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.policies.eviction import EvictionPolicy
from expertly.policies.known import Known
from expertly.policies.prediction import WidthOptions
from expertly_lab.baselines.fixed_distance import FixedDistancePredictor


class RandomEviction(EvictionPolicy):
    """Evicts any kept expert, with equal chance; the same demands give the same victims."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)
        self._kept: dict[int, None] = {}

    @classmethod
    def for_cache(cls, geometry: Geometry, capacity: int, known: Known, options: Any) -> RandomEviction:
        return cls(known.seed)

    def admitted(self, expert: int) -> None:
        self._kept[expert] = None

    def removed(self, expert: int) -> None:
        del self._kept[expert]

    def victims(self, protected: Container[int]) -> Iterator[int]:
        candidates = [e for e in self._kept if e not in protected]  # in the order of admission, which repeats
        while candidates:
            chosen = int(self._random.random() * len(candidates))
            candidates[chosen], candidates[-1] = candidates[-1], candidates[chosen]
            yield candidates.pop()


class RandomExperts(FixedDistancePredictor):
    """Names as many experts as a layer chooses, drawn anew each time, of the layer `distance` ahead, and of the first
    layers when a pass begins (MoEpic without its own prefetcher, table 3). Equal seeds draw equally.
    """

    name = "random"
    gives_probabilities = False

    def __init__(self, geometry: Geometry, distance: int, options: WidthOptions, known: Known) -> None:
        super().__init__(geometry, distance, options, known)
        self._dice = Random(known.seed)

    def _predict(self, layer: int, distance: int) -> Prediction:
        shape = self._layers[layer]
        experts = self._dice.sample(range(shape.num_experts), min(self._width or shape.top_k, shape.num_experts))
        scores = [1 / (distance + place / len(experts)) for place in range(len(experts))]
        return Prediction(layer, experts, scores, distance)
