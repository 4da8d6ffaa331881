"""What can be chosen: every system that can run here, and each with another part, P, or codec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from expertly.core.errors import ConfigError
from expertly.core.geometry import LayerGeometry
from expertly.policies.base import option_text
from expertly.policies.eviction import EVICTIONS
from expertly.policies.predictor import PREDICTORS
from expertly.scheduler.presets import SYSTEMS, get_system
from expertly.scheduler.system import ACCEPTED, OF_PREDICTION, PARTS, REGISTRIES, System, names_of_options

NUMBERS = {"segments": (1, 2, 4, 8), "distance": (1, 2, 3, 4, 6), "window": (2, 4, 8, 16)}
"""What is tried of parts that are numbers."""

THETAS = ("0.25", "0.5", "0.75")
"""Parts of experts that are kept, where an allocation is told."""

BUDGET_SHARES = (1.0, 0.75, 0.5)
"""Of the memory that is free, where nobody said how much to take."""

OF_BASELINES = ("order", "preemption", "transfer")
"""Parts that are there for systems of papers to be compared with: they are not varied."""

_LEAST_USE = ("random", "index", "popularity")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A system, how it begins, and what it is given."""

    system: System
    budget_nbytes: int
    codec: str
    is_planned: bool = False  # it begins with a plan that is made of the recorded part

    @property
    def label(self) -> str:
        """In words, short."""
        name = self.system.name
        if self.is_planned:
            name += " with a plan"
        if self.codec != "none":
            name += f", {self.codec}"
        return name

    @property
    def complexity(self) -> tuple[int, int, str]:
        """Of what does equally well, the least is taken: less memory, fewer parts."""
        parts = self.system.name.count(":") + self.is_planned
        return (self.budget_nbytes, parts, self.label)


@dataclass(frozen=True, slots=True)
class Space:
    """What is there to choose from for one model: its layers, its memory, the codecs that it is packed in, and what the
    recorded trace and the user bring.
    """

    layers: Sequence[LayerGeometry]
    memory_nbytes: int
    codecs: Sequence[str] = ("none",)
    fields: Sequence[str] = ()  # of the trace
    has_weights: bool = False  # a predictor was trained before
    is_free: bool = False  # nobody said how much memory to take

    def presets(self) -> Iterator[Candidate]:
        """Every system by its name, as it is."""
        for system in SYSTEMS.values():
            yield from self._candidates(system)

    def named(self, name: str) -> Candidate:
        """One by its name, in the codec that comes first. Raises ConfigError where there is none."""
        return next(self._candidates(get_system(name)))

    def variations(self, candidate: Candidate) -> Iterator[Candidate]:
        """With one thing changed, each once; what does not fit together, or cannot run here, is left out."""
        system = candidate.system
        for key, value in () if system.keeps_everything else self._settings(system):
            changed = with_setting(system, key, value)
            if changed is not None and self.can_run(changed):
                yield replace(candidate, system=changed, is_planned=candidate.is_planned and _can_plan(changed))
        if _can_plan(system):
            yield replace(candidate, is_planned=not candidate.is_planned)
        if not system.keeps_everything:
            for codec in self.codecs:
                if codec != candidate.codec:
                    yield replace(candidate, codec=codec)
        if self.is_free and not system.keeps_everything:
            for share in BUDGET_SHARES:
                if int(share * self.memory_nbytes) != candidate.budget_nbytes:
                    yield replace(candidate, budget_nbytes=int(share * self.memory_nbytes))

    def can_run(self, system: System) -> bool:
        """With what the trace and the user bring, in this memory."""
        if "future" in system.needs or any(name not in self.fields for name in system.needs):
            return False
        if system.keeps_everything and self.memory_nbytes < sum(layer.nbytes for layer in self.layers):
            return False
        return self.has_weights or not system.takes_weights

    def _candidates(self, system: System) -> Iterator[Candidate]:
        if self.can_run(system):
            for codec in self.codecs:
                yield Candidate(system, self.memory_nbytes, codec)

    def _settings(self, system: System) -> Iterator[tuple[str, str]]:
        """Every other value of every part and option of it, what matters most first."""
        for key, values in NUMBERS.items():
            for number in values:
                fits = key != "segments" or not any(layer.intermediate_size % number for layer in self.layers)
                if fits and number != getattr(system, key):
                    yield key, str(number)
        for key in dict.fromkeys(("prediction", "eviction", *ACCEPTED)):
            if key in OF_BASELINES:
                continue
            for value in ACCEPTED[key]:
                if value != getattr(system, key) and value not in _LEAST_USE and not _needs_future(key, value):
                    yield key, value
        yield from self._options(system)

    def _options(self, system: System) -> Iterator[tuple[str, str]]:
        """Of its predictor and its allocation, those that are one of a few words; and theta."""
        for part, registry in REGISTRIES.items():
            name = getattr(system, part)
            for option in names_of_options(part, name):
                kind = registry[name].options
                now = {key: option_text(getattr(kind(), key)) for key in (option,)} | dict(system.options)
                values = THETAS if option == "theta" else _words(kind, option)
                yield from ((option, value) for value in values if value != now[option])


def with_setting(system: System, key: str, value: str) -> System | None:
    """The system with a part or an option changed, beside what it was given before; None where that cannot be."""
    name, *given = system.name.split(":")
    settings = dict(one.split("=", 1) for one in given)
    if getattr(SYSTEMS[name], key, None) is not None and str(getattr(SYSTEMS[name], key)) == value:
        settings.pop(key, None)  # as the preset has it
    else:
        settings[key] = value
    if key in REGISTRIES:  # options of another one are not its own
        mine = {option for part in REGISTRIES for option in _options_of(system, part, key, value)}
        settings = {one: setting for one, setting in settings.items() if one in PARTS or one in mine}
    if (key, value) == ("prediction", "none"):
        settings = {one: setting for one, setting in settings.items() if one not in OF_PREDICTION}
    try:
        return get_system(":".join([name, *(f"{one}={setting}" for one, setting in settings.items())]))
    except ConfigError:
        return None


def _options_of(system: System, part: str, key: str, value: str) -> list[str]:
    return names_of_options(part, value if part == key else getattr(system, part))


def _can_plan(system: System) -> bool:
    return system.takes_plan and "theta" not in dict(system.options)


def _needs_future(key: str, value: str) -> bool:
    if key == "eviction":
        return EVICTIONS[value].needs_future
    return key == "prediction" and value in PREDICTORS and "future" in PREDICTORS[value].needs


def _words(kind: type[Any], option: str) -> tuple[str, ...]:
    """What an option may be, where that is a few words."""
    hint = get_type_hints(kind)[next(one.name for one in fields(kind) if one.name == option)]
    if hint is bool:
        return ("yes", "no")
    return tuple(get_args(hint)) if get_origin(hint) is Literal else ()
