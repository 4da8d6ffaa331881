"""What can be chosen, what the simulator says of it, and the search over it: successive
halving (Jamieson and Talwalkar, AISTATS 2016). Many candidates are scored on a little of the workload, the best on more
of it; on each rung the best are varied, so that what is found there goes on.
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
"""Seconds, rising."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of a clock."""

    clock: Clock
    end_s: float

    @classmethod
    def after(cls, clock: Clock, seconds: float) -> Deadline:
        return cls(clock, clock() + seconds)

    @property
    def left_s(self) -> float:
        """Never under 0."""
        return max(0.0, self.end_s - self.clock())

    @property
    def is_over(self) -> bool:
        return self.clock() >= self.end_s

    def share(self, part: float) -> Deadline:
        """Of what is left now, the first `part`."""
        return Deadline(self.clock, self.clock() + part * self.left_s)


# -- what can be chosen ----------------------------------------------------------------------------------------------


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


# -- what the simulator says of it -----------------------------------------------------------------------------------


class _OutOfTimeError(ExpertlyError):
    """Raised within a simulation, to end it."""


@dataclass(slots=True)
class Simulation:
    """Of the requests of `schedule.test`; what learns, learns from its training part."""

    trace: Trace
    schedule: Schedule
    hardware: Hardware
    weights: LearnedState | None = None
    seed: int = 0
    _studies: dict[tuple[int, str, SplitPlan | None], Study] = field(init=False, default_factory=dict)
    _plans: dict[tuple[int, int], SplitPlan] = field(init=False, default_factory=dict)
    _rates: Any = field(init=False, default=None)

    def score(self, candidate: Candidate, num_requests: int, deadline: Deadline) -> float | None:
        """Seconds of the first requests, prompts and answers; None where the candidate cannot run in this memory, or
        the time was up before it had.
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
        """Decode steps of the first requests."""
        return sum(one.num_rows - num_prompt_rows(self.trace, one) for one in self.schedule.test[:num_requests])

    def row(self, candidate: Candidate, num_requests: int, progress: Any = None) -> dict[str, Any]:
        """As `Study.row`, of the first requests."""
        plan = self.plan(candidate)
        study = self._study(num_requests, candidate.codec, plan)
        study.progress = progress
        return study.row(candidate.system, Memory(str(candidate.budget_nbytes)))

    def segments(self, candidate: Candidate) -> int:
        """P, as it fits the model."""
        return self._study(1, "none", None).geometry_of(candidate.system).segments_per_expert

    def plan(self, candidate: Candidate) -> SplitPlan | None:
        """What a planned candidate begins with: as `expertly lab configure` makes it of the training part. Raises
        ConfigError where its memory is too little.
        """
        if not candidate.is_planned:
            return None
        study = self._study(1, "none", None)
        geometry = study.geometry_of(candidate.system)
        key = (geometry.segments_per_expert, candidate.budget_nbytes)
        if key not in self._plans:
            if self._rates is None:
                self._rates = rates_of_trace(self.trace, self.schedule.training or self.schedule.test)
            timing = step_times(geometry, self.hardware.link, compute_model(self.hardware, geometry, study.dense))
            kept = Memory(str(candidate.budget_nbytes)).budget(geometry).kept_slots
            self._plans[key] = configure(geometry, kept, self._rates.layers, timing).plan
        return self._plans[key]

    def _study(self, num_requests: int, codec: str, plan: SplitPlan | None) -> Study:
        """Shared by all candidates that it is the same for: it reads the trace when it is made."""
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
"""Seconds that so many requests take; None: it cannot run, or the time was up."""

Vary = Callable[[Candidate], Iterable[Candidate]]

KEPT = (12, 8)
"""Candidates that go on, from the first rungs."""

VARIED = 4
"""Of the best of a rung, those that are varied."""

ROUNDS = 3
"""Of varying on one rung, at most: each from what the one before found."""

_SHARES = (0.6, 0.6, 1.0)


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate, and the seconds that `num_requests` of the workload take with it."""

    candidate: Candidate
    seconds: float
    num_requests: int


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best first, those that were scored on most requests before the others; how many were tried, and whether all
    that was to be tried was.
    """

    ranking: list[Scored]
    num_scored: int
    is_whole: bool


def rungs_of(num_requests: int) -> list[int]:
    """Requests that are simulated on each rung: a quarter, half and all of them."""
    return sorted({max(1, num_requests // 4), max(1, num_requests // 2), num_requests})


def search(seeds: Sequence[Candidate], vary: Vary, score: Score, num_requests: int, deadline: Deadline) -> SearchResult:
    """The order in which candidates are tried depends on nothing but scores, so that what is found does not change from
    run to run but by how far time goes. The first of the seeds is scored on every rung, first. What stays when time is
    up is ranked.
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
    ranking: Sequence[Scored], limit: int, each: int, is_known: Callable[[Candidate], bool] = lambda _: True
) -> list[Candidate]:
    """The best `limit` candidates that are worth running: no two that the simulator cannot tell apart, and at most
    `each` made of one preset, as its times are less sure between systems than within one. Those that are not known to
    be as fast as simulated have half of the places, and what the others leave.
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
    """The first of each, the second of each: when time is up, none has had all of it."""
    for number in range(max(map(len, lists), default=0)):
        yield from (one[number] for one in lists if number < len(one))
