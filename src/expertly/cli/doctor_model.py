"""`expertly doctor MODEL`: what to expect of a model on this machine."""

from __future__ import annotations

import io
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from expertly.cli.doctor import say_what_is_measured
from expertly.cli.output import progress_bar, show
from expertly.core.units import counted, format_nbytes, format_range, format_share
from expertly.hardware.profile import MachineProfile

if TYPE_CHECKING:
    from expertly.lab.forecast import ExpectedSpeed, ModelForecast


def expect(model: str, is_json: bool, folder: Path, out: Path, stdout: TextIO) -> int:
    """The machine's profile is what `out` holds, else measured now. Exit code 2 where nothing of the model can run."""
    from expertly.hardware.machine import Effort, available_host_nbytes, examine
    from expertly.lab.forecast import forecast, measured_hardware
    from expertly.model.needs import needs_of

    needs = needs_of(model)
    if out.exists():
        profile = MachineProfile.read(out)
    else:
        profile, _ = examine(folder, Effort(), say_what_is_measured())
        profile.write(out)
    with progress_bar(unit="runs") as bar:
        progress = None if bar is None else lambda done, total: bar("simulating", done, total)
        found = forecast(needs, profile, measured_hardware(profile), available_host_nbytes(), progress)
    facts = {**asdict(found), "machine": profile.cpu, "profile_path": str(out)}
    show(facts, is_json, lambda: _report(found, profile), stdout)
    return 0 if any(one.fits for one in found.speeds) and needs.refused is None else 2


def _report(found: ModelForecast, profile: MachineProfile) -> str:
    """For people."""
    needs, stored = found.needs, found.needs.stored
    layers = needs.layers
    experts = f"{layers[0].num_experts} experts, {layers[0].top_k} a token, in {counted(len(layers), 'layer')}"
    sizes = Table(box=None, show_header=False, pad_edge=False)
    if stored is not None and not needs.is_packed:
        kinds = ", ".join(f"{format_nbytes(size)} {name}" for name, size in stored.dtypes.items())
        own = "" if stored.experts_nbytes is None else f"; experts {format_nbytes(stored.experts_nbytes)}"
        sizes.add_row("checkpoint", f"{format_nbytes(stored.nbytes)} ({kinds}{own})")
    sizes.add_row(
        "experts",
        f"{format_nbytes(found.experts_nbytes)} in {needs.stored_as}; at least "
        f"{format_nbytes(found.least_nbytes)} of them in memory",
    )
    if needs.rounding is not None:
        sizes.add_row("", str(needs.rounding))
    sizes.add_row("the rest", format_nbytes(found.dense_nbytes))
    caches = ", ".join(f"{format_nbytes(size)} for {tokens} tokens" for tokens, size in found.cache_nbytes.items())
    sizes.add_row("KV cache", f"at most {caches}")
    disk = f"{format_nbytes(found.disk_nbytes)} for the packed store"
    if found.download_nbytes:
        disk += (
            f", {format_nbytes(found.download_nbytes)} to download ({format_nbytes(found.disk_stream_nbytes)} in all"
        )
        disk += " with pack --stream)"
    sizes.add_row("disk", f"{disk}; {format_nbytes(found.disk_free_nbytes)} are free")
    fit = f"{format_share(found.fitting_share)} of the experts beside the rest and 4096 tokens"
    sizes.add_row("memory", f"{format_nbytes(found.memory_nbytes)} of {found.memory_name} are free: {fit}")
    speeds = Table("memory for experts", "", "tokens/s", "experts hit", "waiting", "", box=None, pad_edge=False)
    for one in found.speeds:
        speeds.add_row(*_row(one))
    parts = Group(
        Text(f"{needs.name}: {needs.model_type}, {experts}"),
        sizes,
        Text(),
        Text(f"Expected on {profile.cpu}, {counted(profile.num_cpus, 'CPU')} (computed, not measured):"),
        speeds,
        Text(f"What decides: {found.decided_by}."),
        Text(f"Next: {found.command}"),
    )
    text = io.StringIO()
    Console(file=text, width=max(100, min(120, shutil.get_terminal_size().columns))).print(parts)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _row(one: ExpectedSpeed) -> tuple[str, ...]:
    return (
        format_nbytes(one.memory_nbytes),
        format_share(one.share),
        format_range("{:.3g}".format, *one.tokens_per_s),
        format_range(format_share, *one.hit_rate),
        format_range(format_share, *one.waiting),
        "" if one.fits else "does not fit",
    )
