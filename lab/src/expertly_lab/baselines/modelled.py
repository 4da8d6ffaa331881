"""A prediction of stated accuracy, for studies of predictors that do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Routed
from expertly.policies.base import PolicyOptions, option
from expertly.policies.known import Known
from expertly.policies.prediction import Predictor
from expertly_lab.baselines.oracle import future_of

ACCURACY = {1: 0.905, 8: 0.545}
"""By distance, of skip prediction (ProMoE, section 4); in between it falls linearly, beyond it stays."""


def accuracy_at(distance: int) -> float:
    """The share of named experts that are needed, `distance` layers ahead."""
    low, high = min(ACCURACY), max(ACCURACY)
    share = (min(max(distance, low), high) - low) / (high - low)
    return ACCURACY[low] + share * (ACCURACY[high] - ACCURACY[low])


@dataclass(frozen=True)
class ModelledOptions(PolicyOptions):
    """How right it is."""

    accuracy: float | None = option(
        None, "share of what it names that is needed; else as ProMoE found, by the distance", least=0, most=1
    )
    stride: int | None = option(None, "name every layer so many apart, up to `distance`; else that one alone", least=1)


class ModelledLookahead(Predictor):
    """A lookahead of stated accuracy, for studies of predictors that do not exist. It names as many experts as the
    layer needs; each is right with the stated probability, otherwise any other expert of the layer.

    Wrong experts are drawn uniformly, which no cache benefits from: real predictors err towards popular experts.
    """

    name = "modelled"
    options = ModelledOptions
    needs = ("future",)
    gives_probabilities = False

    def __init__(self, geometry: Geometry, distance: int, options: ModelledOptions, known: Known) -> None:
        self._accuracy, self._stride = options.accuracy, options.stride
        self._num_experts = [layer.num_experts for layer in geometry.layers]
        self._future = future_of(known, "prediction 'modelled'")
        self._distance = distance
        self._random = Random(known.seed)

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        """Predict the layer `distance` ahead, if this iteration has it; after the first layer, all layers up to there.
        With a stride, after each layer every layer so many apart, up to there.
        """
        step = min(self._stride or 1, self._distance)
        first = step if self._stride or routed.layer == 0 else self._distance
        for distance in range(first, self._distance + 1, step):
            if routed.layer + distance >= len(self._num_experts):
                return
            needs = self._future.needs(distance)
            if needs is None:
                return
            layer, experts = needs
            accuracy = accuracy_at(distance) if self._accuracy is None else self._accuracy
            named = self._mostly_right(experts, self._num_experts[layer], accuracy)
            scores = [1.0 / (distance * (1 + rank)) for rank in range(len(named))]
            yield Prediction(layer, named, scores, distance)

    def _mostly_right(self, needed: list[int], num_experts: int, accuracy: float) -> list[int]:
        is_needed = set(needed)
        needless = [expert for expert in range(num_experts) if expert not in is_needed]
        named = []
        for expert in needed:
            if needless and self._random.random() >= accuracy:
                chosen = int(self._random.random() * len(needless))
                needless[chosen], needless[-1] = needless[-1], needless[chosen]
                expert = needless.pop()
            named.append(expert)
        return named
