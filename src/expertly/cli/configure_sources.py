"""What `expertly lab configure` goes by: which experts are needed and predicted, what times things take, and budgets:
of a trace, or of a model, which answers a few prompts and is measured where it runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.configure import SYSTEM
from expertly.cli.inputs import trace_geometry
from expertly.cli.output import progress_bar
from expertly.core.errors import ConfigError
from expertly.core.geometry import DenseShape, Geometry, LayerGeometry, fitting_segments
from expertly.lab.routing_rates import RoutingRates, rates_of_trace
from expertly.policies.allocation.moepic import Timing
from expertly.scheduler.budget import Budget
from expertly.scheduler.presets import get_system
from expertly.sim.compute import Measured, compute_model, step_times
from expertly.sim.hardware import Hardware
from expertly.sim.schedule import Selection, first_rows, make_schedule
from expertly.sim.study import Memory
from expertly.trace.reader import Trace

if TYPE_CHECKING:
    from expertly.cli.configure import ConfigureOptions

DEFAULT_HARDWARE = "rtx3090"
DEFAULT_TOKENS = 256
DEFAULT_SECONDS = 10.0
PROMPTS = (
    "Once upon a time there was a small village at the foot of a mountain.",
    "def fibonacci(n):\n    ",
    "The three most important causes of the war were",
    "Q: A train leaves at 9:40 and arrives at 11:05. How long does it take?\nA:",
)


@dataclass(frozen=True, slots=True)
class ConfiguratorInput:
    """Everything that the configurator needs."""

    model: str
    geometry: Geometry
    rates: RoutingRates
    timing: Timing
    times: str  # where they come from, in words
    budgets: dict[str, Budget]  # by what was asked for
    notes: list[str]


def segments_of(layers: Sequence[LayerGeometry], asked: int | None) -> int:
    """P: what was asked for, or the system's own."""
    return fitting_segments(layers, get_system(SYSTEM).segments) if asked is None else asked


def observed_in(args: ConfigureOptions, memories: Sequence[str]) -> ConfiguratorInput:
    """In a trace. Raises ConfigError, TraceError or HardwareError naming what is wrong or missing."""
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
    with progress_bar(unit="row") as progress:
        tell = None if progress is None else partial(progress, "learning")
        rates = rates_of_trace(trace, spans, tell)
    if not trace.is_complete:
        notes.append("the recording was cut off; what there is of it counts")
    if trace.is_modelled("lookahead"):
        notes.append(f"lookahead: {trace.manifest.fields['lookahead'].note}")
    elif not trace.is_real("lookahead"):
        reason = "the trace has no lookahead (`expertly lab trace record --full` records it)"
        notes.append(f"{reason}: nothing counts as predicted, so that keeping is worth all and splitting little")
    return ConfiguratorInput(trace.manifest.model, geometry, rates, timing, times, budgets, notes)


def times_by(hardware: Hardware, geometry: Geometry, dense: DenseShape | None) -> tuple[Timing, str, list[str]]:
    """A profile's times, whose they are, and what one must know of them."""
    notes = []
    if dense is None and hardware.compute is None:
        notes.append("the weights outside the experts are unknown: their time is only the profile's fixed part")
    if hardware.host_memory_nbytes is not None and hardware.host_memory_nbytes < geometry.nbytes:
        notes.append(f"not all experts fit {hardware.name}'s host memory; loads are counted as if they did")
    timing = step_times(geometry, hardware.link, compute_model(hardware, geometry, dense))
    return timing, f"profile {hardware.name}", notes


def observed_of(args: ConfigureOptions, memories: Sequence[str]) -> ConfiguratorInput:
    """Raises what loading, recording and measuring a model raises."""
    from expertly import api

    hardware = None if args.hardware is None else Hardware.read(args.hardware)
    if "auto" in memories and len(memories) > 1:
        raise ConfigError(f"memory={args.memory!r}: 'auto' is what is free here; accepted: it alone, or sizes")
    segments = get_system(SYSTEM).segments
    with progress_bar() as progress:
        model, tokenizer = api.load(
            args.source,
            memory=memories[0],
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
            times = f"measured here, on {model.device}, with memory {memories[0]}"
    finally:
        api.unload(model)
    return ConfiguratorInput(args.source or "demo", geometry, rates, timing, times, budgets, notes)


def _recorded(model: Any, tokenizer: Any, args: ConfigureOptions, folder: Path) -> tuple[Trace, dict[str, str]]:
    """Its routing, greedily answering the prompts in turn; and what could not be recorded, with reasons."""
    from expertly.lab.recording import record
    from expertly.model.generation import generate, generation_config, max_positions

    prompts = args.prompt or list(PROMPTS)
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # bytes of the command line that are no UTF-8 came through
            raise ConfigError(f"prompt={prompt!a:.80}: must be UTF-8 ({error.reason})") from None
    num_tokens = -(-(args.tokens or DEFAULT_TOKENS) // len(prompts))
    limit = None if model.config.is_encoder_decoder else max_positions(model)
    with progress_bar("prompts") as progress, record(model, folder, full=True) as recording:
        for number, prompt in enumerate(prompts):
            if progress is not None:
                progress("running", number, len(prompts))
            tokens = tokenizer(prompt)["input_ids"]
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
    """Of steps of one token."""
    from expertly import api
    from expertly.lab.model_profile import measure_model

    seconds = DEFAULT_SECONDS if args.seconds is None else args.seconds
    geometry = api.handle(model).engine.executor.geometry
    try:
        profile = measure_model(model, seconds, tokens=(1,))
    except ConfigError as error:
        raise ConfigError(f"{error} (as --memory 25%), or name a profile of this machine (--hardware)") from None
    return step_times(geometry, profile.link, Measured(profile.compute, geometry.segments_per_expert))
