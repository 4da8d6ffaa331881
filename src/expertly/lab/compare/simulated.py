"""The same requests through the simulator, with the bounds beside them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from expertly.core.errors import ExpertlyError
from expertly.core.messages import Span
from expertly.lab.compare.engine import RunFailure
from expertly.lab.compare.settings import ComparisonSettings
from expertly.scheduler.presets import BOUNDS
from expertly.sim.schedule import Schedule, Selection, decode_passes, first_rows, make_schedule, with_answer
from expertly.sim.study import Memory, Progress, Study
from expertly.trace.reader import Trace


class TokenTimeline:
    """Records one run's events that overlap iteration number `iteration`, as a watcher of the simulator and its link.
    `label`: the budget.
    """

    def __init__(self, iteration: int) -> None:
        self._iteration = iteration
        self._num_ended = 0
        self._window_ns: list[int] = []  # the ends of the iteration before, and of this one
        self._events: list[dict[str, Any]] = []
        if iteration == 0:
            self._window_ns.append(0)

    def computed(self, what: str, layer: int, begin_ns: int, end_ns: int) -> None:
        kind, _, number = what.partition(" ")
        found: dict[str, Any] = {"kind": kind, "layer": layer}
        if number:
            found["expert"] = int(number)
        self._add("device", begin_ns, end_ns, found)
        if what == "head":
            self._num_ended += 1
            if self._num_ended in (self._iteration, self._iteration + 1):
                self._window_ns.append(end_ns)

    def moved(self, where: str, piece: Span, begin_ns: int, end_ns: int) -> None:
        found = {"kind": "load", "layer": piece.layer, "expert": piece.expert}
        self._add(where, begin_ns, end_ns, found | {"segment": piece.segment, "num_segments": piece.num_segments})

    def spent(self, what: str, begin_ns: int, end_ns: int) -> None:
        self._add("device", begin_ns, end_ns, {"kind": what, "layer": -1})

    def predicted(self, what: str, begin_ns: int, end_ns: int) -> None:
        self._add("predictor", begin_ns, end_ns, {"kind": what, "layer": -1})

    def _add(self, lane: str, begin_ns: int, end_ns: int, found: dict[str, Any]) -> None:
        # A transfer may be noted an iteration before or after the one that it overlaps.
        if self._iteration - 2 <= self._num_ended <= self._iteration + 2:
            self._events.append({"lane": lane, "begin_ns": begin_ns, "end_ns": end_ns} | found)

    def as_dict(self) -> dict[str, Any] | None:
        """The iteration's length and events, timed from its begin; None where the run ended before it."""
        if len(self._window_ns) < 2:
            return None
        begin, end = self._window_ns
        events = [
            event | {"begin_ns": event["begin_ns"] - begin, "end_ns": event["end_ns"] - begin}
            for event in self._events
            if event["begin_ns"] < end and event["end_ns"] > begin
        ]
        return {"length_ns": end - begin, "events": sorted(events, key=lambda event: event["begin_ns"])}


class TokenTimelines:
    """A TokenTimeline for each run under one budget."""

    def __init__(self, iteration: int | None, label: str) -> None:
        self._iteration = iteration
        self._label = label
        self._runs: dict[str, TokenTimeline] = {}

    def begin_run(self, name: str) -> TokenTimeline | None:
        """Runs are called "SYSTEM, BUDGET", or "SYSTEM, BUDGET, P = 4" where systems differ in P."""
        system, _, budget = name.partition(", ")
        if self._iteration is None or budget.partition(", ")[0] != self._label:
            return None
        watcher = self._runs[f"{system}, {budget}"] = TokenTimeline(self._iteration)
        return watcher

    def add(self, other: TokenTimelines) -> None:
        """Those of runs that another process watched."""
        self._runs |= other._runs

    def of(self, system: str, segments: int) -> dict[str, Any] | None:
        for name in (f"{system}, {self._label}, P = {segments}", f"{system}, {self._label}"):
            if name in self._runs:
                return self._runs[name].as_dict()
        return None


def selection_of(settings: ComparisonSettings, trace: Trace, usual_requests: int | None) -> Selection:
    """The requests that are compared; `usual_requests` of them where the user did not say how many and the trace's
    requests can be told apart.
    """
    requests = settings.requests
    if requests is None and all(request.has_own_iterations for request in trace.requests):
        requests = usual_requests
    return Selection(requests, None, settings.split, settings.seed)


def pick(trace: Trace, selection: Selection, num_answer: int | None) -> Schedule:
    """The schedule, with answers of at most so many tokens; for a trace without requests, so many tokens in all. Raises
    ConfigError as make_schedule does.
    """
    schedule = make_schedule(trace, selection)
    if num_answer is None:
        return schedule
    if any(span.request is None for span in schedule.test):
        return replace(schedule, test=first_rows(schedule.test, num_answer))
    return replace(schedule, test=[with_answer(trace, span, num_answer) for span in schedule.test])


def middle_decode_iteration(trace: Trace, schedule: Schedule) -> int | None:
    """The number of the middle decode step of the middle request, counted over the picked requests; None where none
    decodes.
    """
    count, steps = 0, []
    for span in schedule.test:
        is_decode = decode_passes(trace, span)
        of_span = (count + np.flatnonzero(is_decode)).tolist()
        if of_span:
            steps.append(of_span)
        count += len(is_decode)
    if not steps:
        return None
    middle = steps[len(steps) // 2]
    return int(middle[len(middle) // 2])


@dataclass(slots=True)
class Simulated:
    """What was simulated so far: rows of Study.results by (budget, system, P), timelines of one token, failures."""

    rows: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)
    timelines: list[dict[str, Any]] = field(default_factory=list)
    failures: list[RunFailure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, found: Iterable[dict[str, Any]]) -> None:
        for row in found:
            if row["skipped"] is None:
                self.rows[row["memory"], row["system"], row["segments"]] = row
                continue
            failure = RunFailure("simulator", "all", row["system"], row["skipped"], is_skipped=True)
            if failure not in self.failures:
                self.failures.append(failure)

    def failed(self, name: str, memory: str, cause: str) -> None:
        """Note a failure; several budgets that fail for the same reason make one failure."""
        for index, one in enumerate(self.failures):
            if (one.system, one.cause) == (name, cause):
                self.failures[index] = replace(one, memory=f"{one.memory}, {memory}")
                return
        self.failures.append(RunFailure("simulator", memory, name, cause))


def check_budgets(study: Study, settings: ComparisonSettings) -> None:
    """Raises ConfigError (BudgetError) for an impossible budget before anything runs."""
    for label in settings.memories:
        Memory(label).budget(study.geometry, study.layers is not None)


def simulate(
    study: Study,
    settings: ComparisonSettings,
    iteration: int | None,
    into: Simulated,
    keep: Callable[[], None],
    progress: Progress,
) -> None:
    """Simulate every system and bound under every budget; `iteration` is the one with timelines. A system that cannot
    be simulated is left out. `into` holds what was done, whatever this raises; `keep` is called after each budget.
    """
    timelines = TokenTimelines(iteration, settings.timeline_memory)
    study.chrome = None if study.layers is None else timelines
    study.progress = lambda what, done, total: progress(f"simulator, {what}", done, total)
    left = deque(map(Memory, settings.memories))
    try:
        while left:
            try:
                for rows in study.results(settings.systems, [*left], settings.jobs):
                    into.add(rows)
                    left.popleft()
                    keep()
            except ExpertlyError:
                _one_by_one(study, settings.systems, left.popleft(), into)
                keep()
    finally:
        into.timelines = _shown(timelines, into.rows, settings)
        into.notes = list(notes_on(study))


def _one_by_one(study: Study, systems: Sequence[str], memory: Memory, into: Simulated) -> None:
    for name in systems:
        try:
            into.add(*study.results([name], [memory]))
        except ExpertlyError as error:
            into.failed(name, memory.label, str(error))


def _shown(
    timelines: TokenTimelines, rows: Mapping[tuple[str, str, int], dict[str, Any]], settings: ComparisonSettings
) -> list[dict[str, Any]]:
    """The timelines to show: of each system, and of the oracle, with the fewest segments that there are."""
    memory, found = settings.timeline_memory, dict[str, dict[str, Any]]()
    for label, name, segments in sorted(rows, key=lambda key: key[2]):
        is_asked = name in settings.systems or name == "oracle"
        if label == memory and is_asked and name not in found and (timeline := timelines.of(name, segments)):
            found[name] = {"memory": memory, "system": name, "segments": segments} | timeline
    return [found[name] for name in dict.fromkeys((*settings.systems, *BOUNDS)) if name in found]


def notes_on(study: Study) -> Iterator[str]:
    """What a reader must know about simulated numbers."""
    trace = study.trace
    if study.layers is None:
        yield "the trace does not know its experts' sizes: rates only; give --geometry for bytes and times"
        yield "rates of systems that load ahead (oracle, too) are those of a link that takes no time"
    elif study.dense is None and study.hardware.compute is None:
        yield "the weights outside the experts are unknown: their time is only the profile's fixed part"
    if not trace.is_complete:
        yield "the recording was cut off; what there is of it is simulated"
    if "lookahead" in study.wants and trace.is_modelled("lookahead"):
        yield f"lookahead: {trace.manifest.fields['lookahead'].note}"
    if "scores" in study.wants and not trace.has("probs"):
        yield "routing scores: the trace has the chosen experts' weights only; those of the others count as 0"
    if "embedding" in study.wants and not trace.has("embedding"):
        yield "the trace has no embeddings: predictors that search by them do without"
    elif "embedding" in study.wants and not trace.is_real("embedding"):
        yield f"embeddings: {trace.manifest.fields['embedding'].note or 'made up'}"
