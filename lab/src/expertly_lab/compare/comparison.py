"""Systems on the engine and the same requests simulated; and the folder that holds the report."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import expertly
from expertly.core.errors import ConfigError, ExpertlyError
from expertly.core.files import check_replaceable, disk_errors, finite, write_atomic
from expertly.core.resources import allowed_cpus, cpu_name, parse_memory
from expertly.policies.learned import LearnedState
from expertly.scheduler.systems import BASE_SYSTEM, get_system, runnable_systems
from expertly_lab.baselines.systems import BOUNDS
from expertly_lab.compare.figures import headline, rows_of
from expertly_lab.sim.hardware import Hardware
from expertly_lab.sim.schedule import Selection, make_schedule
from expertly_lab.sim.study import Memory, Study
from expertly_lab.trace.reader import Trace
from expertly_lab.trace.writer import remove_trace

if TYPE_CHECKING:
    from expertly.bench import BenchRow
    from expertly.model.prompts import AskedPrompt, Prompt

USUAL_SYSTEMS = "lru,lfu,lcp,moepic,adapmoe,expertly,expertly-ahead"

MEASURING_S = 20.0
"""How long this machine is measured with the model."""


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """What is compared, and how often."""

    systems: tuple[str, ...]  # BASE_SYSTEM, which others are compared with, is one of them
    memories: tuple[str, ...]  # for experts
    tokens: int = 24  # of each answer
    rounds: int = 2
    dtype: str | None = None
    device: str | None = None
    hardware: str | None = None  # None: this machine as it is measured
    jobs: int | None = None  # simulations at once; None: as many as there are processors
    is_raw: bool = False  # prompts are texts, whatever chat template the model has


def check_systems(names: Sequence[str]) -> tuple[str, ...]:
    """The systems' full names, each once, with BASE_SYSTEM.

    Raises ConfigError for a system that does not exist, or a bound, which knows future demands and cannot run.
    """
    systems = []
    for name in names:
        system = get_system(name)
        if "future" in system.needs:
            raise ConfigError(
                f"system={name!r}: needs to know the demands to come; bounds ({', '.join(BOUNDS)}) are always shown "
                f"beside the others, accepted: {', '.join(runnable_systems())}"
            )
        systems.append(system.name)
    return tuple(dict.fromkeys(systems if BASE_SYSTEM in systems else [BASE_SYSTEM, *systems]))


def check_memories(labels: Sequence[str]) -> tuple[str, ...]:
    """The shares or amounts as they were given, each once. Raises ConfigError."""
    for label in labels:
        if parse_memory(label, 1 << 40) is None:
            raise ConfigError(f'memory={label!r}: budgets are compared; accepted: shares ("25%") or amounts ("1.5GiB")')
    return tuple(dict.fromkeys(labels))


@dataclass(frozen=True, slots=True)
class RunFailure:
    """A system that failed, where, and why."""

    where: str  # "engine" or "simulator"
    memory: str
    system: str
    cause: str
    is_skipped: bool = False  # there is nothing that it could run on: it was not tried


@dataclass(slots=True)
class Comparison:
    """What is known so far. `keep` is called whenever more has been measured."""

    settings: ComparisonSettings
    command: str
    source: dict[str, Any]  # the model's name; later also its shape and what it answered
    runs: list[BenchRow] = field(default_factory=list)
    simulated: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)
    """Rows of Study.results, by budget, system and P."""
    not_simulated: list[RunFailure] = field(default_factory=list)
    hardware: Hardware | None = None
    measured_on: str = ""
    notes: list[str] = field(default_factory=list)
    is_whole: bool = False
    problem: str | None = None  # what ended it before its end
    keep: Callable[[], None] = lambda: None

    def results(self) -> dict[str, Any]:
        """Everything known so far, as plain values."""
        settings = self.settings
        rows = rows_of(settings.systems, settings.memories, self.runs, self.simulated)
        failures = [
            *(RunFailure("engine", run.memory, run.system, run.reason) for run in self.runs if run.reason is not None),
            *self.not_simulated,
        ]
        tried = {run.memory for run in self.runs}
        load, num_cpus = os.getloadavg(), allowed_cpus()
        notes = list(self.notes)
        if load[0] > num_cpus + 1:
            said = "times wander; ratios are of the same rounds"
            notes.append(f"{load[0]:.0f} processes were running on {num_cpus} CPUs: {said}")
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "command": self.command,
            "created": _now(),
            "is_interrupted": not self.is_whole,
            "problem": self.problem,
            "versions": {"expertly": expertly.__version__, "python": platform.python_version()},
            "machine": {"cpu": cpu_name(), "num_cpus": num_cpus, "load_average": list(load)},
            "settings": asdict(settings),
            "source": self.source,
            "hardware": None if self.hardware is None else self.hardware.as_dict(),
            "hardware_from": self.measured_on,
            "headline": headline(rows, [memory for memory in settings.memories if memory in tried]),
            "rows": rows,
            "failures": [asdict(failure) for failure in failures],
            "notes": notes,
            "engine": [asdict(run) for run in self.runs],
            "simulator": list(self.simulated.values()),
        }

    def run(self, model: str | None, prompts: Sequence[Prompt], folder: Path, progress: Any) -> None:
        """Record the answers to the prompts in `folder`, let the engine answer them under every system (`expertly
        bench`), and simulate the same requests. Where this raises, `results` has what was done by then. `progress`: a
        ProgressBar.
        """
        from expertly.bench import Bench, BenchSettings

        settings = self.settings
        load = {"dtype": settings.dtype, "device": settings.device}
        how = BenchSettings(model, load, settings.systems, settings.tokens, settings.rounds, settings.is_raw)
        bench = Bench(how, progress, progress.in_bytes)
        budgets, asked, left_out = bench.prepare([{"memory": memory} for memory in settings.memories], prompts)
        self.notes += left_out
        progress.say("recording what the model routes, and measuring this machine")
        trace, learned = self._record(model, load, asked, folder, progress)
        for budget in budgets:
            progress.say(f"running the engine: {budget.memory} of memory")
            self.runs += bench.run(budget, asked, len(budgets))
            self.keep()
        if self.hardware is not None:
            progress.say("simulating")
            self._simulate(trace, self.hardware, learned, progress)
        self.is_whole = True

    def _record(
        self, model: str | None, load: dict[str, Any], asked: Sequence[AskedPrompt], folder: Path, progress: Any
    ) -> tuple[Trace, LearnedState | None]:
        """The trace of the answers, and trained weights of systems that have any; measures this machine on the way."""
        from expertly.api import handle
        from expertly.engine.weights import find_weights
        from expertly.model.playing import answer
        from expertly_lab.model_profile import measure_model
        from expertly_lab.recording import record

        settings = self.settings
        memory = settings.memories[len(settings.memories) // 2]
        how = load | {"memory": memory, "system": BASE_SYSTEM}
        loaded, _ = expertly.load(model, progress=progress.in_bytes, **how)
        try:
            name = self.source["name"]
            with record(loaded, folder, full=True, name=name, created=_now(), command=self.command) as recording:
                for request in asked:
                    recording.begin_request(request.prompt.category, request.prompt.text, len(request.tokens))
                    answer(loaded, request.tokens, settings.tokens)
            self.notes += [f"the trace has no {field}: {reason}" for field, reason in recording.absent.items()]
            store = handle(loaded).store
            self.source |= {"dtype": store.manifest.stored_as, "device": str(loaded.device)}
            taking = [system for system in map(get_system, settings.systems) if system.weights is not None]
            learned = find_weights("auto", taking[0], store) if taking else None
            try:
                if settings.hardware is None:
                    self.hardware = measure_model(loaded, MEASURING_S)
                    self.measured_on = f"this machine, as measured before the engine ran ({memory} of the experts)"
                else:
                    self.hardware = Hardware.read(settings.hardware)
                    self.measured_on = f"profile {settings.hardware}"
            except ExpertlyError as error:
                reason = f"this machine's speeds could not be measured ({error})"
                self.notes.append(f"no simulation: {reason}; --hardware NAME simulates another")
        finally:
            expertly.unload(loaded)
        return Trace.open(folder), learned

    def _simulate(self, trace: Trace, hardware: Hardware, learned: LearnedState | None, progress: Any) -> None:
        """Simulate every system and bound under every budget. A system that cannot be simulated is left out."""
        settings, layers = self.settings, trace.manifest.layers
        study = Study(
            trace,
            make_schedule(trace, Selection(num_requests=len(trace.requests))),
            hardware,
            trace.manifest.geometries,
            trace.manifest.dense,
            learned=learned,
            progress=lambda label, done, total: progress(f"simulator, {label}", done, total),
        )
        self.source |= {
            "layers": len(layers),
            "experts": layers[0].num_experts,
            "top_k": layers[0].top_k,
            "expert_bytes": study.geometry.nbytes,
            "requests": len(trace.requests),
            "tokens": trace.num_rows,
        }
        self.notes.append("caches start empty, and nothing has been learned")
        for memory in map(Memory, settings.memories):
            try:
                self._add(*study.results(settings.systems, [memory], settings.jobs))
            except ExpertlyError:  # of one of them: which?
                for name in settings.systems:
                    try:
                        self._add(*study.results([name], [memory]))
                    except ExpertlyError as error:
                        self.not_simulated.append(RunFailure("simulator", memory.label, name, str(error)))
            self.keep()
        self.notes += study.notes()

    def _add(self, rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            if row["skipped"] is None:
                self.simulated[row["memory"], row["system"], row["segments"]] = row
            else:
                failure = RunFailure("simulator", row["memory"], row["system"], row["skipped"], is_skipped=True)
                self.not_simulated.append(failure)


# -- the folder ------------------------------------------------------------------------------------------------------


FORMAT = "expertly-compare"
FORMAT_VERSION = 2

REPORT, RESULTS, COMMAND, TRACE = "report.html", "results.json", "command.txt", "trace"


def prepare(folder: Path, command: str, force: bool = False) -> None:
    """Make the folder, or empty it of an earlier comparison; one with results is only replaced with `force`. Marks the
    folder as a comparison under way, so that an interrupted one can be replaced.

    Raises ConfigError where the folder holds anything else, or cannot be written.
    """
    with disk_errors(folder, "writing the comparison", ConfigError, "--out DIR"):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"out={str(folder)!r}: not a folder")
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        if names:
            known = {REPORT, RESULTS, COMMAND, TRACE}
            if COMMAND not in names or not all(name in known or name.startswith(".") for name in names):
                raise ConfigError(
                    f"out={str(folder)!r}: not empty, and no earlier comparison; accepted: a new or an empty folder"
                )
            if not force and names & {REPORT, RESULTS}:
                raise ConfigError(f"out={str(folder)!r}: holds an earlier comparison; --force replaces it")
            for name in (REPORT, RESULTS, COMMAND):
                check_replaceable(folder / name)
                (folder / name).unlink(missing_ok=True)
            remove_trace(folder / TRACE)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / COMMAND, (command + "\n").encode())


def write_all(folder: Path, results: Mapping[str, Any], page: str) -> None:
    """Write the files, each whole or not at all. Raises ConfigError where that fails."""
    with disk_errors(folder, "writing the comparison", ConfigError, "--out DIR"):
        text = json.dumps(finite(results), ensure_ascii=False, indent=1, allow_nan=False)
        write_atomic(folder / RESULTS, (text + "\n").encode("utf-8", "replace"))
        write_atomic(folder / REPORT, page.encode("utf-8", "replace"))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
