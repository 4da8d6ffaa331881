"""A system as a choice of parts, and what each part may be (docs/conventions.md)."""

from __future__ import annotations

from collections.abc import Collection
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
from expertly.policies.prefetch import PREFETCHES

_NOTHING = Known()

AnyController = TypeVar("AnyController", bound=Controller)


@dataclass(frozen=True, slots=True)
class System:
    """A named choice of parts. Raises ConfigError where they do not fit together."""

    name: str
    summary: str
    eviction: str  # a key of EVICTIONS, or "none": nothing ever goes
    scope: str  # "layer": one cache a layer; "global": one over all layers
    allocation: str = "uniform"
    prediction: str = "none"  # a key of PREDICTORS, or "none"
    prefetch: str = "score"  # a key of PREFETCHES: which prediction is loaded first
    transfer: str = "demand"
    admission: str = "always"  # see Controller
    ahead: str = "cache"  # see Controller
    distance: int = 1  # layers that the predictor looks ahead
    window: int | None = None  # see Controller
    options: tuple[tuple[str, str], ...] = ()  # of the predictor, as they were given
    keeps_everything: bool = False
    needs: tuple[str, ...] = ()  # "future": runs in simulations only; else fields of a trace. Those of its parts too

    def __post_init__(self) -> None:
        _check(self)
        of_parts = PREDICTORS[self.prediction].needs if self.prediction != "none" else ()
        if not self.keeps_everything and EVICTIONS[self.eviction].needs_future:
            of_parts = ("future", *of_parts)
        object.__setattr__(self, "needs", tuple(dict.fromkeys((*self.needs, *of_parts))))

    @property
    def uses_maps(self) -> bool:
        """Whether it learns expert maps that can be kept in a file."""
        return self.prediction == "fmoe"

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
            lambda capacity: make(geometry, capacity, known),
            scope=self.scope,
            order=order,
            admission=self.admission,
            ahead=self.ahead,
            prefetch=self.prefetch,
            window=self.window,
        )

    def predictor(self, geometry: Geometry, known: Known = _NOTHING) -> Predictor | None:
        """Its predictor, None where it has none. Raises ConfigError as `controller`."""
        if self.prediction == "none":
            return None
        return PREDICTORS[self.prediction](geometry, known, self.distance, dict(self.options))


def _check(system: System) -> None:
    """Raise ConfigError where a part is unknown, or of no use beside the others."""
    where = f"system={system.name!r}"
    for key, accepted in ACCEPTED.items():
        value = getattr(system, key)
        if value not in accepted and not (key == "eviction" and system.keeps_everything):
            raise ConfigError(f"{where}: {key}={value!r:.80}: unknown; accepted: {', '.join(accepted)}")
    if system.distance < 1:
        raise ConfigError(f"{where}: distance={system.distance}: must be at least 1")
    if system.window is not None and system.window < 1:
        raise ConfigError(f"{where}: window={system.window}: must be at least 1")
    if not system.keeps_everything:
        _check_eviction(system, where)
    if system.prediction == "none":
        return
    predictor = PREDICTORS[system.prediction]
    predictor.parse(dict(system.options), where)
    if system.prefetch != "score" and not predictor.gives_probabilities:
        raise ConfigError(
            f"{where}: prefetch={system.prefetch!r} weighs probabilities, which prediction={system.prediction!r} does "
            f"not give; accepted: score"
        )


def _check_eviction(system: System, where: str) -> None:
    eviction = EVICTIONS[system.eviction]
    if system.admission == "best" and not eviction.is_scored:
        scored = ", ".join(name for name, one in EVICTIONS.items() if one.is_scored)
        raise ConfigError(
            f"{where}: admission='best' compares scores, which eviction={system.eviction!r} does not have; "
            f"accepted: admission=always, or eviction={scored}"
        )
    if eviction.needs_future and system.admission != "best":
        raise ConfigError(
            f"{where}: eviction={system.eviction!r} needs to be told what is needed before it is kept; "
            f"accepted: admission=best"
        )
    predictors = [name for name, one in PREDICTORS.items() if one.gives_probabilities]
    if eviction.needs_probabilities and system.prediction not in predictors:
        raise ConfigError(
            f"{where}: eviction={system.eviction!r} goes by predicted probabilities, which "
            f"prediction={system.prediction!r} does not give; accepted: prediction={', '.join(predictors)}"
        )


ACCEPTED: dict[str, Collection[str]] = {
    "eviction": EVICTIONS,
    "scope": ("layer", "global"),
    "prediction": ("none", *PREDICTORS),
    "prefetch": PREFETCHES,
    "admission": ("always", "best"),
    "ahead": ("cache", "ring"),
}
"""Of each part that is chosen by name, what it may be."""

NUMBERS = ("distance", "window")
OF_PREDICTION = ("prefetch", "ahead", "distance", "window")
"""Parts that are of no use where nothing is predicted."""

PARTS = (*ACCEPTED, *NUMBERS)
"""What `name:key=value` may say of any system but one that keeps everything, beside its predictor's options."""
