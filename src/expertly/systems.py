"""The presets: a system as a choice of parts (docs/conventions.md). Adding one here is adding it everywhere, and each
can be taken with other parts: `name:key=value:key=value`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from expertly.control.budget import Budget
from expertly.control.controller import Controller
from expertly.control.journal import JournaledController
from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.policies.eviction import EVICTIONS
from expertly.policies.known import Known
from expertly.policies.options import option_names, option_text, parse_int
from expertly.policies.predictor import PREDICTORS, Predictor
from expertly.policies.prefetch import PREFETCHES

DEFAULT_SYSTEM = "lru"

ALL_LAYERS = 1 << 30
"""A distance that no model has."""

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
            lambda capacity: make(capacity, known),
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

_NUMBERS = ("distance", "window")
_OF_PREDICTION = ("prefetch", "ahead", "distance", "window")

PARTS = (*ACCEPTED, *_NUMBERS)
"""What `name:key=value` may say of any system but one that keeps everything, beside its predictor's options."""


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
        ),
        System(
            "belady-global",
            "the same in one cache over all layers: no system loads fewer bytes",
            eviction="belady",
            scope="global",
            admission="best",
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
            distance=ALL_LAYERS,
        ),
        System(
            "modelled-lookahead",
            "LRU per layer with a lookahead of stated accuracy, modelled (ProMoE, section 4: 90.5% one layer ahead)",
            eviction="lru",
            scope="layer",
            prediction="modelled",
            transfer="asynchronous",
        ),
        System(
            "fmoe",
            "expert maps of earlier iterations predict, order what is loaded ahead and say what goes (fMoE)",
            eviction="fmoe",
            scope="global",
            prediction="fmoe",
            prefetch="proximity",
            transfer="asynchronous",
            distance=2,
        ),
    )
}


def get_system(spec: str) -> System:
    """The preset of that name, or one with other parts: `name:key=value:key=value`. Keys are those of PARTS and the
    options of its predictor; another `prediction` brings its own. The system's name is the spec with keys in a fixed
    order and values as they are usually written: by it the same system can be had again.

    Raises ConfigError naming the key and what is accepted.
    """
    name, *settings = [part.strip() for part in spec.split(":")]
    if name not in SYSTEMS:
        raise ConfigError(f"system={name!r:.200}: unknown; accepted: {', '.join(SYSTEMS)}")
    return _derived(SYSTEMS[name], settings, f"system={spec!r:.200}") if settings else SYSTEMS[name]


def _derived(preset: System, settings: list[str], where: str) -> System:
    if preset.keeps_everything:
        raise ConfigError(
            f"{where}: {preset.name!r} keeps every expert, there is nothing to choose; accepted: its name"
        )
    given: dict[str, str] = {}
    for setting in settings:
        key, _, value = (part.strip() for part in setting.partition("="))
        if not (key and value):
            raise ConfigError(f"{where}: {setting!r:.80}: must be key=value")
        if key in given:
            raise ConfigError(f"{where}: {key!r:.80}: given twice")
        given[key] = value
    parts: dict[str, Any] = {key: given[key] for key in ACCEPTED if key in given}
    parts |= {key: parse_int(given[key], f"{where}: {key}={given[key]!r:.80}") for key in _NUMBERS if key in given}
    options = {key: value for key, value in given.items() if key not in PARTS}
    prediction = parts.get("prediction", preset.prediction)
    if prediction not in ACCEPTED["prediction"]:
        accepted = ", ".join(ACCEPTED["prediction"])
        raise ConfigError(f"{where}: prediction={prediction!r:.80}: unknown; accepted: {accepted}")
    of_prediction = [] if prediction == "none" else option_names(PREDICTORS[prediction].options)
    for key in options:
        if key not in of_prediction:
            accepted = ", ".join((*PARTS, *of_prediction))
            raise ConfigError(f"{where}: {key!r:.80}: unknown; accepted with prediction={prediction}: {accepted}")
    if prediction == "none":
        for key in _OF_PREDICTION:
            if key in parts:
                raise ConfigError(
                    f"{where}: {key}={given[key]}: of no use where nothing is predicted (prediction=none)"
                )
        parts |= {"transfer": "demand", **{key: _default(key) for key in _OF_PREDICTION}}
    else:
        parsed = PREDICTORS[prediction].parse(options, where)
        options = {key: option_text(getattr(parsed, key)) for key in of_prediction if key in options}
        if "prediction" in parts:
            parts["transfer"] = "asynchronous"
    said = {**{key: parts[key] for key in PARTS if key in given}, **options}
    text = [f"{key}={value}" for key, value in said.items()]
    summary = f"{preset.name} with {', '.join(text)}"
    return replace(
        preset, name=":".join([preset.name, *text]), summary=summary, options=tuple(options.items()), needs=(), **parts
    )


def _default(key: str) -> object:
    return next(field.default for field in fields(System) if field.name == key)


def runnable_systems() -> list[str]:
    """Names of the systems that an engine can run: those that do not need the future."""
    return [name for name, system in SYSTEMS.items() if "future" not in system.needs]
