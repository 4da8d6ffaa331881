"""The space of candidates, their simulated times, and the search: successive halving (Jamieson and Talwalkar, AISTATS
2016).

Many candidates are scored on a small part of the workload, the best of them on more of it; on each rung the best are
varied, and variations that score well go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from expertly.core.errors import ConfigError, ExpertlyError
from expertly.core.geometry import LayerGeometry
from expertly.lab.routing_rates import rates_of_trace
from expertly.policies.allocation.moepic import SplitPlan, configure
from expertly.policies.base import option_text
from expertly.policies.eviction import EVICTIONS
from expertly.policies.learned import LearnedState
from expertly.policies.predictor import PREDICTORS
from expertly.scheduler.presets import SYSTEMS, get_system
from expertly.scheduler.system import ACCEPTED, OF_PREDICTION, PARTS, REGISTRIES, System, names_of_options
from expertly.sim.compute import compute_model, step_times
from expertly.sim.hardware import Hardware
from expertly.sim.schedule import Schedule, num_prompt_rows
from expertly.sim.study import Memory, Study
from expertly.trace.reader import Trace

Clock = Callable[[], float]
"""Seconds that only rise."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of a clock by which something must have ended."""

    clock: Clock
    end_s: float

    @classmethod
    def after(cls, clock: Clock, seconds: float) -> Deadline:
        return cls(clock, clock() + seconds)

    @property
    def left_s(self) -> float:
        """At least 0."""
        return max(0.0, self.end_s - self.clock())

    @property
    def is_over(self) -> bool:
        return self.clock() >= self.end_s

    def share(self, part: float) -> Deadline:
        """The deadline of the first `part` of the time that is left."""
        return Deadline(self.clock, self.clock() + part * self.left_s)


# -- what can be chosen ----------------------------------------------------------------------------------------------


NUMBERS = {"segments": (1, 2, 4, 8), "distance": (1, 2, 3, 4, 6), "window": (2, 4, 8, 16)}
"""Values that are tried for parts of a system that are numbers."""

THETAS = ("0.25", "0.5", "0.75")
"""Shares of an expert that allocations with an option `theta` are tried with."""

OF_BASELINES = ("order", "preemption", "transfer")
"""Parts that exist to compare with the papers' systems; they are not varied."""

_LEAST_USE = ("random", "index", "popularity")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A system with its codec, and whether it begins with a plan."""

    system: System
    codec: str
    is_planned: bool = False  # it begins with a plan that is made of the recorded part

    @property
    def label(self) -> str:
        name = self.system.name
        if self.is_planned:
            name += " with a plan"
        if self.codec != "none":
            name += f", {self.codec}"
        return name

    @property
    def complexity(self) -> tuple[int, str]:
        """The order among candidates that are equally fast: fewer changed parts first."""
        return (self.system.name.count(":") + self.is_planned, self.label)


@dataclass(frozen=True, slots=True)
class Space:
    """The candidates that can run for one model, given its layers, the memory, the codecs it is packed in, the fields
    of the recorded trace, and whether trained weights exist.
    """

    layers: Sequence[LayerGeometry]
    memory_nbytes: int
    codecs: Sequence[str] = ("none",)
    fields: Sequence[str] = ()  # of the trace
    has_weights: bool = False  # a predictor was trained before

    def presets(self) -> Iterator[Candidate]:
        """Every preset system that can run, unchanged."""
        for system in SYSTEMS.values():
            yield from self._candidates(system)

    def named(self, name: str) -> Candidate:
        """The system of that name in the first codec. Raises ConfigError where there is no such system."""
        return next(self._candidates(get_system(name)))

    def variations(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidates that differ from this one in a single part, option or codec, and can run."""
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

    def can_run(self, system: System) -> bool:
        """Whether a system can run with these fields, weights and memory."""
        if "future" in system.needs or any(name not in self.fields for name in system.needs):
            return False
        if system.keeps_everything and self.memory_nbytes < sum(layer.nbytes for layer in self.layers):
            return False
        return self.has_weights or not system.takes_weights

    def _candidates(self, system: System) -> Iterator[Candidate]:
        if self.can_run(system):
            for codec in self.codecs:
                yield Candidate(system, codec)

    def _settings(self, system: System) -> Iterator[tuple[str, str]]:
        """Every other value of each of the system's parts and options; those that matter most come first."""
        for key, values in NUMBERS.items():
            for number in values:
                fits = key != "segments" or not any(layer.num_blocks % number for layer in self.layers)
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
        """Options of its policies that accept a few words, and theta."""
        for part, registry in REGISTRIES.items():
            name = getattr(system, part)
            for option in names_of_options(part, name):
                kind = registry[name].options
                now = {key: option_text(getattr(kind(), key)) for key in (option,)} | dict(system.options)
                values = THETAS if option == "theta" else _words(kind, option)
                yield from ((option, value) for value in values if value != now[option])


def with_setting(system: System, key: str, value: str) -> System | None:
    """The system with one part or option changed; None where that makes no valid system. Options of a policy that is
    replaced are dropped.
    """
    name, *given = system.name.split(":")
    settings = dict(one.split("=", 1) for one in given)
    if getattr(SYSTEMS[name], key, None) is not None and str(getattr(SYSTEMS[name], key)) == value:
        settings.pop(key, None)  # as the preset has it
    else:
        settings[key] = value
    if key in REGISTRIES:  # options of another one are not its own
        policies = {part: getattr(system, part) for part in REGISTRIES} | {key: value}
        mine = {option for part, policy in policies.items() for option in names_of_options(part, policy)}
        settings = {one: setting for one, setting in settings.items() if one in PARTS or one in mine}
    if (key, value) == ("prediction", "none"):
        settings = {one: setting for one, setting in settings.items() if one not in OF_PREDICTION}
    try:
        return get_system(":".join([name, *(f"{one}={setting}" for one, setting in settings.items())]))
    except ConfigError:
        return None


def _can_plan(system: System) -> bool:
    return system.takes_plan and "theta" not in dict(system.options)


def _needs_future(key: str, value: str) -> bool:
    if key == "eviction":
        return EVICTIONS[value].needs_future
    return key == "prediction" and value in PREDICTORS and "future" in PREDICTORS[value].needs


def _words(kind: type[Any], option: str) -> tuple[str, ...]:
    """The values that an option accepts, where it accepts a few words."""
    hint = get_type_hints(kind)[next(one.name for one in fields(kind) if one.name == option)]
    if hint is bool:
        return ("yes", "no")
    return tuple(get_args(hint)) if get_origin(hint) is Literal else ()


# -- what the simulator says of it -----------------------------------------------------------------------------------


class _OutOfTimeError(ExpertlyError):
    """Ends a simulation from within its progress callback."""


@dataclass(slots=True)
class Simulation:
    """Simulates candidates on the requests of `schedule.test`; predictors learn from its training part."""

    trace: Trace
    schedule: Schedule
    hardware: Hardware
    memory_nbytes: int
    weights: LearnedState | None = None
    seed: int = 0
    _studies: dict[tuple[int, str, SplitPlan | None], Study] = field(init=False, default_factory=dict)
    _plans: dict[int, SplitPlan] = field(init=False, default_factory=dict)
    _rates: Any = field(init=False, default=None)

    def score(self, candidate: Candidate, num_requests: int, deadline: Deadline) -> float | None:
        """Simulated seconds of the first requests, prompts and answers. None where the candidate cannot run in this
        memory, or time ran out.
        """

        def check(what: str, done: int, total: int) -> None:
            if deadline.is_over:
                raise _OutOfTimeError("out of time")

        try:
            row = self.row(candidate, num_requests, check)
        except (ConfigError, _OutOfTimeError):
            return None
        if row["skipped"] is not None:
            return None
        return float((row["ttft_s"] or 0.0) * row["requests"] + (row["tpot_s"] or 0.0) * self.num_steps(num_requests))

    def num_steps(self, num_requests: int) -> int:
        return sum(one.num_rows - num_prompt_rows(self.trace, one) for one in self.schedule.test[:num_requests])

    def row(self, candidate: Candidate, num_requests: int, progress: Any = None) -> dict[str, Any]:
        """`Study.row` of the first requests."""
        plan = self.plan(candidate)
        study = self._study(num_requests, candidate.codec, plan)
        study.progress = progress
        return study.row(candidate.system, Memory(str(self.memory_nbytes)))

    def segments(self, candidate: Candidate) -> int:
        """The candidate's P, as it divides this model's experts."""
        return self._study(1, "none", None).geometry_of(candidate.system).segments_per_expert

    def plan(self, candidate: Candidate) -> SplitPlan | None:
        """The plan that a planned candidate begins with, made of the training part as `expertly lab configure` makes
        one. Raises ConfigError where its memory is too small.
        """
        if not candidate.is_planned:
            return None
        study = self._study(1, "none", None)
        geometry = study.geometry_of(candidate.system)
        key = geometry.segments_per_expert
        if key not in self._plans:
            if self._rates is None:
                self._rates = rates_of_trace(self.trace, self.schedule.training or self.schedule.test)
            timing = step_times(geometry, self.hardware.link, compute_model(self.hardware, geometry, study.dense))
            kept = Memory(str(self.memory_nbytes)).budget(geometry).kept_slots
            self._plans[key] = configure(geometry, kept, self._rates.layers, timing).plan
        return self._plans[key]

    def _study(self, num_requests: int, codec: str, plan: SplitPlan | None) -> Study:
        """A Study, made once for all candidates that can share it, because making one reads the trace."""
        key = (num_requests, codec, plan)
        if key not in self._studies:
            schedule = Schedule(self.schedule.training, self.schedule.test[:num_requests])
            self._studies[key] = Study(
                self.trace,
                schedule,
                self.hardware,
                self.trace.manifest.geometries,
                self.trace.manifest.dense,
                seed=self.seed,
                learned=self.weights,
                plan=plan,
                codec=codec,
            )
        return self._studies[key]


# -- the search ------------------------------------------------------------------------------------------------------


Score = Callable[[Candidate, int, Deadline], float | None]
"""Seconds that so many requests take; None: it cannot run, or time ran out."""

Vary = Callable[[Candidate], Iterable[Candidate]]

KEPT = (12, 8)
"""How many candidates the first rungs keep."""

VARIED = 4
"""How many of a rung's best are varied."""

ROUNDS = 3
"""Rounds of variations on one rung at most; each varies what the one before found."""

_SHARES = (0.6, 0.6, 1.0)


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate, and the seconds that `num_requests` of the workload take with it."""

    candidate: Candidate
    seconds: float
    num_requests: int


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Candidates from the best on; those scored on more requests come first. `is_whole`: there was time to score
    everything.
    """

    ranking: list[Scored]
    num_scored: int
    is_whole: bool


def rungs_of(num_requests: int) -> list[int]:
    """Requests that are simulated on each rung: a quarter, half and all of them."""
    return sorted({max(1, num_requests // 4), max(1, num_requests // 2), num_requests})


def search(seeds: Sequence[Candidate], vary: Vary, score: Score, num_requests: int, deadline: Deadline) -> SearchResult:
    """Successive halving over variations of the seeds. The order of trials depends on scores alone, so a run differs
    from another only in how far its time went. The first seed is scored first on every rung. What has been scored when
    time runs out is ranked.
    """
    scores: dict[tuple[Candidate, int], float] = {}
    is_whole, pool = True, list(dict.fromkeys(seeds))
    first = pool[0]
    rungs = rungs_of(num_requests)
    for number, rung in enumerate(rungs):
        until = deadline.share(_SHARES[len(_SHARES) - len(rungs) + number])

        def score_all(candidates: Iterable[Candidate], rung: int = rung, until: Deadline = until) -> None:
            nonlocal is_whole
            for candidate in candidates:
                if (candidate, rung) in scores:
                    continue
                if until.is_over:
                    is_whole = False
                    return
                seconds = score(candidate, rung, until)
                if seconds is not None:
                    scores[candidate, rung] = seconds

        score_all(pool)
        varied: set[Candidate] = set()
        for _ in range(1 if number and rung == num_requests else ROUNDS):
            parents = [one for one in _best(scores, rung)[:VARIED] if one not in varied]
            varied.update(parents)
            children = [list(vary(parent)) for parent in parents]
            score_all(dict.fromkeys(_in_turn(children)))
        best = _best(scores, rung)[: KEPT[min(number, len(KEPT) - 1)]]
        pool = list(dict.fromkeys([first, *best])) if best else pool
    ranking: dict[Candidate, Scored] = {}
    for rung in reversed(rungs):
        for candidate in _best(scores, rung):
            ranking.setdefault(candidate, Scored(candidate, scores[candidate, rung], rung))
    return SearchResult(list(ranking.values()), len(ranking), is_whole)


def finalists(
    ranking: Sequence[Scored], limit: int, each: int, is_known: Callable[[Candidate], bool]
) -> list[Candidate]:
    """The best `limit` candidates that are worth running on the engine: no two with the same simulated time, and at
    most `each` variants of one preset, since times are less comparable between presets. Candidates for which `is_known`
    is false (parts whose overhead was not measured) get half of the places, and those that others leave.
    """
    chosen: list[Scored] = []
    seen: set[tuple[int, float]] = set()
    by_preset: dict[str, int] = {}
    left = {True: limit, False: limit // 2}
    for only_half in (True, False):
        for one in ranking:
            preset = one.candidate.system.name.split(":")[0]
            key, known = (one.num_requests, one.seconds), is_known(one.candidate) or not only_half
            if key in seen or by_preset.get(preset, 0) >= each or len(chosen) == limit or not left[known]:
                continue
            seen.add(key)
            by_preset[preset] = by_preset.get(preset, 0) + 1
            left[known] -= 1
            chosen.append(one)
    return [one.candidate for one in ranking if one in chosen]


def _best(scores: dict[tuple[Candidate, int], float], rung: int) -> list[Candidate]:
    of_rung = [(seconds, one) for (one, its), seconds in scores.items() if its == rung]
    return [one for _, one in sorted(of_rung, key=lambda pair: (pair[0], pair[1].complexity))]


def _in_turn(lists: Sequence[Sequence[Candidate]]) -> Iterable[Candidate]:
    """The first of each list, then the second of each: running out of time cuts all of them alike."""
    for number in range(max(map(len, lists), default=0)):
        yield from (one[number] for one in lists if number < len(one))
