"""`expertly lab simulate`: simulate systems over a trace on a described machine, beside the best possible."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertly.arguments import names, seed, split, split_text
from expertly.cli.inputs import plan_for, predictor_for, trace_geometry
from expertly.cli.output import Column, budgets_table, figures_table, message, printable, progress_bar, show
from expertly.core.errors import ConfigError
from expertly.core.units import format_nbytes, format_number, format_rate, format_ratio, format_seconds, format_share
from expertly.lab.compare.simulated import notes_on
from expertly.options import (
    ADVANCED,
    REQUIRED,
    RESEARCH,
    argument,
    jobs_option,
    json_flag,
    load_option,
    option,
    path_option,
)
from expertly.policies.learned import LearnedFile, LearnedState
from expertly.scheduler.presets import get_system
from expertly.sim.hardware import Hardware
from expertly.sim.schedule import Selection, make_schedule, read_arrivals
from expertly.sim.study import PREDICTING, Memory, Study
from expertly.trace.reader import Trace

DEFAULT_MEMORY = "10%,25%,50%"


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    trace: Path = argument(
        REQUIRED, "a folder made by `expertly lab trace record`, `import` or `synth`", metavar="TRACE", type=Path
    )
    system: str = option(
        "lru", "systems to simulate, see `expertly lab systems`; NAME:KEY=VALUE changes a part of one", metavar="A,B"
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
    codec: str = option(
        "none", "experts on disk: none (as they are) or planes (compressed)", metavar="NAME", panel=ADVANCED
    )
    predictor: Path | None = path_option(
        None, "trained weights for systems with a learned predictor, from `expertly lab train`", panel=RESEARCH
    )
    plan: Path | None = path_option(
        None, "a plan for systems with split caching, from `expertly lab configure`", panel=RESEARCH
    )
    predict: str = option(
        "virtual",
        "virtual (predictions take their time) or inline (they take none)",
        metavar="NAME",
        choices=PREDICTING,
        was="matcher",
        panel=RESEARCH,
    )
    segments: int | None = load_option("segments")
    order: str | None = load_option("order")
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
    from expertly.lab.chrome import chrome_trace
    from expertly.lab.plots import check_plot

    systems, memories = names("system", args.system), _memories(args)
    if args.requests is not None and args.tokens is not None:
        raise ConfigError(f"requests={args.requests}, tokens={args.tokens}: both limit the same; give one of them")
    if args.plot is not None:
        check_plot(args.plot)
    selection = Selection(args.requests, args.tokens, args.split, args.seed)
    hardware = Hardware.read(args.hardware)
    trace = Trace.open(args.trace)
    predictor = predictor_for(systems, args.predictor)
    plan = plan_for(systems, args.plan)
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
            order=args.order,
            predicting=args.predict,
            learned=None if predictor is None else predictor.learned,
            plan=plan,
            chrome=chrome,
            progress=progress,
            codec=args.codec,
        )
        results = [row for rows in study.results(systems, memories, args.jobs) for row in rows]
    facts = about(args, study, systems, geometry_name, predictor)
    if args.plot is not None:
        from expertly.lab.drawings import plot_simulation

        plot_simulation(facts, results, args.plot)
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
    files = {"predictor": args.predictor, "plan": args.plan, "arrivals": args.arrivals}
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
        "codec": study.codec,
        "order": args.order,
        "matcher": args.predict,
        "seed": args.seed,
        "split": split_text(args.split),
        **{name: None if path is None else str(path) for name, path in files.items()},
        "notes": [
            *_notes(args, study),
            *_notes_on_predicting(study, systems),
            *_notes_on_codec(study),
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
        what = f"profiles learned from {num} requests, {num_test} others are simulated; caches start empty"
        yield f"split {split_text(args.split)} with seed {args.seed}: {what}"
    yield from notes_on(study)
    if args.arrivals is not None:
        yield f"{num_test} requests arrive and queue, one is served at a time"
    if schedule.num_cut:
        yield f"{schedule.num_cut} of them are shorter than their arrivals say: the trace holds no more of them"


def _notes_on_codec(study: Study) -> Iterator[str]:
    costs, hardware = study.codec_costs, study.hardware
    if costs is not None:
        source = f"assumed: {hardware.name} has no [codec]" if hardware.codec is None else f"{hardware.name}'s [codec]"
        yield (
            f"codec {study.codec}: experts take {costs.ratio:.2f} of their size on disk, {costs.threads} threads "
            f"decode {format_rate(costs.all_nbytes_per_s)} of weights ({source})"
        )


def _notes_on_weights(
    args: SimulateOptions, study: Study, predictor: LearnedFile[LearnedState] | None
) -> Iterator[str]:
    """What a trained predictor learned from, and whether that includes what is simulated."""
    if predictor is None:
        return
    told = predictor.header.about
    yield f"predictor: {printable(told.get('model', '?'))}, learned from {printable(told.get('source', '?'))}"
    own = (split_text(args.split), args.seed)
    if told.get("trace") == study.trace.fingerprint and own != (told.get("split"), told.get("seed")):
        yield (
            "predictor: it learned from some of the requests that are simulated; accepted as a measurement: "
            f"--split {printable(told.get('split'))} --seed {printable(told.get('seed'))}"
        )


def _notes_on_predicting(study: Study, systems: Sequence[str]) -> Iterator[str]:
    asked = [get_system(name) for name in systems]
    if any(system.prediction == "modelled" for system in asked):
        yield "modelled-lookahead: its predictions are made from the future, with a stated accuracy"
    if study.layers is not None and any(system.prediction != "none" for system in asked):
        if study.predicting == "inline":
            yield "predicting takes no time"
        elif not all("future" in system.needs or system.prediction == "none" for system in asked):
            yield f"predicting takes the time of {study.hardware.name}'s [predictor], beside the device"


# -- for people --------------------------------------------------------------------------------------------------------

_RESULT: dict[str, Column] = {
    "hit rate": ("hit_rate", format_share),
    "partial": ("partial_hit_rate", format_share),
    "stall": ("stall_share", format_share),
    "TTFT": ("ttft_s", format_seconds),
    "TPOT": ("tpot_s", format_seconds),
    "of floor": ("of_floor", format_ratio),
    "loaded": ("bytes_loaded", format_nbytes),
    "read": ("bytes_read", format_nbytes),
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
_BY_DISTANCE: dict[str, Column] = {  # ACCURACY x FETCHRATE = GOODPRED of ProMoE, section 4
    "layers ahead": ("distance", str),
    "right": ("accuracy_by_distance", format_share),
    "there in time": ("fetch_rate_by_distance", format_share),
    "goodpred": ("goodpred_by_distance", format_share),
}
_MATCHING: dict[str, Column] = {  # what came too late, and whether similar maps were right (fMoE, figure 8)
    "prefetching": ("prefetching", str),
    "late": ("predictions_late", str),
    "dropped": ("contexts_dropped", str),
    "r semantic": ("similarity_correlation_semantic", format_number),
    "r trajectory": ("similarity_correlation_trajectory", format_number),
}


def report(facts: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """A headline, tables with a row for each system and budget, notes."""
    trace, cuts = facts["trace"], sorted({row["segments"] for row in results})
    size = "sizes unknown" if trace["expert_bytes"] is None else f"{format_nbytes(trace['expert_bytes'])} of experts"
    where = "" if trace["expert_bytes"] is None else f", on {facts['hardware']['name']}"
    parts = [
        f"{trace['model']}: {trace['layers']} layers of {trace['experts']} experts, top-{trace['top_k']}, {size}; "
        f"P = {', '.join(map(str, cuts))}{where}"
    ]
    rows = [row | _derived(row) for row in results]
    if max(cuts) == 1:
        rows = [row | {"partial_hit_rate": None} for row in rows]
    several: dict[str, Column] = {"P": ("segments", str)} if len(cuts) > 1 else {}
    parts.append(budgets_table(rows, several | _known(rows, _RESULT)))
    predicting = [row for row in rows if _predicts(row) and row["skipped"] is None]
    if predicting:
        parts.append(budgets_table(predicting, several | _PREDICTING))
    by_distance = [
        row | {key: row[key][k] for key, _ in list(_BY_DISTANCE.values())[1:]} | {"distance": k}
        for row in predicting
        if len(row["goodpred_by_distance"] or ()) > 1
        for k in row["accuracy_by_distance"]
    ]
    if by_distance:
        parts.append(figures_table(by_distance, {"memory": ("memory", str), "system": ("system", str)} | _BY_DISTANCE))
    matching = [row for row in predicting if _known([row], _MATCHING, 0)]
    if matching:
        parts.append(budgets_table(matching, several | _known(matching, _MATCHING, 0)))
    skipped = list(dict.fromkeys(row["skipped"] for row in results if row["skipped"]))
    return "\n\n".join([*parts, "\n".join([*facts["notes"], *skipped])])


def _derived(row: Mapping[str, Any]) -> dict[str, Any]:
    floor_s, tpot_s, latency = row["floor_tpot_s"], row["tpot_s"], row["latency_s"] or {}
    return {
        "of_floor": tpot_s / floor_s if floor_s and tpot_s is not None else None,
        "p50": latency.get("p50"),
        "p99": latency.get("p99"),
        "prefetching": None if row["gate"] is None else row["gate"]["state"],
    }


def _predicts(row: Mapping[str, Any]) -> bool:
    """Whether its predictions can be wrong: not those of the oracle."""
    return get_system(row["system"]).prediction not in ("none", "perfect")


def _known(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Column], nothing: float | None = None
) -> dict[str, Column]:
    """The columns in which at least one row has a figure that is known and is not `nothing`."""
    return {
        header: (key, write)
        for header, (key, write) in columns.items()
        if any(row[key] not in (None, nothing) for row in rows)
    }
