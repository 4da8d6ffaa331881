"""A model for `expertly lab configure`: it answers a few prompts, recorded, and its times are measured where it
runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly import api
from expertly.cli.configure import DEFAULT_MEMORY, DEFAULT_SECONDS, DEFAULT_TOKENS, SYSTEM
from expertly.cli.configure_sources import ConfiguratorInput, times_by
from expertly.cli.output import progress_bar
from expertly.core.errors import ConfigError
from expertly.lab.model_profile import measure_model
from expertly.lab.recording import record
from expertly.lab.routing_rates import rates_of_trace
from expertly.model.generation import generate, generation_config, max_positions
from expertly.policies.allocation.moepic import Timing
from expertly.scheduler.presets import get_system
from expertly.sim.compute import Measured, step_times
from expertly.sim.hardware import Hardware
from expertly.sim.schedule import Selection, make_schedule
from expertly.sim.study import Memory
from expertly.trace.reader import Trace

if TYPE_CHECKING:
    from expertly.cli.configure import ConfigureOptions

PROMPTS = (
    "Once upon a time there was a small village at the foot of a mountain.",
    "def fibonacci(n):\n    ",
    "The three most important causes of the war were",
    "Q: A train leaves at 9:40 and arrives at 11:05. How long does it take?\nA:",
)


def observed_of(args: ConfigureOptions, memories: Sequence[str]) -> ConfiguratorInput:
    """Raises what loading, recording and measuring a model raises."""
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
    seconds = DEFAULT_SECONDS if args.seconds is None else args.seconds
    geometry = api.handle(model).engine.executor.geometry
    try:
        profile = measure_model(model, seconds, tokens=(1,))
    except ConfigError as error:
        raise ConfigError(
            f"{error} (as --memory {DEFAULT_MEMORY}), or name a profile of this machine (--hardware)"
        ) from None
    return step_times(geometry, profile.link, Measured(profile.compute, geometry.segments_per_expert))
