"""The contract of a predictor: it watches forward passes and says what later layers will need; and what many of them
share: when they predict which layer, and how scores become a prediction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Began, Floats, History, Routed, Want
from expertly.policies.base import NO_OPTIONS, Policy, PolicyOptions, option
from expertly.policies.known import NOTHING, Known

ALL_LAYERS = 1 << 30
"""A distance that no model has."""


@dataclass(slots=True)
class PredictorWork:
    """What predicting has cost so far; a simulation turns it into time."""

    num_calls: int = 0
    read_nbytes: int = 0
    flops: int = 0


class Predictor(Policy, ABC):
    """One model. It sees layers in order and answers for layers that have not run; none reads a clock.

    A class is made with (geometry, distance, options, known): the layers it looks ahead, an instance of its `options`,
    and what may be known beforehand. Under overload a driver leaves out observations: a layer may be missing in an
    iteration, and its end.
    """

    family = "prediction"
    needs: ClassVar[tuple[str, ...]] = ()
    """"future", which only simulations have; else fields that a trace must have."""
    gives_probabilities: ClassVar[bool] = True
    """Of every expert of a layer: prefetch=proximity weighs its scores, and the eviction policy is told."""
    default_distance: ClassVar[int | None] = None
    """Where a system takes it and does not say a distance; None: the system's own stays."""
    takes_weights: ClassVar[bool] = False
    """Whether it needs weights that were trained on a trace."""

    wants: frozenset[Want] = frozenset()
    """What it needs to see; of the rest it may be told, too. An instance may set its own."""

    def __init__(self) -> None:
        self.work = PredictorWork()

    @classmethod
    def make(
        cls, geometry: Geometry, known: Known, distance: int = 1, given: Mapping[str, str] = NO_OPTIONS
    ) -> Predictor:
        """One with these options, as the user wrote them. Raises ConfigError where `known` lacks what it needs or an
        option is not one.
        """
        make: Any = cls
        made: Predictor = make(geometry, distance, cls.parse(given), known)
        return made

    def begin_iteration(self, began: Began) -> Iterable[Prediction]:
        """A forward pass begins: what its first layers will need. A layer's distance is its number + 1."""
        return ()

    @abstractmethod
    def router_ran(self, routed: Routed) -> Iterable[Prediction]:
        """A router has spoken: what the layers after it will need; past the last one, the first of the next pass."""
        ...

    def end_iteration(self, ok: bool) -> None:
        """The pass ended; what it showed may be learned from, unless it failed. All predictions have been read."""

    @classmethod
    def is_taught(cls) -> bool:
        """Whether passes teach it anything: then it must see them all."""
        return cls.learn is not Predictor.learn

    def finish(self) -> None:
        """Nothing runs any more: what waited for more of a request is learned."""

    def learn(self, history: History) -> None:
        """Learn from passes of a training part, before anything runs."""

    def facts(self) -> dict[str, int | float | None]:
        """What it has to say of itself, by names that its documentation explains."""
        return {}


@dataclass(frozen=True)
class WidthOptions(PolicyOptions):
    """Options of the predictors that name a fixed number of experts a row."""

    width: int | None = option(None, "experts named of each layer; as many as its router chooses, unless said", least=1)


class RankingPredictor(Predictor):
    """One that scores the experts of a layer and names the best `width` of each row."""

    options = WidthOptions

    def __init__(
        self, geometry: Geometry, distance: int = 1, options: WidthOptions = WidthOptions(), known: Known = NOTHING
    ) -> None:
        super().__init__()
        self._layers = geometry.layers
        self._distance = distance_in(geometry, distance)
        self._width = options.width


class FixedDistancePredictor(RankingPredictor):
    """One that predicts a layer when the one `distance` before it has run, and the first layers when a pass begins."""

    def begin_iteration(self, began: Began) -> Iterable[Prediction]:
        layers = range(len(self._layers)) if began.layers is None else began.layers
        for layer in layers[: self._distance]:
            if (prediction := self._predict(layer, layer + 1)) is not None:
                yield prediction

    def router_ran(self, routed: Routed) -> Iterable[Prediction]:
        layer = routed.layer + self._distance
        if layer < len(self._layers) and (prediction := self._predict(layer, self._distance)) is not None:
            yield prediction

    @abstractmethod
    def _predict(self, layer: int, distance: int) -> Prediction | None:
        """Also counts its work."""
        ...


def distance_in(geometry: Geometry, distance: int) -> int:
    """`distance`, or how far one can look in so few layers. Raises ConfigError where it is under 1."""
    if distance < 1:
        raise ConfigError(f"distance={distance}: must be at least 1")
    return max(1, min(distance, geometry.num_layers - 1))


def best_of_rows(layer: int, distance: int, scores: Floats, width: int) -> Prediction | None:
    """The `width` best of each row, by falling score, ties to the lowest id; never one whose score is 0. The score of
    an expert is the highest it has in the rows that name it. `scores` [T, E] are of the layer's E experts.
    """
    best, probabilities = scores[0], scores[0]
    if len(scores) > 1:
        best, probabilities, width = _best_that_are_named(scores, width), scores.max(axis=0), scores.shape[1]
    order = np.argsort(-best, kind="stable")[:width]
    order = order[best[order] > 0]
    if not len(order):
        return None
    return Prediction(layer, order.tolist(), best[order].tolist(), distance, probabilities=probabilities.tolist())


def _best_that_are_named(scores: Floats, width: int) -> Floats:
    """Of each expert, [E], its highest score in the rows that have it among their `width` best; 0 where none has."""
    num_experts = scores.shape[1]
    width = min(width, num_experts)
    least = np.partition(scores, num_experts - width, axis=1)[:, num_experts - width, None]  # [T, 1]
    above, ties = scores > least, scores == least
    room = width - above.sum(axis=1, keepdims=True)
    named = above | (ties & (ties.cumsum(axis=1) <= room))
    best: Floats = np.where(named, scores, np.float32(0)).max(axis=0)
    return best
