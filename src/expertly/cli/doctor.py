"""`expertly doctor`: measure this machine, or say what to expect of a model on it.

With a MODEL: what it needs, what of it fits here and tokens per second, from its config and the headers of its
weights, of which nothing is downloaded. Exit code 2 where something is missing without which nothing runs, or where the
profile cannot be written.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli import doctor_hardware
from expertly.cli.output import message, print_json, reserved_stdout, table
from expertly.core.errors import ConfigError, ExpertlyError
from expertly.core.units import format_nbytes
from expertly.hardware.profile import DiskProfile, MachineProfile
from expertly.options import argument, json_flag, option

if TYPE_CHECKING:
    from expertly.hardware.machine import Problem

PROFILE_NAME = "machine.json"


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    model: str | None = argument(
        None,
        "a folder, a packed store, a hub id or a config.json: what to expect of it here",
        metavar="MODEL",
        was="model",
    )
    dir: Path | None = option(None, "measure the disk here", metavar="DIR", type=Path)
    out: Path | None = option(None, "default: machine.json in the cache folder", metavar="FILE", type=Path)
    hardware_out: str | None = option(
        None,
        "write this machine, or MODEL measured on it, as a hardware file for `expertly lab simulate`",
        metavar="FILE.toml",
    )
    memory: str | None = option(
        None, "with MODEL and --hardware-out: memory for its experts while measured", metavar="SIZE"
    )
    segments: int | None = option(
        None, "with MODEL and --hardware-out: parts an expert is cut into", metavar="P", type=int, least=1
    )
    json: bool = json_flag()


def run(args: DoctorOptions) -> int:
    from expertly.store.cache import cache_folder

    start = time.monotonic()
    doctor_hardware.check_arguments(args)
    folder: Path = args.dir or cache_folder()
    out: Path = args.out or cache_folder() / PROFILE_NAME
    if args.dir is not None and not args.dir.is_dir():
        raise ConfigError(f"dir={str(args.dir)!r}: not a folder")
    with reserved_stdout() as stdout:
        from expertly.hardware.machine import Effort, Problem, examine

        if args.model is not None and args.hardware_out is None:
            from expertly.cli import doctor_model

            return doctor_model.expect(args, folder, out, stdout)
        profile, problems = examine(folder, Effort(), _progress if sys.stderr.isatty() else None)
        try:
            profile.write(out)
        except ExpertlyError as error:
            problems.append(Problem("error", "profile", str(error)))
        hardware: dict[str, Any] = {}
        if args.hardware_out is not None:
            made, about = doctor_hardware.measure_hardware(profile, args)
            made.write(Path(args.hardware_out), about)
            hardware = {"hardware": made.as_dict(), "hardware_path": args.hardware_out}
        seconds = time.monotonic() - start
        is_broken = any(problem.level == "error" for problem in problems)
        if args.json:
            from expertly.hardware.measure import kernels_here, machine_choice

            choice = None if profile.disk is None else asdict(machine_choice(profile))
            facts = {**profile.as_dict(), "codec_auto": choice, "problems": [asdict(problem) for problem in problems]}
            facts["kernels"] = kernels_here()
            print_json({**facts, "profile_path": str(out), **hardware, "seconds": seconds}, stdout)
        else:
            stdout.write(report(profile, problems) + "\n")
            if out.exists():
                message(f"profile written to {out} after {seconds:.0f} s")
            if hardware:
                message(f"hardware file written to {args.hardware_out}")
    return 2 if is_broken else 0


def _progress(what: str) -> None:
    message(f"measuring {what} ...")


def report(profile: MachineProfile, problems: list[Problem]) -> str:
    """The tables that people read."""
    from expertly.hardware.measure import kernels_here

    free = f"{format_nbytes(profile.available_nbytes)} of {format_nbytes(profile.memory_nbytes)} memory free"
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    parts = [f"{profile.cpu}, {profile.num_cpus} CPUs, {free}\n{versions}"]
    if profile.disk is not None:
        parts.append(_disk_table(profile.disk))
    copies = [(f"copy, {rate.num_threads} threads", _rate(rate.nbytes_per_s)) for rate in profile.copies]
    matvec = [
        (f"matrix x vector, {rate.dtype}, {rate.num_threads} threads", _rate(rate.nbytes_per_s))
        for rate in profile.matvec
    ]
    decoding = [
        (f"decode planes, {rate.num_threads} threads, of weights", _rate(rate.nbytes_per_s))
        for rate in profile.decoding.rates
    ]
    parts.append(table(("memory", "GB/s"), [*copies, *matvec, *decoding]))
    parts.append("kernels {name}: {why}".format(**kernels_here()))
    if profile.disk is not None:
        from expertly.hardware.measure import machine_choice

        choice = machine_choice(profile)
        parts.append(f"codec auto, for bfloat16 weights as trained ones are: {choice.codec}: {choice.why}")
    for device in profile.devices:
        rows = [
            (
                format_nbytes(link.nbytes),
                _rate(link.to_device_nbytes_per_s),
                _rate(link.from_device_nbytes_per_s),
                f"{link.to_device_ns / 1e3:.1f}",
            )
            for link in device.link
        ]
        name = f"{device.device}: {device.name}, {format_nbytes(device.memory_nbytes)}"
        parts.append(f"{name}\n{table(('copy of', 'to it, GB/s', 'from it, GB/s', 'one, us'), rows)}")
    if problems:
        parts.append("\n".join(f"{problem.level}: {problem.subject}: {problem.text}" for problem in problems))
    return "\n\n".join(parts)


def _disk_table(disk: DiskProfile) -> str:
    depths = sorted({rate.depth for rate in disk.reads})
    rates = {(rate.read_nbytes, rate.depth): rate for rate in disk.reads}
    rows = []
    for size in sorted({rate.read_nbytes for rate in disk.reads}):
        cells = [rates.get((size, depth)) for depth in depths]
        rows.append((format_nbytes(size), *("-" if cell is None else _rate(cell.nbytes_per_s) for cell in cells)))
    how = "direct" if all(rate.is_direct for rate in disk.reads) else "buffered"
    headers = ("read of", *(f"{depth} at a time" for depth in depths))
    about = f"disk {disk.folder}: {format_nbytes(disk.free_nbytes)} free, writes {_rate(disk.write_nbytes_per_s)} GB/s"
    return f"{about}; {how} random reads of a {format_nbytes(disk.file_nbytes)} file, GB/s:\n{table(headers, rows)}"


def _rate(nbytes_per_s: float) -> str:
    return f"{nbytes_per_s / 1e9:.2f}"
