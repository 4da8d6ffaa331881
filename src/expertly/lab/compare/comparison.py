"""A comparison from beginning to end: with a model, on the engine and simulated; with a trace, simulated. Also the
folder that holds it: report.html, results.json, command.txt and the recorded trace.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import expertly
from expertly.core.errors import ConfigError
from expertly.core.files import check_replaceable, disk_errors, finite, write_atomic
from expertly.core.geometry import Geometry
from expertly.core.resources import allowed_cpus, cpu_name
from expertly.engine.memory import available_host_nbytes
from expertly.lab.compare.engine import (
    ComparedRuns,
    EngineRuns,
    MachineWorker,
    RunFailure,
    Worker,
    can_be_together,
    load_arguments,
)
from expertly.lab.compare.figures import headline, rows_of
from expertly.lab.compare.settings import ComparisonSettings
from expertly.lab.compare.simulated import (
    Simulated,
    check_budgets,
    middle_decode_iteration,
    pick,
    selection_of,
    simulate,
)
from expertly.lab.playing import recorded_requests
from expertly.lab.prompts import Prompt
from expertly.policies.allocation.moepic import read_plan
from expertly.policies.learned import read_learned
from expertly.scheduler.presets import get_system
from expertly.sim.hardware import Hardware
from expertly.sim.schedule import Schedule, Selection
from expertly.sim.study import Memory, Progress, Study
from expertly.trace.reader import Trace
from expertly.trace.writer import remove_trace

NUM_REQUESTS, NUM_TOKENS = 5, 24
"""Defaults with a model: requests, and new tokens of each."""

NUM_TRACE_REQUESTS = 20
"""Default with a trace whose requests can be told apart."""

TRACE_HARDWARE = "rtx3090"

Tell = Callable[[str], None]


@dataclass(slots=True)
class Comparison:
    """What is known so far. `results` may be asked for at any time, and leaves out what has not run. `keep` is called
    whenever more has been measured.
    """

    settings: ComparisonSettings
    command: str
    source: dict[str, Any]
    runs: ComparedRuns | None = None  # None: the engine does not run
    simulated: Simulated = field(default_factory=Simulated)
    hardware: Hardware | None = None
    measured_on: str = ""
    notes: list[str] = field(default_factory=list)
    failures: list[RunFailure] = field(default_factory=list)  # beside those of systems
    versions: dict[str, str] | None = None
    is_whole: bool = False
    problem: str | None = None  # what ended it before its end
    keep: Callable[[], None] = lambda: None

    @property
    def has_results(self) -> bool:
        """Whether a system has run anything."""
        return any(map(any, self.runs.played.values() if self.runs else ())) or bool(self.simulated.rows)

    def results(self) -> dict[str, Any]:
        """Everything known so far, as plain values."""
        settings = self.settings
        rows = rows_of(settings, self.runs, self.simulated.rows)
        of_runs = [] if self.runs is None else self.runs.failures
        failures = [*of_runs, *self.failures, *self.simulated.failures]
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "command": self.command,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "is_interrupted": not self.is_whole,
            "problem": self.problem,
            "versions": {
                "expertly": expertly.__version__,
                "python": platform.python_version(),
                **(self.versions or {}),
            },
            "machine": {"cpu": cpu_name(), "num_cpus": allowed_cpus(), "load_average": list(os.getloadavg())},
            "settings": settings.as_dict(),
            "source": self.source,
            "hardware": None if self.hardware is None else self.hardware.as_dict(),
            "hardware_from": self.measured_on,
            "headline": headline(rows, self._memories_tried(rows, failures), settings.baseline),
            "rows": rows,
            "failures": [asdict(one) | {"measured": self._num_measured(one)} for one in failures],
            "notes": [*self.notes, *self._notes_on_load(), *self.simulated.notes],
            "engine": None if self.runs is None else self.runs.as_dict(),
            "simulator": list(self.simulated.rows.values()),
            "timelines": self.simulated.timelines,
        }

    def _num_measured(self, failure: RunFailure) -> int | None:
        """Requests that ran before it failed; None for failures outside the engine."""
        if self.runs is None or failure.where != "engine":
            return None
        return sum(map(len, self.runs.played.get((failure.memory, failure.system), [])))

    def _notes_on_load(self) -> list[str]:
        """A note where other processes were computing."""
        load, num = os.getloadavg()[0], allowed_cpus()
        if self.runs is None or load <= num + 1:
            return []
        return [f"{load:.0f} processes were running on {num} CPUs: times wander; ratios are of the same moments"]

    def _memories_tried(self, rows: Sequence[dict[str, Any]], failures: Sequence[RunFailure]) -> list[str]:
        """The budgets that were tried: all of them, unless the comparison was interrupted."""
        tried = {row["memory"] for row in rows} | {one.memory for one in failures}
        return [memory for memory in self.settings.memories if memory in tried or self.is_whole]


def compare_trace(
    comparison: Comparison,
    trace: Trace,
    geometry: tuple[Any, Any, str | None],
    progress: Progress,
) -> None:
    """Simulate a trace. `geometry`: its layers, its dense shape and where they come from. Raises ExpertlyError where
    the settings do not fit the trace.
    """
    settings = comparison.settings
    name = settings.hardware or TRACE_HARDWARE
    comparison.hardware, comparison.measured_on = Hardware.read(name), f"profile {name}"
    selection = selection_of(settings, trace, NUM_TRACE_REQUESTS)
    schedule = pick(trace, selection, settings.tokens)
    kinds = [kind for kind in (get_system(one).weights for one in settings.systems) if kind is not None]
    learned = None if settings.predictor is None else read_learned(settings.predictor, *kinds).learned
    layers, dense, _ = geometry
    study = Study(trace, schedule, comparison.hardware, layers, dense, learned=learned, **_simulated_as(settings))
    check_budgets(study, settings)
    comparison.source |= _about_trace(trace, schedule)
    comparison.notes = _notes(trace, schedule, settings) + _fewer(settings, comparison.source["requests"])
    iteration = middle_decode_iteration(trace, schedule)
    simulate(study, settings, iteration, comparison.simulated, comparison.keep, progress)
    comparison.is_whole = True


def compare_model(
    comparison: Comparison,
    model: str | None,
    prompts: Sequence[Prompt],
    folder: Path,
    progress: Progress,
    tell: Tell,
    loading: Progress,
) -> None:
    """Record the answers to the prompts in `folder`, run them through the engine under every system, and simulate the
    same requests. Where this raises, the comparison holds what was done by then. `loading` is told of bytes that are
    packed and loaded.
    """
    settings = comparison.settings
    arguments = _arguments(settings, model)
    machine = MachineWorker(loading)
    try:
        if settings.total_memories:
            settings = share_out(comparison, machine.worker, arguments)
        tell("recording what the model routes")
        facts, trace, schedule = _record(comparison, machine.worker, arguments, prompts, folder)
        learned = machine.worker.ask("weights", arguments["predictor"], [*settings.systems])
        settings = comparison.settings = replace(settings, codec=facts["codec"])
        arguments["codec"] = facts["codec"]
        hardware = Hardware.read(settings.hardware or "infinite")
        layers, dense = trace.manifest.geometries, trace.manifest.dense
        study = Study(trace, schedule, hardware, layers, dense, learned=learned, **_simulated_as(settings))
        check_budgets(study, settings)
        base_nbytes = machine.worker.ask("peak_nbytes") - facts["memory_bytes"]
        if settings.hardware is None:
            tell("measuring this machine")
            machine.measure(arguments, (settings.timeline_memory, "50%"))
        free_nbytes = available_host_nbytes()

        def fits_together(memory: str) -> bool:
            held = [_kept_nbytes(study, memory, name) for name in settings.systems]
            return can_be_together([base_nbytes + nbytes for nbytes in held], free_nbytes, facts["device"])

        lesson = None if settings.split is None else (str(folder), Selection(split=settings.split, seed=settings.seed))
        requests = recorded_requests(trace, schedule)

        def between() -> None:
            machine.measure_again()
            comparison.keep()

        engine = EngineRuns(settings, arguments, requests, lesson, between, progress, tell, loading)
        comparison.runs = engine.runs
        engine.run(fits_together)
        tell("simulating")
        study = replace(study, hardware=_hardware(comparison, machine, hardware))
        if comparison.hardware is not None:
            iteration = middle_decode_iteration(trace, schedule)
            simulate(study, settings, iteration, comparison.simulated, comparison.keep, progress)
        comparison.is_whole = True
    finally:
        machine.worker.end()


def _arguments(settings: ComparisonSettings, model: str | None) -> dict[str, Any]:
    """The arguments of `expertly.load` that all systems and budgets share."""
    return {
        "model": model,
        "segments": settings.segments,
        "dtype": settings.dtype,
        "device": settings.device,
        "codec": settings.codec,
        "predictor": "auto" if settings.predictor is None else str(settings.predictor),
        "plan": None if settings.plan is None else str(settings.plan),
    }


def share_out(comparison: Comparison, machine: Worker, arguments: dict[str, Any]) -> ComparisonSettings:
    """The settings with the memory that each `total_memory` leaves for experts, divided as `expertly run` does."""
    memories = []
    for total in comparison.settings.total_memories:
        loading = load_arguments(arguments | {"segments": None}, "auto", "lru") | {"total_memory": total}
        facts = machine.ask("load", loading)
        left = facts["memory_bytes"]
        if left >= facts["expert_bytes"]:
            memories.append("100%")
        else:
            memories.append(f"{left >> 20}MiB" if left >= 100 << 20 else f"{left >> 10}KiB")
        comparison.notes.append(f"total memory {total} leaves {memories[-1]} for experts")
    settings = comparison.settings = replace(comparison.settings, memories=tuple(dict.fromkeys(memories)))
    return settings


def _record(
    comparison: Comparison, machine: Worker, arguments: dict[str, Any], prompts: Sequence[Prompt], folder: Path
) -> tuple[dict[str, Any], Trace, Schedule]:
    """Facts of the loaded model, the trace of its answers, and the requests that are compared."""
    settings = comparison.settings
    num_tokens = settings.tokens or NUM_TOKENS
    facts = machine.ask("load", load_arguments(arguments | {"segments": None}, settings.timeline_memory, "lru"))
    wanted = list(prompts)[: settings.requests or NUM_REQUESTS]
    asked = machine.ask("tokens", wanted, num_tokens, settings.is_raw)
    if not asked:
        raise ConfigError(
            f"prompts: none of {len(wanted)} can be given to this model with {num_tokens} tokens of answer"
        )
    how = {
        "temperature": settings.temperature,
        "seed": settings.seed,
        "name": comparison.source["name"],
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": comparison.command,
    }
    absent = machine.ask("record", str(folder), asked, num_tokens, how)
    trace = Trace.open(folder)
    schedule = pick(trace, Selection(split=settings.split, seed=settings.seed, num_requests=len(asked)), None)
    comparison.versions = facts["versions"]
    comparison.source |= _about_trace(trace, schedule)
    comparison.source |= {key: facts[key] for key in ("dtype", "device", "codec", "threads")}
    comparison.notes += [f"the trace has no {what}" for what in absent] + _notes(trace, schedule, settings)
    comparison.notes += _fewer(settings, len(wanted))
    if facts["is_templated"] and not settings.is_raw:
        comparison.notes.append("prompts are put through the model's chat template")
    if len(asked) < len(wanted):
        comparison.notes.append(f"{len(wanted) - len(asked)} prompts were left out: the model cannot take them")
    return facts, trace, schedule


def _hardware(comparison: Comparison, machine: MachineWorker, given: Hardware) -> Hardware:
    """The machine to simulate: the profile `given`, or this machine as measured. Notes it in the comparison, where it
    is known.
    """
    settings = comparison.settings
    if settings.hardware is not None:
        comparison.hardware, comparison.measured_on = given, f"profile {settings.hardware}"
        return given
    measured = machine.hardware(comparison.source["device"])
    if measured is None:
        why = f"this machine's speeds could not be measured ({machine.problem})"
        comparison.notes.append(f"no simulation: {why}; --hardware NAME simulates another")
        return given
    assert machine.memory is not None
    when = "beside the engine's runs" if machine.problem is None else "before the engine ran"
    if machine.problem is not None:
        comparison.failures.append(RunFailure("measuring it again", machine.memory, "this machine", machine.problem))
    comparison.hardware = measured
    comparison.measured_on = f"this machine, as measured {when} ({machine.memory} of the experts)"
    return measured


def _simulated_as(settings: ComparisonSettings) -> dict[str, Any]:
    """The arguments of Study that the settings say."""
    plan = None if settings.plan is None else read_plan(settings.plan)
    return {"segments": settings.segments, "seed": settings.seed, "plan": plan, "codec": settings.codec}


def _kept_nbytes(study: Study, memory: str, name: str) -> int:
    """Bytes of experts that a system keeps."""
    assert study.layers is not None
    geometry = Geometry(study.layers, 1)
    return geometry.nbytes if get_system(name).keeps_everything else Memory(memory).budget(geometry).memory_nbytes


def _about_trace(trace: Trace, schedule: Schedule) -> dict[str, Any]:
    layers = trace.manifest.layers
    sizes = [layer.geometry() for layer in layers]
    return {
        "model": trace.manifest.model,
        "layers": len(layers),
        "experts": layers[0].num_experts,
        "top_k": layers[0].top_k,
        "expert_bytes": sum(one.nbytes for one in sizes if one is not None) or None,
        "requests": len({span.request for span in schedule.test}),
        "training_requests": len({span.request for span in schedule.training}),
        "tokens": sum(span.num_rows for span in schedule.test),
    }


def _notes(trace: Trace, schedule: Schedule, settings: ComparisonSettings) -> list[str]:
    num, of_all = len({span.request for span in schedule.test}), len(trace.requests)
    notes = []
    if settings.split is None:
        notes.append("caches start empty, and nothing has been learned")
    else:
        learned = len({span.request for span in schedule.training})
        notes.append(f"what learns has learned from {learned} requests, {num} others are compared; caches start empty")
    if settings.split is None and num < of_all and schedule.test[0].request is not None:
        notes.append(f"the first {num} of {of_all} requests of the trace")
    missing = [name for name in settings.systems if get_system(name).takes_weights and settings.predictor is None]
    if missing:
        notes.append(f"{', '.join(missing)}: weights that are saved beside the store or ship with the demo model")
    return notes


def _fewer(settings: ComparisonSettings, num: int) -> list[str]:
    """A note where there are fewer requests than were asked for."""
    is_short = settings.requests is not None and num < settings.requests
    return [f"{settings.requests} requests were asked for, {num} are there"] if is_short else []


# -- the folder ------------------------------------------------------------------------------------------------------


FORMAT = "expertly-compare"
FORMAT_VERSION = 1

REPORT, RESULTS, COMMAND, TRACE = "report.html", "results.json", "command.txt", "trace"


def prepare(folder: Path, command: str, force: bool = False) -> None:
    """Make the folder, or empty it of an earlier comparison; one with results is only replaced with `force`. Marks the
    folder as a comparison under way, so that an interrupted one can be replaced.

    Raises ConfigError where the folder holds anything else, or cannot be written.
    """
    with disk_errors(folder, "writing the comparison", ConfigError, "--out DIR"):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"out={str(folder)!r}: not a folder")
        if folder.is_dir() and any(folder.iterdir()):
            if not _holds_comparison(folder):
                raise ConfigError(
                    f"out={str(folder)!r}: not empty, and no earlier comparison; accepted: a new or an empty folder"
                )
            if not force and any((folder / name).exists() for name in (REPORT, RESULTS)):
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
        write_atomic(folder / COMMAND, (results["command"] + "\n").encode())
        text = json.dumps(finite(results), ensure_ascii=False, indent=1, allow_nan=False)
        write_atomic(folder / RESULTS, (text + "\n").encode("utf-8", "replace"))
        write_atomic(folder / REPORT, page.encode("utf-8", "replace"))


def _holds_comparison(folder: Path) -> bool:
    """Whether the folder holds nothing but what a comparison leaves."""
    names = {path.name for path in folder.iterdir()}
    known = {REPORT, RESULTS, COMMAND, TRACE}
    return COMMAND in names and all(name in known or name.startswith(".") for name in names)
