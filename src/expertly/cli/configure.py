"""`expertly lab configure`: make MoEpic's plan: how many experts each layer keeps, and how much of each.

From a model, which is run and measured here, or from a trace.
"""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from expertly.arguments import names, proper_share, seconds, seed, split, split_text
from expertly.cli.inputs import check_writable, is_trace, trace_geometry
from expertly.cli.output import Column, cells, origin, progress_bar, reserved_stdout, show, table
from expertly.core.errors import ConfigError
from expertly.core.geometry import DenseShape, Geometry, LayerGeometry, fitting_segments
from expertly.core.units import format_nbytes, format_seconds, format_share
from expertly.lab.prompts import RAW_HELP, tokens_of
from expertly.lab.routing_rates import RoutingRates, rates_of_trace
from expertly.options import ADVANCED, RESEARCH, argument, check_one_memory, json_flag, load_option, option, path_option
from expertly.policies.allocation.moepic import Configuration, Timing, configure, save_plan
from expertly.scheduler.budget import Budget
from expertly.scheduler.presets import get_system
from expertly.sim.compute import Measured, compute_model, step_times
from expertly.sim.hardware import Hardware
from expertly.sim.schedule import Selection, first_rows, make_schedule
from expertly.sim.study import Memory
from expertly.trace.reader import Trace

SYSTEM = "moepic"
DEFAULT_MEMORY = "25%"
DEFAULT_HARDWARE = "rtx3090"
DEFAULT_TOKENS = 256
DEFAULT_SECONDS = 10.0
PROMPTS = (
    "Once upon a time there was a small village at the foot of a mountain.",
    "def fibonacci(n):\n    ",
    "The three most important causes of the war were",
    "Q: A train leaves at 9:40 and arrives at 11:05. How long does it take?\nA:",
)


@dataclass(frozen=True, kw_only=True)
class ConfigureOptions:
    source: str | None = argument(
        None,
        "a model (a folder, a packed store or a hub id; default: the demo model), which is run "
        "and measured here; or a trace, best one of `expertly lab trace record --full`",
        metavar="MODEL|TRACE",
    )
    memory: str | None = option(
        None,
        f"for experts, as `run` takes it; a model runs with the first of several (default: {DEFAULT_MEMORY})",
        metavar="SIZE,SIZE",
    )
    total_memory: str | None = load_option("total_memory")
    hardware: str | None = option(None, "take times from a profile instead of measuring", metavar="NAME")
    tokens: int | None = option(None, "how many tokens to learn from", least=1)
    prompt: list[str] | None = option(
        None, "a prompt for the model; may be given several times", metavar="TEXT", is_several=True
    )
    raw: bool = option(False, RAW_HELP)
    out: Path | None = path_option(None, "a file for the plan, which --plan reads")
    segments: int | None = load_option("segments")
    zeta: Any = option(
        0.01,
        "the share of memory that the configurator moves at a time",
        metavar="X",
        type=proper_share,
        panel=RESEARCH,
    )
    geometry: str | None = option(
        None, "the sizes of experts: a shipped description or a TOML file", metavar="NAME", panel=ADVANCED
    )
    split: Any | None = option(
        None,
        "learn only from the first part of the requests, as `simulate --split` divides them",
        metavar="7:3",
        type=split,
        panel=ADVANCED,
    )
    seed: Any | None = option(None, "of the split's shuffle", metavar="N", type=seed, panel=ADVANCED)
    seconds: Any | None = option(None, "how long to measure", metavar="S", type=seconds, panel=ADVANCED)
    dtype: str | None = load_option("dtype")
    device: str | None = load_option("device")
    json: bool = json_flag()


def run(args: ConfigureOptions) -> int:
    check_one_memory(args.memory, args.total_memory)
    memories = ["auto"] if args.total_memory is not None else names("memory", args.memory or DEFAULT_MEMORY)
    of_trace = is_trace(args.source)
    _check(args, memories, of_trace)
    with reserved_stdout() as stdout:
        seen = (observed_in if of_trace else observed_of)(args, memories)
        results, plans = [], []
        for label, budget in seen.budgets.items():
            start = time.perf_counter()
            found = configure(seen.geometry, budget.kept_slots, seen.rates.layers, seen.timing, args.zeta)
            plans.append(found)
            results.append(_result(args, seen, label, budget, found) | {"seconds": time.perf_counter() - start})
        result = _about(args, seen) | {"results": results}
        if args.out is not None:
            exposed = {"exposed_ms_uniform": "uniform_exposed_s", "exposed_ms": "exposed_s"}
            about = {name: round(1e3 * results[0][key], 6) for name, key in exposed.items()}
            about |= {"model": seen.model, "memory": results[0]["memory"], "times": seen.times, **origin()}
            save_plan(args.out, plans[0].plan, about)
        show(result, args.json, lambda: report(result), stdout)
    return 0


def _check(args: ConfigureOptions, memories: Sequence[str], of_trace: bool) -> None:
    """Raises ConfigError for options that have no effect here, or a file that could not be written in the end."""
    if len(memories) > 1 and args.out is not None:
        raise ConfigError(f"out={str(args.out)!r}: holds the plan of one memory, not of {args.memory}; give one")
    check_writable(args.out)
    of_model = ("total_memory", "prompt", "raw", "seconds", "dtype", "device")
    for name in of_model if of_trace else ("geometry", "split", "seed"):
        if getattr(args, name) not in (None, False):
            what = "a model, and this is a trace" if of_trace else "a trace, and this is a model"
            raise ConfigError(f"{name}={getattr(args, name)!r}: only of {what}: {args.source or 'demo'}")
    if args.seed is not None and args.split is None:
        raise ConfigError(f"seed={args.seed}: shuffles for --split, which is not given")
    if args.seconds is not None and args.hardware is not None:
        raise ConfigError(
            f"seconds={args.seconds:g}: nothing is measured, times are those of hardware={args.hardware!r}"
        )


# -- what it goes by: which experts are needed and predicted, what times things take, and budgets ----------------------


@dataclass(frozen=True, slots=True)
class ConfiguratorInput:
    """What the configurator needs: routing, times and budgets."""

    model: str
    geometry: Geometry
    rates: RoutingRates
    timing: Timing
    times: str  # where they come from, in words
    budgets: dict[str, Budget]  # by what was asked for
    notes: list[str]


def segments_of(layers: Sequence[LayerGeometry], asked: int | None) -> int:
    """P: what the user asked for, else the system's own."""
    return fitting_segments(layers, get_system(SYSTEM).segments) if asked is None else asked


def observed_in(args: ConfigureOptions, memories: Sequence[str]) -> ConfiguratorInput:
    """The configurator's input from a trace. Raises ConfigError, TraceError or HardwareError naming what is wrong or
    missing.
    """
    trace = Trace.open(Path(str(args.source)))
    hardware = Hardware.read(args.hardware or DEFAULT_HARDWARE)
    layers, dense, _ = trace_geometry(trace, args.geometry)
    if layers is None:
        raise ConfigError(f"geometry: {trace.folder} does not know its experts' sizes; give --geometry NAME")
    geometry = Geometry(layers, segments_of(layers, args.segments))
    budgets = {label: Memory(label).budget(geometry) for label in memories}
    timing, times, notes = times_by(hardware, geometry, dense)
    schedule = make_schedule(trace, Selection(split=args.split, seed=args.seed or 0))
    spans = first_rows(schedule.training or schedule.test, args.tokens)
    with progress_bar("rows") as progress:
        rates = rates_of_trace(trace, spans, partial(progress, "learning"))
    if not trace.is_complete:
        notes.append("the recording was cut off; what there is of it counts")
    if trace.is_modelled("lookahead"):
        notes.append(f"lookahead: {trace.manifest.fields['lookahead'].note}")
    elif not trace.is_real("lookahead"):
        reason = "the trace has no lookahead (`expertly lab trace record --full` records it)"
        notes.append(f"{reason}: nothing counts as predicted, so that keeping is worth all and splitting little")
    return ConfiguratorInput(trace.manifest.model, geometry, rates, timing, times, budgets, notes)


def times_by(hardware: Hardware, geometry: Geometry, dense: DenseShape | None) -> tuple[Timing, str, list[str]]:
    """A hardware profile's times, where they come from in words, and notes for the reader."""
    notes = []
    if dense is None and hardware.compute is None:
        notes.append("the weights outside the experts are unknown: their time is only the profile's fixed part")
    if hardware.host_memory_nbytes is not None and hardware.host_memory_nbytes < geometry.nbytes:
        notes.append(f"not all experts fit {hardware.name}'s host memory; loads are counted as if they did")
    timing = step_times(geometry, hardware.link, compute_model(hardware, geometry, dense))
    return timing, f"profile {hardware.name}", notes


def observed_of(args: ConfigureOptions, memories: Sequence[str]) -> ConfiguratorInput:
    """The configurator's input from a model that is loaded, run and measured. Raises what those raise."""
    from expertly import api

    hardware = None if args.hardware is None else Hardware.read(args.hardware)
    if "auto" in memories and len(memories) > 1:
        raise ConfigError(f"memory={args.memory!r}: 'auto' is what is free here; accepted: it alone, or sizes")
    segments = get_system(SYSTEM).segments
    with progress_bar() as progress:
        model, tokenizer = api.load(
            args.source,
            memory=memories[0],
            total_memory=args.total_memory,
            system=f"lru:segments={segments}",  # whole experts stay, by which computing is measured
            segments=args.segments,
            dtype=args.dtype,
            device=args.device,
            progress=progress,
        )
    try:
        if tokenizer is None:
            raise ConfigError(
                f"model={args.source!r}: has no tokenizer, so prompts have no tokens; configure by a trace"
            )
        engine = api.handle(model).engine
        budget, geometry = engine.scheduler.budget, engine.executor.geometry
        budgets = {label: budget if label == "auto" else Memory(label).budget(geometry) for label in memories}
        memory = f"memory {memories[0]}"
        if args.total_memory is not None:  # what it left for experts is what the plan is made for
            budgets, memory = {str(budget.memory_nbytes): budget}, f"total memory {args.total_memory}"
        with tempfile.TemporaryDirectory(prefix="expertly-configure-") as folder:
            trace, absent = _recorded(model, tokenizer, args, Path(folder) / "trace")
            rates = rates_of_trace(trace, make_schedule(trace, Selection()).test)
            dense = trace.manifest.dense
        notes = [f"no {name} is known: {reason}" for name, reason in absent.items() if name == "lookahead"]
        if hardware is not None:
            timing, times, more = times_by(hardware, geometry, dense)
            notes += more
        else:
            timing = _measured(model, args)
            times = f"measured here, on {model.device}, with {memory}"
    finally:
        api.unload(model)
    return ConfiguratorInput(args.source or "demo", geometry, rates, timing, times, budgets, notes)


def _recorded(model: Any, tokenizer: Any, args: ConfigureOptions, folder: Path) -> tuple[Trace, dict[str, str]]:
    """A trace of the model answering the prompts greedily, and the fields that could not be recorded, with reasons."""
    from expertly.lab.recording import record
    from expertly.model.generation import generate, generation_config, max_positions

    prompts = args.prompt or PROMPTS
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # bytes of the command line that are no UTF-8 came through
            raise ConfigError(f"prompt={prompt!a:.80}: must be UTF-8 ({error.reason})") from None
    num_tokens = -(-(args.tokens or DEFAULT_TOKENS) // len(prompts))
    limit = None if model.config.is_encoder_decoder else max_positions(model)
    with progress_bar("prompts") as progress, record(model, folder, full=True) as recording:
        for number, prompt in enumerate(prompts):
            progress("running", number, len(prompts))
            tokens = tokens_of(tokenizer, [{"role": "user", "content": prompt}], is_raw=args.raw)
            num_prompt = len(tokens)
            room = num_tokens if limit is None else min(num_tokens, limit - num_prompt)
            if not num_prompt or room < 1:
                accepted = "write at least one word" if not num_prompt else f"must be fewer than {limit}"
                raise ConfigError(f"prompt={prompt!r:.80}: gives {num_prompt} tokens; {accepted}")
            recording.begin_request(None, prompt, num_prompt)
            # One more than is to be learned from: the last one is not fed.
            generate(model, tokens, generation_config(model, room + 1))
    return Trace.open(folder), recording.absent


def _measured(model: Any, args: ConfigureOptions) -> Timing:
    """Times of decode steps of one token on this machine."""
    from expertly import api
    from expertly.lab.model_profile import measure_model

    seconds = DEFAULT_SECONDS if args.seconds is None else args.seconds
    geometry = api.handle(model).engine.executor.geometry
    try:
        profile = measure_model(model, seconds, tokens=(1,))
    except ConfigError as error:
        raise ConfigError(f"{error} (as --memory 25%), or name a profile of this machine (--hardware)") from None
    return step_times(geometry, profile.link, Measured(profile.compute, geometry.segments_per_expert))


# -- what was found ----------------------------------------------------------------------------------------------------


def _about(args: ConfigureOptions, seen: ConfiguratorInput) -> dict[str, Any]:
    timing, rates = asdict(seen.timing), seen.rates
    return {
        "model": seen.model,
        "source": args.source,
        "is_trace": is_trace(args.source),
        "segments": seen.geometry.segments_per_expert,
        "expert_bytes": seen.geometry.nbytes,
        "zeta": args.zeta,
        "requests": rates.num_requests,
        "tokens": rates.num_tokens,
        "predicted_share": rates.predicted_share,
        "split": split_text(args.split),
        "times": seen.times,
        "timing": {key.replace("_ns", "_s"): _in_s(value) for key, value in timing.items() if key != "top_k"},
        "rates": [
            {"hits": one.hits.tolist(), "accuracy": one.accuracy[:top_k].tolist()}
            for one, top_k in zip(rates.layers, seen.timing.top_k, strict=True)
        ],
        "notes": seen.notes,
        "out": None if args.out is None else str(args.out),
    }


def _in_s(value: Any) -> Any:
    return value / 1e9 if isinstance(value, int) else [one / 1e9 for one in value]


def _result(
    args: ConfigureOptions, seen: ConfiguratorInput, memory: str, budget: Budget, found: Configuration
) -> dict[str, Any]:
    """One budget's plan. `uniform_exposed_s` is that of the first plan (every layer's theta 0.5),
    `equal_budgets_exposed_s` that of the best theta of each layer with equal budgets.
    """
    geometry, num_segments = seen.geometry, seen.geometry.segments_per_expert
    layers = []
    for number, (of_layer, outcome) in enumerate(zip(found.plan.layers, found.outcomes, strict=True)):
        rates, top_k = seen.rates.layers[number], seen.timing.top_k[number]
        layers.append(
            {
                "layer": number,
                "experts": rates.num_experts,
                "top_k": top_k,
                "budget_segments": of_layer.budget_segments,
                "budget_experts": of_layer.budget_segments / num_segments,
                "kept_experts": of_layer.kept_experts,
                "kept_segments": of_layer.kept_segments,
                "theta": of_layer.kept_segments / num_segments,
                "hit_rate": float(rates.hits[of_layer.kept_experts]),
                "predicted_rate": float(rates.accuracy[:top_k].sum()) / top_k,
                "window_s": outcome.window_ns / 1e9,
                "loaded_experts": outcome.loaded,
                "uniform_exposed_s": found.start_exposed_ns[number] / 1e9,
                "equal_budgets_exposed_s": found.uniform_exposed_ns[number] / 1e9,
                "exposed_s": outcome.exposed_ns / 1e9,
            }
        )
    return {
        "memory": memory,
        "memory_bytes": budget.kept_nbytes(geometry) + budget.staging_nbytes(geometry),
        "ring_segments": list(budget.staging_slots),
        "kept_segments": list(budget.kept_slots),
        "kept_experts": sum(budget.kept_slots) / num_segments,
        "free_segments": list(found.plan.free_segments),
        "uniform_exposed_s": sum(found.start_exposed_ns) / 1e9,
        "equal_budgets_exposed_s": sum(found.uniform_exposed_ns) / 1e9,
        "exposed_s": sum(one.exposed_ns for one in found.outcomes) / 1e9,
        "moves": found.num_moves,
        "layers": layers,
        "command": _command(args, seen, memory),
    }


def _command(args: ConfigureOptions, seen: ConfiguratorInput, memory: str) -> str:
    source, num_segments = args.source or "demo", seen.geometry.segments_per_expert
    given: dict[str, Any] = {"system": SYSTEM, "memory": memory, "plan": args.out or "FILE"}
    if num_segments != segments_of(seen.geometry.layers, None):
        given["segments"] = num_segments
    if is_trace(args.source):
        words = ["expertly", "lab", "simulate", source]
        given |= {"hardware": args.hardware, "geometry": args.geometry, "seed": args.seed}
        given |= {"split": split_text(args.split)}
    else:
        words = ["expertly", "run", source, "Once upon a time"]
        given |= {"dtype": args.dtype, "device": args.device}
    for name, value in given.items():
        words += [] if value is None else [f"--{name}", str(value)]
    return shlex.join(words)


# -- for people --------------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    """A row for each layer, what the plan is expected to gain, and how to use it."""
    head = (
        f"{result['model']}: {format_nbytes(result['expert_bytes'])} of experts in {len(result['rates'])} layers, "
        f"P = {result['segments']}\n"
        f"learned from {result['tokens']} decoded tokens of {result['requests']} requests\n"
        f"times: {result['times']}"
    )
    parts = [head, *(_of_memory(result, one) for one in result["results"])]
    return "\n\n".join([*parts, "\n".join(result["notes"])] if result["notes"] else parts)


def _of_memory(result: dict[str, Any], found: dict[str, Any]) -> str:
    before, after = found["uniform_exposed_s"], found["exposed_s"]
    gain = f" ({format_share(1 - after / before)} less)" if before else ""
    lines = [
        f"memory {found['memory']} = {format_nbytes(found['memory_bytes'])}, {found['kept_experts']:.4g} experts kept",
        _layer_table(found),
        f"exposed a token, predicted: {format_seconds(before)} uniform -> {format_seconds(after)} configured{gain}",
        f"({format_seconds(found['equal_budgets_exposed_s'])} with equal budgets, each layer's best theta; found in "
        f"{format_seconds(found['seconds'])}, {found['moves']} moves)",
        f"{'use it' if result['out'] is not None else 'save it with --out FILE, use it with'}: {found['command']}",
    ]
    return "\n".join(lines)


_LAYER: dict[str, Column] = {  # V, C, theta, H(C), the mean of P(1..K), T_wind, m, and what is expected to be exposed
    "layer": ("layer", str),
    "budget": ("budget_experts", "{:.4g}".format),
    "keeps": ("kept_experts", str),
    "theta": ("theta", "{:g}".format),
    "hits": ("hit_rate", format_share),
    "right": ("predicted_rate", format_share),
    "window": ("window_s", format_seconds),
    "m": ("loaded_experts", "{:.2f}".format),
    "uniform": ("uniform_exposed_s", format_seconds),
    "configured": ("exposed_s", format_seconds),
}


def _layer_table(found: dict[str, Any]) -> str:
    budget = sum(one["budget_experts"] for one in found["layers"])
    exposed = (format_seconds(found[key]) for key in ("uniform_exposed_s", "exposed_s"))
    sums = ("all", f"{budget:.4g}", *[""] * 6, *exposed)
    return table(list(_LAYER), [*(cells(one, _LAYER.values()) for one in found["layers"]), sums])
