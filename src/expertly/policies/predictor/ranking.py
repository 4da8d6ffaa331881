"""From scores of a layer's experts to a prediction: the best of every row, all rows together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Floats

ALL_LAYERS = 1 << 30
"""A distance that no model has."""


@dataclass(frozen=True, slots=True)
class WidthOptions:
    """Options of the predictors that name a fixed number of experts a row."""

    width: int | None = None  # experts, of each layer; None: as many as the layer's router chooses

    def __post_init__(self) -> None:
        if self.width is not None and self.width < 1:
            raise ConfigError(f"width={self.width}: must be at least 1")


class Reach:
    """Which layers are predicted when: `distance` layers ahead, within one iteration."""

    def __init__(self, geometry: Geometry, distance: int) -> None:
        if distance < 1:
            raise ConfigError(f"distance={distance}: must be at least 1")
        self.num_layers = geometry.num_layers
        self.distance = max(1, min(distance, geometry.num_layers - 1))

    def at_begin(self, layers: range | None = None) -> range:
        """Layers that no router of an iteration over `layers` (None: all) can name in time."""
        return (range(self.num_layers) if layers is None else layers)[: self.distance]

    def after(self, layer: int) -> int | None:
        """The layer that comes into reach when this one's router has spoken."""
        ahead = layer + self.distance
        return ahead if layer < ahead < self.num_layers else None


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
