"""The presets: a system as a choice of parts (docs/conventions.md). Adding one here is adding it everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from expertly.control.budget import Budget
from expertly.control.controller import Controller
from expertly.control.journal import JournaledController
from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.policies.eviction import EVICTIONS
from expertly.policies.known import Known
from expertly.policies.predictor import PREDICTORS, Predictor

DEFAULT_SYSTEM = "lru"

_NOTHING = Known()

AnyController = TypeVar("AnyController", bound=Controller)


@dataclass(frozen=True, slots=True)
class System:
    """A named choice of parts."""

    name: str
    summary: str
    eviction: str  # a key of EVICTIONS, or "none": nothing ever goes
    scope: str  # "layer": one cache a layer; "global": one over all layers
    allocation: str = "uniform"
    prediction: str = "none"  # a key of PREDICTORS, or "none"
    transfer: str = "demand"
    admission: str = "always"  # see Controller
    ahead: str = "cache"  # see Controller
    distance: int = 1  # layers that the predictor looks ahead
    keeps_everything: bool = False
    needs: tuple[str, ...] = ()  # "future": runs in simulations only; else fields of a trace

    def controller(
        self, geometry: Geometry, budget: Budget, known: Known = _NOTHING, order: str = "resident"
    ) -> Controller:
        """The control plane of this system. Raises ConfigError where `known` lacks what it needs."""
        return self._make(Controller, geometry, budget, known, order)

    def journaled_controller(
        self, geometry: Geometry, budget: Budget, known: Known = _NOTHING, order: str = "resident"
    ) -> JournaledController:
        """The same, able to write down what it decides."""
        return self._make(JournaledController, geometry, budget, known, order)

    def _make(
        self, kind: type[AnyController], geometry: Geometry, budget: Budget, known: Known, order: str
    ) -> AnyController:
        if order == "id" and self.admission == "best":
            raise ConfigError(
                f"order='id': one expert at a time leaves system {self.name!r} no choice; accepted: resident"
            )
        make = EVICTIONS["lru" if self.keeps_everything else self.eviction]
        return kind(
            geometry,
            budget,
            lambda capacity: make(capacity, known),
            scope=self.scope,
            order=order,
            admission=self.admission,
            ahead=self.ahead,
        )

    def predictor(self, geometry: Geometry, known: Known = _NOTHING) -> Predictor | None:
        """Its predictor, None where it has none. Raises ConfigError as `controller`."""
        return None if self.prediction == "none" else PREDICTORS[self.prediction](geometry, known, self.distance)


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System(
            "on-demand",
            "loads what is missing when it is needed (DeepSpeed-Inference, as fMoE builds it)",
            eviction="lru",
            scope="global",
        ),
        System("lru", "keeps the most recently used experts of each layer", eviction="lru", scope="layer"),
        System("lfu", "keeps the most frequently used experts of each layer", eviction="lfu", scope="layer"),
        System(
            "lcp", "keeps the experts of highest frequency x decayed recency (MoEpic)", eviction="lcp", scope="layer"
        ),
        System("random", "keeps any experts: the baseline every policy must beat", eviction="random", scope="layer"),
        System(
            "static",
            "pins each layer's most popular experts, with two spare places",
            eviction="static",
            scope="layer",
        ),
        System(
            "resident",
            "keeps every expert: the speed of enough memory",
            eviction="none",
            scope="global",
            transfer="at load",
            keeps_everything=True,
        ),
        System(
            "belady",
            "keeps what is used again soonest: the least that replacement in each layer must load",
            eviction="belady",
            scope="layer",
            admission="best",
            needs=("future",),
        ),
        System(
            "belady-global",
            "the same in one cache over all layers: no system loads fewer bytes",
            eviction="belady",
            scope="global",
            admission="best",
            needs=("future",),
        ),
        System(
            "oracle",
            "belady-global with perfect prediction, loading as early as places and the link allow",
            eviction="belady",
            scope="global",
            prediction="perfect",
            transfer="asynchronous",
            admission="best",
            ahead="ring",
            distance=1 << 30,
            needs=("future",),
        ),
        System(
            "modelled-lookahead",
            "LRU per layer with a lookahead of stated accuracy, modelled (ProMoE, section 4: 90.5% one layer ahead)",
            eviction="lru",
            scope="layer",
            prediction="modelled",
            transfer="asynchronous",
            needs=("future",),
        ),
    )
}


def get_system(name: str) -> System:
    """The preset of that name. Raises ConfigError with the names that exist."""
    try:
        return SYSTEMS[name]
    except KeyError:
        raise ConfigError(f"system={name!r}: unknown; accepted: {', '.join(SYSTEMS)}") from None


def runnable_systems() -> list[str]:
    """Names of the systems that an engine can run: those that do not need the future."""
    return [name for name, system in SYSTEMS.items() if "future" not in system.needs]
