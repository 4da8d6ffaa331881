"""The same requests through the simulator, with the bounds beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from expertly.core.errors import ExpertlyError
from expertly.lab.compare.engine import RunFailure
from expertly.lab.compare.settings import ComparisonSettings
from expertly.sim.schedule import Schedule, Selection, first_rows, make_schedule, with_answer
from expertly.sim.study import Memory, Progress, Study
from expertly.trace.reader import Trace


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


@dataclass(slots=True)
class Simulated:
    """What was simulated so far: rows of Study.results by (budget, system, P), and failures."""

    rows: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)
    failures: list[RunFailure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, found: Iterable[dict[str, Any]]) -> None:
        """Add rows as they come, so that an exception loses none."""
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
    into: Simulated,
    keep: Callable[[], None],
    progress: Progress | None = None,
) -> None:
    """Simulate every system and bound under every budget. A system that cannot be simulated is left out. `into` holds
    what was done, whatever this raises; `keep` is called after each budget.
    """
    if progress is not None:
        study.progress = lambda what, done, total: progress(f"simulator, {what}", done, total)
    try:
        for memory in map(Memory, settings.memories):
            try:
                into.add(study.results(settings.systems, [memory]))
            except ExpertlyError:
                _one_by_one(study, settings.systems, memory, into)
            keep()
    finally:
        into.notes = list(notes_on(study))


def _one_by_one(study: Study, systems: Sequence[str], memory: Memory, into: Simulated) -> None:
    for name in systems:
        try:
            into.add(study.results([name], [memory]))
        except ExpertlyError as error:
            into.failed(name, memory.label, str(error))


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
