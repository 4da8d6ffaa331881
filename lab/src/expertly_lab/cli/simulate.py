"""`expertly lab simulate`: simulate systems over a trace on a described machine, beside the best possible."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertly.cli.output import Column, budgets_table, message, progress_bar, show
from expertly.core.errors import ConfigError
from expertly.core.units import format_nbytes, format_ratio, format_seconds, format_share
from expertly.options import (
    ADVANCED,
    REQUIRED,
    RESEARCH,
    argument,
    jobs_option,
    json_flag,
    names,
    option,
    path_option,
    seed,
)
from expertly.policies.learned import LearnedFile, LearnedState
from expertly.scheduler.systems import get_system
from expertly_lab.baselines.systems import BOUNDS
from expertly_lab.cli.arguments import split, split_text
from expertly_lab.cli.inputs import predictor_for, trace_geometry
from expertly_lab.cli.output import printable
from expertly_lab.sim.hardware import Hardware
from expertly_lab.sim.schedule import Selection, make_schedule, read_arrivals
from expertly_lab.sim.study import Memory, Study
from expertly_lab.trace.reader import Trace

DEFAULT_MEMORY = "10%,25%,50%"


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    trace: Path = argument(
        REQUIRED, "a folder made by `expertly lab trace record`, `import` or `synth`", metavar="TRACE", type=Path
    )
    system: str = option(
        "lru", "systems to simulate, see `expertly systems`; NAME:KEY=VALUE changes a part of one", metavar="A,B"
    )
    memory: str | None = option(
        None, "for experts: shares of them or amounts (default: 10%,25%,50%)", metavar="SIZE,SIZE"
    )
    experts_per_layer: str | None = option(
        None,
        "instead of memory: how many experts every layer keeps, beside the staging slots",
        metavar="N,N",
        panel=ADVANCED,
    )
    hardware: str = option("rtx3090", "the machine: a shipped profile or a TOML file", metavar="NAME")
    host_memory: str | None = option(
        None,
        "RAM behind an accelerator, filled from disk (default: it holds all experts)",
        metavar="SIZE",
        panel=ADVANCED,
    )
    predictor: Path | None = path_option(
        None, "trained weights for systems with a learned predictor, from `expertly lab train`", panel=RESEARCH
    )
    segments: int | None = option(
        None, "P, the number of segments an expert is cut into (default: the system's)", metavar="P", least=1
    )
    geometry: str | None = option(None, "the sizes of experts: a shipped description or a TOML file", metavar="NAME")
    requests: int | None = option(None, "simulate at most so many requests", least=1)
    tokens: int | None = option(None, "simulate at most so many tokens", least=1)
    split: Any | None = option(
        None,
        "systems that learn do so from the first part of the shuffled requests; the second is simulated",
        metavar="7:3",
        type=split,
    )
    seed: Any = option(0, "of the shuffle and of random policies", metavar="N", type=seed, panel=ADVANCED)
    arrivals: Path | None = path_option(
        None, "a CSV of arrival times and lengths: requests queue, and latencies are reported", panel=RESEARCH
    )
    plot: Path | None = path_option(None, "draw hit rate, TPOT and stalls against memory (PNG, PDF, SVG)")
    chrome_trace: Path | None = path_option(
        None, "write a timeline for chrome://tracing or ui.perfetto.dev", panel=ADVANCED
    )
    jobs: int | None = jobs_option("systems")
    json: bool = json_flag()


def run(args: SimulateOptions) -> int:
    from expertly_lab.chrome import chrome_trace
    from expertly_lab.plots import check_plot

    systems, memories = names("system", args.system), _memories(args)
    if args.requests is not None and args.tokens is not None:
        raise ConfigError(f"requests={args.requests}, tokens={args.tokens}: both limit the same; give one of them")
    if args.plot is not None:
        check_plot(args.plot)
    selection = Selection(args.requests, args.tokens, args.split, args.seed)
    hardware = Hardware.read(args.hardware)
    trace = Trace.open(args.trace)
    predictor = predictor_for(systems, args.predictor)
    layers, dense, geometry_name = trace_geometry(trace, args.geometry)
    arrivals = None if args.arrivals is None else read_arrivals(args.arrivals)
    schedule = make_schedule(trace, selection, arrivals)
    timeline = contextlib.nullcontext() if args.chrome_trace is None else chrome_trace(args.chrome_trace)
    with timeline as chrome, progress_bar("rows") as progress:
        study = Study(
            trace,
            schedule,
            hardware,
            layers,
            dense,
            segments=args.segments,
            seed=args.seed,
            is_queued=arrivals is not None,
            host_memory=args.host_memory,
            learned=None if predictor is None else predictor.learned,
            chrome=chrome,
            progress=progress,
        )
        results = [row for rows in study.results(systems, memories, args.jobs) for row in rows]
    facts = about(args, study, systems, geometry_name, predictor)
    if args.plot is not None:
        plot(facts, results, args.plot)
        message(f"plot written to {args.plot}")
    if args.chrome_trace is not None:
        message(f"timeline written to {args.chrome_trace}")
    show({**facts, "results": results}, args.json, lambda: report(facts, results))
    return 0


def _memories(args: SimulateOptions) -> list[Memory]:
    if args.experts_per_layer is None:
        return [Memory(label) for label in names("memory", DEFAULT_MEMORY if args.memory is None else args.memory)]
    if args.memory is not None:
        raise ConfigError(
            f"experts_per_layer={args.experts_per_layer}: stands instead of memory={args.memory}; give one"
        )
    memories = []
    for text in names("experts_per_layer", args.experts_per_layer):
        if not (text.isascii() and text.isdecimal()):
            raise ConfigError(f"experts_per_layer={text!r}: must be a whole number from 0")
        memories.append(Memory(f"{int(text)}/layer", int(text)))
    return memories


# -- what was simulated and assumed ------------------------------------------------------------------------------------


def about(
    args: SimulateOptions,
    study: Study,
    systems: Sequence[str],
    geometry_name: str | None,
    predictor: LearnedFile[LearnedState] | None,
) -> dict[str, Any]:
    """The result without its rows: what was simulated, and on what."""
    manifest = study.trace.manifest
    files = {"predictor": args.predictor, "arrivals": args.arrivals}
    return {
        "trace": {
            "path": str(args.trace),
            "model": manifest.model,
            "layers": len(manifest.layers),
            "experts": manifest.layers[0].num_experts,
            "top_k": manifest.layers[0].top_k,
            "geometry": geometry_name,
            "expert_bytes": None if study.layers is None else study.geometry.nbytes,
            "complete": study.trace.is_complete,
        },
        "hardware": study.hardware.as_dict(),
        "seed": args.seed,
        "split": split_text(args.split),
        **{name: None if path is None else str(path) for name, path in files.items()},
        "notes": [
            *_notes(args, study),
            *_notes_on_predicting(study, systems),
            *_notes_on_weights(args, study, predictor),
        ],
    }


def _notes(args: SimulateOptions, study: Study) -> Iterator[str]:
    schedule = study.schedule
    num_test = len({span.request for span in schedule.test})
    if args.split is None:
        yield "caches and profiles start empty"
    else:
        num = len({span.request for span in schedule.training})
        said = f"profiles learned from {num} requests, {num_test} others are simulated; caches start empty"
        yield f"split {split_text(args.split)} with seed {args.seed}: {said}"
    yield from study.notes()
    if args.host_memory is not None:
        yield f"host memory of {args.host_memory} lies between disk and device"
    if args.arrivals is not None:
        yield f"{num_test} requests arrive and queue, one is served at a time"
    if schedule.num_cut:
        yield f"{schedule.num_cut} of them are shorter than their arrivals say: the trace holds no more of them"


def _notes_on_weights(
    args: SimulateOptions, study: Study, predictor: LearnedFile[LearnedState] | None
) -> Iterator[str]:
    """What a trained predictor learned from, and whether that includes what is simulated."""
    if predictor is None:
        return
    about = predictor.about
    yield f"predictor: {printable(about.get('model', '?'))}, learned from {printable(about.get('source', '?'))}"
    parted = (split_text(args.split), args.seed)
    if about.get("trace") == study.trace.fingerprint and parted != (about.get("split"), about.get("seed")):
        yield (
            "predictor: it learned from some of the requests that are simulated; accepted as a measurement: "
            f"--split {printable(about.get('split'))} --seed {printable(about.get('seed'))}"
        )


def _notes_on_predicting(study: Study, systems: Sequence[str]) -> Iterator[str]:
    asked = [get_system(name) for name in systems]
    if any(system.prediction == "modelled" for system in asked):
        yield "modelled-lookahead: its predictions are made from the future, with a stated accuracy"
    if study.layers is not None and any(system.prediction != "none" for system in asked):
        yield "predicting takes no time"


_DRAWN = {
    "hit_rate": ("hit rate in decode (%)", 100.0),
    "tpot_s": ("time per output token (ms)", 1000.0),
    "ttft_s": ("time to first token (s)", 1.0),
    "stall_share": ("time stalled (%)", 100.0),
}


def plot(facts: dict[str, Any], results: Sequence[dict[str, Any]], path: Path) -> None:
    """Each system's figures over the budgets, beside the best possible. Panels without any figure are left out."""
    from expertly_lab.plots import draw_panels, marks_of, save

    cuts = sorted({row["segments"] for row in results})
    label = "{system}, P = {segments}" if len(cuts) > 1 else "{system}"
    panels = {}
    for key, (title, scale) in _DRAWN.items():
        lines: dict[str, dict[str, float]] = {}
        for row in results:
            if row[key] is not None:
                lines.setdefault(label.format(**row), {})[row["memory"]] = scale * row[key]
        if lines:
            panels[title] = lines
    labels = {
        is_bound: [label.format(**row) for row in results if (row["system"] in BOUNDS) == is_bound]
        for is_bound in (False, True)
    }
    marks = marks_of(*(list(dict.fromkeys(names)) for names in labels.values()))
    trace = facts["trace"]
    machine = "" if trace["expert_bytes"] is None else f" on {facts['hardware']['name']}"
    title = f"{trace['model']}{machine}, P = {', '.join(map(str, cuts))} (simulated)"
    save(draw_panels(panels, marks, title), path)


# -- for people --------------------------------------------------------------------------------------------------------

_RESULT: dict[str, Column] = {
    "hit rate": ("hit_rate", format_share),
    "partial": ("partial_hit_rate", format_share),
    "stall": ("stall_share", format_share),
    "TTFT": ("ttft_s", format_seconds),
    "TPOT": ("tpot_s", format_seconds),
    "of floor": ("of_floor", format_ratio),
    "loaded": ("bytes_loaded", format_nbytes),
    "from disk": ("disk_bytes", format_nbytes),
    "latency p50": ("p50", format_seconds),
    "p99": ("p99", format_seconds),
}
_PREDICTING: dict[str, Column] = {
    "predictions right": ("prediction_accuracy", format_share),
    "of needed": ("recall", format_share),
    "there in time": ("fetch_rate", format_share),
    "coverage": ("coverage", format_share),
    "accuracy": ("accuracy", format_share),
    "in time": ("timeliness", format_share),
    "goodpred": ("goodpred", format_share),
}


def report(facts: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """A headline, tables with a row for each system and budget, notes."""
    trace, cuts = facts["trace"], sorted({row["segments"] for row in results})
    size = "sizes unknown" if trace["expert_bytes"] is None else f"{format_nbytes(trace['expert_bytes'])} of experts"
    machine = "" if trace["expert_bytes"] is None else f", on {facts['hardware']['name']}"
    parts = [
        f"{trace['model']}: {trace['layers']} layers of {trace['experts']} experts, top-{trace['top_k']}, {size}; "
        f"P = {', '.join(map(str, cuts))}{machine}"
    ]
    rows = [row | _derived(row) for row in results]
    if max(cuts) == 1:
        rows = [row | {"partial_hit_rate": None} for row in rows]
    several: dict[str, Column] = {"P": ("segments", str)} if len(cuts) > 1 else {}
    parts.append(budgets_table(rows, several | _known(rows, _RESULT)))
    cannot_be_wrong = ("none", "perfect")
    ran = [row for row in rows if row["skipped"] is None]
    predicting = [row for row in ran if get_system(row["system"]).prediction not in cannot_be_wrong]
    if predicting:
        parts.append(budgets_table(predicting, several | _PREDICTING))
    skipped = list(dict.fromkeys(row["skipped"] for row in results if row["skipped"]))
    return "\n\n".join([*parts, "\n".join([*facts["notes"], *skipped])])


def _derived(row: Mapping[str, Any]) -> dict[str, Any]:
    floor_s, tpot_s, latency = row["floor_tpot_s"], row["tpot_s"], row["latency_s"] or {}
    return {
        "of_floor": tpot_s / floor_s if floor_s and tpot_s is not None else None,
        "p50": latency.get("p50"),
        "p99": latency.get("p99"),
    }


def _known(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Column]) -> dict[str, Column]:
    """The columns in which at least one row has a figure."""
    return {
        header: (key, write) for header, (key, write) in columns.items() if any(row[key] is not None for row in rows)
    }
