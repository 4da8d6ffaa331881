"""The same requests through the simulator, with the bounds beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from expertly.core.errors import ExpertlyError
from expertly.core.geometry import DenseShape, LayerGeometry
from expertly.lab.compare.engine_runs import RunFailure
from expertly.lab.compare.settings import BOUNDS, ComparisonSettings
from expertly.lab.compare.timeline import TokenTimelines
from expertly.policies.allocation.moepic import SplitPlan
from expertly.policies.predictor.learned import LearnedWeights
from expertly.sim.hardware import Hardware
from expertly.sim.schedule import Schedule
from expertly.sim.study import Memory, Study
from expertly.trace.reader import Trace

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Simulated:
    """What there is so far: rows of Study.results by (budget, system, P), in the end what each system did during one
    token; what failed.
    """

    rows: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)
    timelines: list[dict[str, Any]] = field(default_factory=list)
    failures: list[RunFailure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, found: Iterable[dict[str, Any]]) -> None:
        """As they come, whatever raises then."""
        for row in found:
            if row["skipped"] is None:
                self.rows[row["memory"], row["system"], row["segments"]] = row
                continue
            failure = RunFailure("simulator", "all", row["system"], row["skipped"], is_skipped=True)
            if failure not in self.failures:
                self.failures.append(failure)

    def failed(self, name: str, memory: str, cause: str) -> None:
        """What fails with one cause under several budgets is one failure."""
        for index, one in enumerate(self.failures):
            if (one.system, one.cause) == (name, cause):
                self.failures[index] = replace(one, memory=f"{one.memory}, {memory}")
                return
        self.failures.append(RunFailure("simulator", memory, name, cause))


@dataclass(frozen=True, slots=True)
class Ground:
    """What all runs share: the requests, and where they run. `layers` is None where experts have no known size."""

    trace: Trace
    schedule: Schedule
    hardware: Hardware
    layers: tuple[LayerGeometry, ...] | None
    dense: DenseShape | None
    learned: LearnedWeights | None = None
    plan: SplitPlan | None = None


def check_budgets(ground: Ground, settings: ComparisonSettings) -> None:
    """Raises ConfigError (BudgetError) for a budget or a system that cannot be, before anything runs."""
    study = _study(ground, settings, None, None)
    for label in settings.memories:
        Memory(label).budget(study.geometry, ground.layers is not None)


def simulate(
    ground: Ground,
    settings: ComparisonSettings,
    iteration: int | None,
    into: Simulated,
    keep: Callable[[], None],
    progress: Progress | None = None,
) -> None:
    """Every system under every budget; `iteration` is the one that is shown in detail. Where a system cannot be
    simulated the others are, each with the bounds of its own. `into` has all that was done, whatever this raises;
    `keep` is called after each budget.
    """
    timelines = TokenTimelines(iteration if ground.layers is not None else None, settings.timeline_memory)
    study = _study(ground, settings, timelines, progress)
    try:
        for memory in map(Memory, settings.memories):
            try:
                into.add(study.results(settings.systems, [memory]))
            except ExpertlyError:
                _one_by_one(study, settings.systems, memory, into)
            keep()
    finally:
        into.timelines = _shown(timelines, into.rows, settings)
        into.notes = _notes(ground, study)


def _one_by_one(study: Study, systems: Sequence[str], memory: Memory, into: Simulated) -> None:
    for name in systems:
        try:
            into.add(study.results([name], [memory]))
        except ExpertlyError as error:
            into.failed(name, memory.label, str(error))


def _study(
    ground: Ground, settings: ComparisonSettings, timelines: TokenTimelines | None, progress: Progress | None
) -> Study:
    tell = None if progress is None else lambda what, done, total: progress(f"simulator, {what}", done, total)
    return Study(
        ground.trace,
        ground.schedule,
        ground.hardware,
        ground.layers,
        ground.dense,
        segments=settings.segments,
        seed=settings.seed,
        learned=ground.learned,
        plan=ground.plan,
        chrome=timelines if ground.layers is not None else None,
        progress=tell,
        codec=settings.codec,
    )


def _shown(
    timelines: TokenTimelines, rows: Mapping[tuple[str, str, int], dict[str, Any]], settings: ComparisonSettings
) -> list[dict[str, Any]]:
    """Of each system, and of the best possible with whole experts or the fewest parts."""
    memory = settings.timeline_memory
    found, is_shown = [], set[str]()
    for label, name, segments in sorted(rows, key=lambda key: (key[1] in BOUNDS, key[2])):
        if (
            label != memory
            or name in is_shown
            or (name in BOUNDS and name != "oracle" and name not in settings.systems)
        ):
            continue
        timeline = timelines.of(name, segments)
        if timeline is not None:
            is_shown.add(name)
            found.append({"memory": memory, "system": name, "segments": segments} | timeline)
    order = [*settings.systems, *BOUNDS]
    return sorted(found, key=lambda one: order.index(one["system"]))


def _notes(ground: Ground, study: Study) -> list[str]:
    """What one must know to read simulated numbers."""
    trace, notes = ground.trace, []
    if ground.layers is None:
        notes.append("the trace does not know its experts' sizes: rates only; give --geometry for bytes and times")
    elif ground.dense is None and ground.hardware.compute is None:
        notes.append("the weights outside the experts are unknown: their time is only the profile's fixed part")
    if not trace.is_complete:
        notes.append("the recording was cut off; what there is of it is simulated")
    if "lookahead" in study.wants and trace.is_modelled("lookahead"):
        notes.append(f"lookahead: {trace.manifest.fields['lookahead'].note}")
    if "scores" in study.wants and not trace.has("probs"):
        notes.append("routing scores: the trace has the chosen experts' weights only; those of the others count as 0")
    if "embedding" in study.wants and not trace.is_real("embedding"):
        note = trace.manifest.fields["embedding"].note if trace.has("embedding") else "the trace has none"
        notes.append(f"embeddings: {note}")
    return notes
