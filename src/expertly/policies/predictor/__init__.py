"""What later layers will need. One predictor a file; `PREDICTORS` makes one for a model."""

from __future__ import annotations

from typing import Protocol

from expertly.core.geometry import Geometry
from expertly.policies.known import Known
from expertly.policies.predictor.base import Predictor
from expertly.policies.predictor.modelled import ModelledLookahead
from expertly.policies.predictor.perfect import Perfect


class MakePredictor(Protocol):
    """Makes a predictor that looks `distance` layers ahead. Raises ConfigError where `known` lacks what it needs."""

    def __call__(self, geometry: Geometry, known: Known, distance: int) -> Predictor: ...


PREDICTORS: dict[str, MakePredictor] = {
    "perfect": lambda geometry, known, distance: Perfect(geometry.num_layers, known, distance),
    "modelled": lambda geometry, known, distance: ModelledLookahead(
        [layer.num_experts for layer in geometry.layers], known, distance
    ),
}

__all__ = ["PREDICTORS", "MakePredictor", "Predictor"]
