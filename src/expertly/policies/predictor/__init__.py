"""What later layers will need. One predictor a file; `PREDICTORS` makes one for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from expertly.core.geometry import Geometry
from expertly.policies.known import Known
from expertly.policies.options import parse_options
from expertly.policies.predictor.base import Predictor
from expertly.policies.predictor.counts import Counts
from expertly.policies.predictor.fmoe import FMoE, FMoEOptions
from expertly.policies.predictor.lookahead import Lookahead
from expertly.policies.predictor.modelled import ModelledLookahead
from expertly.policies.predictor.perfect import Perfect
from expertly.policies.predictor.popularity import Popularity
from expertly.policies.predictor.ranking import WidthOptions


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Of a predictor that has none."""


_NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class MakePredictor:
    """Makes a predictor that looks `distance` layers ahead."""

    name: str
    make: Callable[[Geometry, Known, int, Any], Predictor]
    options: type[Any] = NoOptions  # a dataclass (policies.options)
    needs: tuple[str, ...] = ()  # "future", which only simulations have; else fields that a trace must have
    gives_probabilities: bool = True  # of every expert of a layer: scores are p, and eviction is told

    def __call__(
        self, geometry: Geometry, known: Known, distance: int, options: Mapping[str, str] = _NO_OPTIONS
    ) -> Predictor:
        """Raises ConfigError where `known` lacks what it needs or an option is not one."""
        return self.make(geometry, known, distance, self.parse(options))

    def parse(self, options: Mapping[str, str], where: str = "") -> Any:
        """The options as the dataclass. Raises ConfigError naming the key, its value and what is accepted; `where`
        begins its message.
        """
        return parse_options(self.options, options, where or f"prediction={self.name!r}")


PREDICTORS: dict[str, MakePredictor] = {
    one.name: one
    for one in (
        MakePredictor(
            "perfect",
            lambda geometry, known, distance, options: Perfect(geometry.num_layers, known, distance),
            needs=("future",),
            gives_probabilities=False,
        ),
        MakePredictor(
            "modelled",
            lambda geometry, known, distance, options: ModelledLookahead(
                [layer.num_experts for layer in geometry.layers], known, distance
            ),
            needs=("future",),
            gives_probabilities=False,
        ),
        MakePredictor(
            "lookahead",
            lambda geometry, known, distance, options: Lookahead(geometry, distance, options),
            WidthOptions,
            needs=("lookahead",),
        ),
        MakePredictor(
            "counts",
            lambda geometry, known, distance, options: Counts(geometry, known.popularity, distance, options),
            WidthOptions,
        ),
        MakePredictor(
            "popularity",
            lambda geometry, known, distance, options: Popularity(geometry, known.popularity, distance, options),
            WidthOptions,
        ),
        MakePredictor(
            "fmoe",
            lambda geometry, known, distance, options: FMoE(geometry, distance, options),
            FMoEOptions,
        ),
    )
}
__all__ = ["PREDICTORS", "MakePredictor", "Predictor"]
