"""The contract of a predictor, which watches forward passes and says what later layers will need; and what many
predictors share: when they predict which layer, and how scores become a prediction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Began, Floats, History, Routed, Want
from expertly.policies.base import NO_OPTIONS, Policy, PolicyOptions, option
from expertly.policies.known import NOTHING, Known
from expertly.policies.learned import LearnedState

ALL_LAYERS = 1 << 30
"""A distance that no model has."""


class Predictor(Policy, ABC):
    """Watches one model. It sees layers in order and predicts layers that have not run; it reads no clock.

    A class is made with (geometry, distance, options, known): how many layers it looks ahead, an instance of its
    `options`, and what is known beforehand. An iteration that fails lacks its last layers.
    """

    family = "prediction"
    needs: ClassVar[tuple[str, ...]] = ()
    """"future", which only simulations have; else fields that a trace must have."""
    gives_probabilities: ClassVar[bool] = True
    """Whether it gives a probability for every expert of a layer, for prefetch=proximity and the eviction policy."""
    default_distance: ClassVar[int | None] = None
    """The distance of a system that names it without one; None: the system's own."""
    weights: ClassVar[type[LearnedState] | None] = None
    """The class of its weights, if it must be trained on a trace before: a file holds them (Known.get)."""
    wants: frozenset[Want] = frozenset()
    """What it needs to see; it may be shown more. An instance may set its own."""

    @classmethod
    def make(
        cls, geometry: Geometry, known: Known, distance: int = 1, texts: Mapping[str, str] = NO_OPTIONS
    ) -> Predictor:
        """One with these options, as the user wrote them. Raises ConfigError where an option is wrong, or `known` lacks
        what it needs.
        """
        return cls(geometry, distance, cls.parse(texts), known)  # type: ignore[call-arg]

    def begin_iteration(self, began: Began) -> Iterable[Prediction]:
        """A forward pass begins: predict its first layers. A layer's distance is then its number + 1."""
        return ()

    @abstractmethod
    def router_ran(self, routed: Routed) -> Iterable[Prediction]:
        """A router ran: predict later layers; past the last one, the first layers of the next pass."""
        ...

    def end_iteration(self, ok: bool) -> None:
        """The pass ended; `ok`: it did not fail, and may be learned from. All predictions have been read."""

    def learn(self, history: History) -> None:
        """Learn from passes of a training part, before anything runs."""

    def lookahead_width(self, layer: int) -> int | None:
        """How many experts it names after `layer`, if these are the best of the next layer by the scores of that
        layer's router, and it keeps nothing of what it is shown. None: it predicts otherwise.
        """
        return None

    def facts(self) -> dict[str, int | float | None]:
        """Facts about it for results, by names that its documentation explains."""
        return {}


@dataclass(frozen=True)
class WidthOptions(PolicyOptions):
    """Options of predictors that name a fixed number of experts for each row."""

    width: int | None = option(None, "experts named of each layer; as many as its router chooses, unless said", least=1)


class RankingPredictor(Predictor):
    """Scores the experts of a layer and names the best `width` of each row."""

    options = WidthOptions

    def __init__(
        self, geometry: Geometry, distance: int = 1, options: WidthOptions = WidthOptions(), known: Known = NOTHING
    ) -> None:
        self._layers = geometry.layers
        self._distance = distance_in(geometry, distance)
        self._width = options.width


def distance_in(geometry: Geometry, distance: int) -> int:
    """`distance`, at most as many layers as one can look ahead in this model. Raises ConfigError below 1."""
    if distance < 1:
        raise ConfigError(f"distance={distance}: must be at least 1")
    return max(1, min(distance, geometry.num_layers - 1))


def best_of_rows(layer: int, distance: int, scores: Floats, width: int) -> Prediction | None:
    """The `width` best experts of each row of `scores` [T, E], by falling score, ties to the lowest id; never one whose
    score is 0. An expert's score is the highest that it has in the rows that name it.
    """
    best, probabilities = scores[0], scores[0]
    if len(scores) > 1:
        best, probabilities, width = _best_that_are_named(scores, width), scores.max(axis=0), scores.shape[1]
    order = np.argsort(-best, kind="stable")[:width]
    named: list[float] = best[order].tolist()
    while named and named[-1] <= 0:
        named.pop()
    if not named:
        return None
    return Prediction(layer, order[: len(named)].tolist(), named, distance, probabilities=probabilities.tolist())


def best_of_layers(layers: Sequence[int], scores: Floats, width: int) -> list[Prediction]:
    """As `best_of_rows` for one row [E] of each of some layers, whose routers were asked one layer before."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :width]
    best, nums = np.take_along_axis(scores, order, axis=1), (scores > 0).sum(axis=1).tolist()
    every = zip(layers, order.tolist(), best.tolist(), scores.tolist(), nums, strict=True)
    return [Prediction(layer, ids[:num], named[:num], 1, likely) for layer, ids, named, likely, num in every]


def _best_that_are_named(scores: Floats, width: int) -> Floats:
    """For each expert, [E], its highest score in the rows that have it among their `width` best; 0 where none has."""
    num_experts = scores.shape[1]
    width = min(width, num_experts)
    least = np.partition(scores, num_experts - width, axis=1)[:, num_experts - width, None]  # [T, 1]
    above, ties = scores > least, scores == least
    room = width - above.sum(axis=1, keepdims=True)
    named = above | (ties & (ties.cumsum(axis=1) <= room))
    best: Floats = np.where(named, scores, np.float32(0)).max(axis=0)
    return best
