"""`expertly doctor`: measure this machine, or say what to expect of a model on it.

With a MODEL it says what the model needs, how much of it fits here and how fast it will be, from the config and the
headers of its weights; no weights are downloaded. Exit code 2 where nothing could run, or the profile cannot be
written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from expertly.cli.output import message, progress_bar, reserved_stdout, show, table
from expertly.core.errors import ConfigError
from expertly.core.units import (
    counted,
    format_nbytes,
    format_number,
    format_range,
    format_rate,
    format_seconds,
    format_share,
)
from expertly.hardware.profile import MachineProfile
from expertly.options import argument, json_flag, load_option, path_option

if TYPE_CHECKING:
    from expertly.hardware.forecast import ModelForecast
    from expertly.hardware.machine import Problem

PROFILE_NAME = "machine.json"


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    model: str | None = argument(
        None,
        "a folder, a GGUF file, a packed store, a hub id or a config.json to forecast on this machine",
        metavar="MODEL",
    )
    dir: Path | None = path_option(None, "measure the disk of this folder", "DIR")
    out: Path | None = path_option(None, "where the machine's profile goes (default: machine.json in the cache folder)")
    total_memory: str | None = load_option("total_memory", help="with MODEL: memory for everything, as `run` takes it")
    json: bool = json_flag()


def run(args: DoctorOptions) -> int:
    from expertly.store.cache import cache_folder

    if args.total_memory is not None and args.model is None:
        raise ConfigError(f"total_memory={args.total_memory!r}: only with a MODEL")
    if args.dir is not None and not args.dir.is_dir():
        raise ConfigError(f"dir={str(args.dir)!r}: not a folder")
    folder, out = args.dir or cache_folder(), args.out or cache_folder() / PROFILE_NAME
    with reserved_stdout() as stdout:
        return (_examine if args.model is None else _expect)(args, folder, out, stdout)


def _examine(args: DoctorOptions, folder: Path, out: Path, stdout: TextIO) -> int:
    from expertly.native.kernels import choose_kernels

    start = time.monotonic()
    kernels = choose_kernels()
    profile, problems, is_kept = _measure(folder, out)
    seconds = time.monotonic() - start
    facts = {
        **asdict(profile),
        "problems": [asdict(problem) for problem in problems],
        "kernels": {"name": kernels.name, "why": kernels.reason},
        "profile_path": str(out) if is_kept else None,
        "seconds": seconds,
    }
    used = f"kernels {kernels.name}: {kernels.reason}"
    show(facts, args.json, lambda: _machine_report(profile, used, problems), stdout)
    if is_kept and not args.json:
        message(f"profile written to {out} after {format_seconds(seconds)}")
    return 2 if any(problem.level == "error" for problem in problems) else 0


def _measure(folder: Path, out: Path) -> tuple[MachineProfile, list[Problem], bool]:
    """This machine, with the disk in `folder`, and whether its profile was written to `out`; a problem says why not."""
    from expertly.hardware.machine import BUSY, Problem, examine

    progress = (lambda part: message(f"measuring {part} ...")) if sys.stderr.isatty() else None
    profile, problems = examine(folder, progress)
    is_kept = not any(problem.subject == BUSY for problem in problems)
    if is_kept:
        try:
            profile.write(out)
        except ConfigError as error:
            problems.append(Problem("error", "profile", str(error)))
            is_kept = False
    return profile, problems, is_kept


def _machine_report(profile: MachineProfile, kernels: str, problems: Sequence[Problem]) -> str:
    free = f"{format_nbytes(profile.available_nbytes)} of {format_nbytes(profile.memory_nbytes)} memory free"
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    rates = []
    if (disk := profile.disk) is not None:
        how = "direct" if disk.is_direct else "buffered"
        name = f"disk {disk.folder}, {format_nbytes(disk.free_nbytes)} free: {how} random reads of 4 MiB"
        rates += [(name, format_rate(disk.nbytes_per_s)), ("one of 64 KiB", format_seconds(disk.latency_ns / 1e9))]
        rates += [("writes", format_rate(disk.write_nbytes_per_s))]
    rates += [("memory: matrix x vector, bfloat16", format_rate(profile.weights_nbytes_per_s))]
    for device in profile.devices:
        name = f"{device.device}: {device.name}, {format_nbytes(device.memory_nbytes)}: copies to it"
        latency = format_seconds(device.link_latency_ns / 1e9)
        rates += [(name, format_rate(device.link_nbytes_per_s)), ("one of 64 KiB", latency)]
        rates += [("matrix x vector, bfloat16", format_rate(device.weights_nbytes_per_s))]
    head = f"{profile.cpu}, {profile.num_cpus} CPUs, {free}\n{versions}"
    parts = [head, table(("what", "measured"), rates), kernels, "\n".join(map(str, problems))]
    return "\n\n".join(filter(None, parts))


def _expect(args: DoctorOptions, folder: Path, out: Path, stdout: TextIO) -> int:
    """Forecast a model on the machine of the profile `out`. Exit code 2 where it cannot run here."""
    from expertly.engine.fitting import with_quantisation
    from expertly.hardware.forecast import forecast, measured_speed
    from expertly.hardware.machine import available_host_nbytes
    from expertly.model.needs import needs_of

    needs = needs_of(with_quantisation(args.model, total_memory=args.total_memory))
    if out.exists():
        profile = MachineProfile.read(out)
    else:
        profile, problems, _ = _measure(folder, out)
        for problem in problems:
            message(f"expertly: {problem}")
    with progress_bar() as progress:
        speed = measured_speed(profile, needs, progress)
    expected = forecast(needs, profile, speed, available_host_nbytes(), args.total_memory)
    facts = {**asdict(expected), "machine": profile.cpu, "profile_path": str(out)}
    show(facts, args.json, lambda: _forecast_report(expected, profile, args.total_memory is not None), stdout)
    return 0 if any(speed.fits for speed in expected.speeds) else 2


def _forecast_report(expected: ModelForecast, profile: MachineProfile, is_total_stated: bool) -> str:
    needs, stored, layers = expected.needs, expected.needs.stored, expected.needs.layers
    least = f"at least {format_nbytes(expected.least_nbytes)} of them in memory"
    rest = ", ".join(f"{format_nbytes(size)} in {name}" for name, size in needs.dense_by_format.items())
    caches = ", ".join(f"{format_nbytes(size)} for {tokens} tokens" for tokens, size in expected.cache_nbytes.items())
    disk = f"{format_nbytes(expected.disk_nbytes)} for the packed store"
    if expected.download_nbytes:
        disk += f", {format_nbytes(expected.download_nbytes)} to download"
    fit = f"{format_share(expected.fitting_share)} of the experts beside the rest and 4096 tokens"
    free = "for everything, as stated" if is_total_stated else "are free"
    sizes = [
        ("checkpoint", format_nbytes(stored.nbytes) if stored is not None and not needs.is_packed else ""),
        ("experts", f"{format_nbytes(expected.experts_nbytes)} in {needs.stored_as}; {least}"),
        ("", "" if needs.rounding is None else str(needs.rounding)),
        ("the rest", format_nbytes(needs.dense_nbytes) + (f": {rest}" if "," in rest else "")),
        ("tables", f"{format_nbytes(needs.tables_nbytes)}, read by row from the disk" if needs.tables_nbytes else ""),
        ("KV cache", f"at most {caches}"),
        ("disk", f"{disk}; {format_nbytes(expected.disk_free_nbytes)} are free"),
        ("memory", f"{format_nbytes(expected.memory_nbytes)} of {expected.memory_name} {free}: {fit}"),
    ]
    rows = [
        (
            f"{format_nbytes(speed.memory_nbytes)} ({format_share(speed.share)})",
            format_range(format_number, *speed.tokens_per_s),
            format_range(format_share, *speed.hit_rate),
            format_range(format_share, *speed.waiting),
            "" if speed.fits else "too large",
        )
        for speed in expected.speeds
    ]
    experts = f"{layers[0].num_experts} experts, {layers[0].top_k} a token, in {counted(len(layers), 'layer')}"
    lines = [
        f"{needs.name}: {needs.model_type}, {experts}",
        *(f"{name:<12}{text}" for name, text in sizes if text),
        f"\nExpected on {profile.cpu}, {counted(profile.num_cpus, 'CPU')}, computed from what it did when measured "
        f"({profile.created}; `expertly doctor` alone measures it anew):",
        table(("for experts", "tokens/s", "experts hit", "waiting", ""), rows),
        f"Experts are hit as in recorded routing of {'; '.join(expected.routing)}, kept by `lru`.",
        f"Next: {expected.command}",
    ]
    return "\n".join(lines)
