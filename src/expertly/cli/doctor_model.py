"""`expertly doctor MODEL`: what to expect of a model on this machine."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from expertly.cli.output import message, print_json, progress_bar
from expertly.core.units import counted, format_nbytes, format_range, format_share

if TYPE_CHECKING:
    from expertly.cli.doctor import DoctorOptions
    from expertly.hardware.profile import MachineProfile
    from expertly.lab.forecast import ExpectedSpeed, ModelForecast


def expect(args: DoctorOptions, folder: Path, out: Path, stdout: TextIO) -> int:
    """The machine's profile is what `out` holds, else measured now. Exit code 2 where nothing of the model can run."""
    from expertly.hardware.machine import available_host_nbytes
    from expertly.lab.forecast import forecast, measured_hardware
    from expertly.model.needs import needs_of

    needs = needs_of(args.model)
    profile = _profile(folder, out)
    with progress_bar(unit="runs") as bar:
        progress = None if bar is None else lambda done, total: bar("simulating", done, total)
        found = forecast(needs, profile, measured_hardware(profile), available_host_nbytes(), progress)
    if args.json:
        print_json({**asdict(found), "machine": profile.cpu, "profile_path": str(out)}, stdout)
    else:
        from rich.console import Console

        width = max(100, min(120, shutil.get_terminal_size().columns))
        Console(file=stdout, highlight=False, width=width).print(_report(found, profile))
    return 0 if any(one.fits for one in found.speeds) and needs.refused is None else 2


def _profile(folder: Path, out: Path) -> MachineProfile:
    from expertly.hardware.machine import Effort, examine
    from expertly.hardware.profile import MachineProfile

    if out.exists():
        return MachineProfile.read(out)
    profile, _ = examine(folder, Effort(), _measuring if sys.stderr.isatty() else None)
    profile.write(out)
    return profile


def _measuring(what: str) -> None:
    message(f"measuring {what} ...")


def _report(found: ModelForecast, profile: MachineProfile) -> object:
    """For people."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

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
    parts: list[Text | Table] = [
        Text(f"{needs.name}: {needs.model_type}, {experts}"),
        sizes,
        Text(),
        Text(f"Expected on {profile.cpu}, {counted(profile.num_cpus, 'CPU')} (computed, not measured):"),
        speeds,
        Text(f"What decides: {found.decided_by}."),
        Text(f"Next: {found.command}"),
    ]
    return Group(*parts)


def _row(one: ExpectedSpeed) -> tuple[str, ...]:
    def number(value: float) -> str:
        return f"{value:.3g}"

    return (
        format_nbytes(one.memory_nbytes),
        format_share(one.share),
        format_range(number, *one.tokens_per_s),
        format_range(format_share, *one.hit_rate),
        format_range(format_share, *one.waiting),
        "" if one.fits else "does not fit",
    )
