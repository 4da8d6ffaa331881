"""What later layers will need. One predictor a file; `PREDICTORS` makes one for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from expertly.core.geometry import Geometry
from expertly.policies.base import NO_OPTIONS, PolicyOptions, parse_options
from expertly.policies.known import Known
from expertly.policies.predictor.base import Predictor
from expertly.policies.predictor.counts import Counts
from expertly.policies.predictor.eam import EAM, EAMOptions
from expertly.policies.predictor.fmoe import FMoE, FMoEOptions
from expertly.policies.predictor.index import Index, IndexOptions
from expertly.policies.predictor.learned import Learned
from expertly.policies.predictor.lookahead import Lookahead, LookaheadOptions
from expertly.policies.predictor.modelled import ModelledLookahead
from expertly.policies.predictor.perfect import Perfect
from expertly.policies.predictor.popularity import Popularity
from expertly.policies.predictor.random import RandomExperts
from expertly.policies.predictor.ranking import ALL_LAYERS, WidthOptions
from expertly.policies.predictor.speculative import Speculative, SpeculativeOptions
from expertly.policies.predictor.token_id import TokenId, TokenIdOptions
from expertly.policies.registry import Registry


@dataclass(frozen=True, slots=True)
class MakePredictor:
    """Makes a predictor that looks `distance` layers ahead."""

    name: str
    make: Callable[[Geometry, Known, int, Any], Predictor]
    options: type[Any] = PolicyOptions  # a dataclass (policies.base)
    needs: tuple[str, ...] = ()  # "future", which only simulations have; else fields that a trace must have
    gives_probabilities: bool = True  # of every expert of a layer: scores go by p, and eviction is told
    distance: int | None = None  # layers ahead, where a system takes it and says nothing of them; None: as it was
    learns: str | None = None  # an FMoE keeps its "maps" in a file, an EAM its "matrices"
    takes_weights: bool = False  # Known.learned: it was trained before, on a trace

    def __call__(
        self, geometry: Geometry, known: Known, distance: int, options: Mapping[str, str] = NO_OPTIONS
    ) -> Predictor:
        """Raises ConfigError where `known` lacks what it needs or an option is not one."""
        return self.make(geometry, known, distance, self.parse(options))

    def parse(self, options: Mapping[str, str], where: str = "") -> Any:
        """The options as the dataclass. Raises ConfigError naming the key, its value and what is accepted; `where`
        begins its message.
        """
        return parse_options(self.options, options, where or f"prediction={self.name!r}")


_BUILT_IN = {
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
            LookaheadOptions,
            needs=("lookahead",),
        ),
        MakePredictor(
            "speculative",
            lambda geometry, known, distance, options: Speculative(geometry, distance, options),
            SpeculativeOptions,
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
            "token-id",
            lambda geometry, known, distance, options: TokenId(geometry, known.popularity, distance, options),
            TokenIdOptions,
            needs=("token",),
            distance=ALL_LAYERS,
        ),
        MakePredictor(
            "index",
            lambda geometry, known, distance, options: Index(geometry, distance, options),
            IndexOptions,
            gives_probabilities=False,
        ),
        MakePredictor(
            "random",
            lambda geometry, known, distance, options: RandomExperts(geometry, known.seed, distance, options),
            WidthOptions,
            gives_probabilities=False,
        ),
        MakePredictor(
            "learned",
            lambda geometry, known, distance, options: Learned(geometry, known.learned, distance, options),
            WidthOptions,
            needs=("router_inputs",),
            takes_weights=True,
        ),
        MakePredictor(
            "fmoe",
            lambda geometry, known, distance, options: FMoE(geometry, distance, options),
            FMoEOptions,
            learns="maps",
        ),
        MakePredictor(
            "eam",
            lambda geometry, known, distance, options: EAM(geometry, distance, options),
            EAMOptions,
            learns="matrices",
        ),
    )
}

PREDICTORS: Registry[MakePredictor] = Registry(
    "prediction",
    "expertly.predictors",
    _BUILT_IN,
    lambda one: isinstance(one, MakePredictor) and is_dataclass(one.options),
    "a MakePredictor whose options are a dataclass",
)

__all__ = ["PREDICTORS", "MakePredictor", "Predictor"]
