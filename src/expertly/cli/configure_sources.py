"""What `expertly lab configure` goes by: which experts are needed and predicted, what times things take, and
budgets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from expertly.cli.configure import DEFAULT_HARDWARE, SYSTEM
from expertly.cli.output import progress_bar
from expertly.cli.trace_geometry import trace_geometry
from expertly.core.errors import ConfigError
from expertly.core.geometry import DenseShape, Geometry, LayerGeometry, fitting_segments
from expertly.lab.routing_rates import RoutingRates, rates_of_trace
from expertly.scheduler.presets import get_system
from expertly.sim.compute import compute_model, step_times
from expertly.sim.hardware import Hardware
from expertly.sim.schedule import Selection, first_rows, make_schedule
from expertly.sim.study import Memory
from expertly.trace.reader import Trace
from expertly.trace.schema import FORMAT, MANIFEST_NAME

if TYPE_CHECKING:
    from expertly.cli.configure import ConfigureOptions
    from expertly.policies.allocation.moepic import Timing
    from expertly.scheduler.budget import Budget


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


def is_trace(source: str | None) -> bool:
    """Whether it is a folder that says it is a trace."""
    if source is None:
        return False
    try:
        manifest = json.loads((Path(source) / MANIFEST_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


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
