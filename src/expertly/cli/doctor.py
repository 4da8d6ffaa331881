"""`expertly doctor`: measure this machine, or say what to expect of a model on it.

With a MODEL it says what the model needs, how much of it fits here and how fast it will be, from the config and the
headers of its weights; no weights are downloaded. Exit code 2 where nothing could run, or the profile cannot be
written.
"""

from __future__ import annotations

import io
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from expertly.arguments import whole_numbers
from expertly.cli.output import Column, figures_table, message, progress_bar, reserved_stdout, show, table
from expertly.core.errors import ConfigError, ExpertlyError
from expertly.core.units import (
    counted,
    format_nbytes,
    format_number,
    format_range,
    format_rate,
    format_ratio,
    format_seconds,
    format_share,
)
from expertly.hardware.profile import DiskProfile, MachineProfile
from expertly.options import ADVANCED, argument, check_one_memory, json_flag, load_option, option, path_option
from expertly.sim.hardware import NETWORK_NAMES, ClusterNetwork, Hardware
from expertly.trace.reader import Trace

if TYPE_CHECKING:
    from expertly.lab.forecast import ExpectedSpeed, ModelForecast

PROFILE_NAME = "machine.json"
DEFAULT_NETWORK = "10GbE"
MODEL_SECONDS = 40.0
"""How long a model is measured."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    model: str | None = argument(
        None,
        "a folder, a packed store, a hub id or a config.json to forecast on this machine",
        metavar="MODEL",
        was="model",
    )
    dir: Path | None = path_option(None, "measure the disk of this folder", "DIR")
    out: Path | None = path_option(None, "where the machine's profile goes (default: machine.json in the cache folder)")
    hardware_out: str | None = option(
        None,
        "write this machine, or MODEL measured on it, as a hardware file for `expertly lab simulate`",
        metavar="FILE.toml",
    )
    total_memory: str | None = load_option("total_memory", help="with MODEL: memory for everything, as `run` takes it")
    memory: str | None = load_option(
        "memory", default=None, help="with MODEL and --hardware-out: memory for its experts while it is measured"
    )
    segments: int | None = load_option(
        "segments", help="with MODEL and --hardware-out: parts an expert is cut into while it is measured"
    )
    workers: tuple[int, ...] | None = option(
        None,
        "with MODEL: what to expect with so many other machines like this one that hold experts and compute them, each "
        "with as much memory",
        metavar="N,N",
        type=whole_numbers,
        panel=ADVANCED,
    )
    network: str | None = option(
        None,
        f"with --workers: between the machines, {', '.join(NETWORK_NAMES)} or a TOML file (default: {DEFAULT_NETWORK})",
        metavar="NAME",
        panel=ADVANCED,
        choices=lambda: NETWORK_NAMES,
    )
    trace: Path | None = path_option(
        None,
        "with --workers: recorded routing of MODEL, simulated in place of made-up routing, with experts placed by hash "
        "and by half of its requests",
        "TRACE",
    )
    json: bool = json_flag()


def run(args: DoctorOptions) -> int:
    from expertly.store.cache import cache_folder

    start = time.monotonic()
    for name in ("memory", "segments"):
        if getattr(args, name) is not None and (args.model is None or args.hardware_out is None):
            raise ConfigError(
                f"{name}={getattr(args, name)!r}: only with a MODEL that is measured into --hardware-out FILE.toml"
            )
    if args.workers is not None and (args.model is None or args.hardware_out is not None):
        raise ConfigError(f"workers={','.join(map(str, args.workers))}: only with a MODEL to forecast")
    for name in ("network", "trace"):
        if args.workers is None and getattr(args, name) is not None:
            raise ConfigError(f"{name}={str(getattr(args, name))!r}: accepted: only with --workers N")
    if args.total_memory is not None and args.model is None:
        raise ConfigError(f"total_memory={args.total_memory!r}: only with a MODEL")
    check_one_memory(args.memory, args.total_memory)
    folder: Path = args.dir or cache_folder()
    out: Path = args.out or cache_folder() / PROFILE_NAME
    if args.dir is not None and not args.dir.is_dir():
        raise ConfigError(f"dir={str(args.dir)!r}: not a folder")
    with reserved_stdout() as stdout:
        from expertly.hardware.machine import Effort, Problem, examine, is_disturbed
        from expertly.hardware.measure import machine_choice
        from expertly.native.kernels import choose_kernels

        if args.model is not None and args.hardware_out is None:
            return expect(args.model, args, folder, out, stdout)
        profile, problems = examine(folder, Effort(), say_what_is_measured())
        is_kept = not is_disturbed(problems)
        if not is_kept and args.hardware_out is not None:
            raise ConfigError(f"hardware_out={args.hardware_out!r}: not written: {problems[-1].text}")
        try:
            if is_kept:
                profile.write(out)
        except ExpertlyError as error:
            problems.append(Problem("error", "profile", str(error)))
        kernels = choose_kernels()
        facts = {
            **profile.as_dict(),
            "codec_auto": None if profile.disk is None else asdict(machine_choice(profile)),
            "problems": [asdict(problem) for problem in problems],
            "kernels": {"name": kernels.name, "why": kernels.why},
            "profile_path": str(out) if is_kept else None,
        }
        if args.hardware_out is not None:
            made, about = measure_hardware(profile, args)
            made.write(Path(args.hardware_out), about)
            facts |= {"hardware": made.as_dict(), "hardware_path": args.hardware_out}
        facts["seconds"] = time.monotonic() - start
        show(facts, args.json, lambda: report(profile, facts), stdout)
        if not args.json and is_kept and out.exists():
            message(f"profile written to {out} after {format_seconds(facts['seconds'])}")
        if not args.json and args.hardware_out is not None:
            message(f"hardware file written to {args.hardware_out}")
    return 2 if any(problem.level == "error" for problem in problems) else 0


def say_what_is_measured() -> Any:
    """A function that names each measurement as it begins; None where stderr is no terminal."""
    return (lambda what: message(f"measuring {what} ...")) if sys.stderr.isatty() else None


def measure_hardware(profile: MachineProfile, args: DoctorOptions) -> tuple[Hardware, list[str]]:
    """The machine of `profile` as a hardware file describes it, and the comments of that file. Without a model, fixed
    times are assumed, and a comment says so.

    Raises ConfigError where the profile lacks the disk, and what loading and measuring the model raises.
    """
    from expertly.hardware.simulated import machine_hardware

    hardware = machine_hardware(profile)
    about = [
        f"Measured by `expertly doctor` on {profile.cpu}, {profile.num_cpus} CPUs, {profile.created}.",
        "launch_ns, layer_ns and iteration_ns are assumed, as is that reading takes no processor from decoding; the "
        "rest of what is outside [compute] is measured.",
    ]
    if args.model is None:
        return hardware, about
    from expertly import api
    from expertly.lab.model_profile import compressed_costs, measure_model

    memory = args.memory or ("25%" if args.total_memory is None else "auto")
    with progress_bar() as progress:
        model, _ = api.load(
            args.model,
            memory=memory,
            total_memory=args.total_memory,
            system="lru",
            segments=args.segments or 1,
            progress=progress,
        )
    try:
        measured = measure_model(model, MODEL_SECONDS)
        compressed = compressed_costs(model, measured)
    finally:
        api.unload(model)
    if compressed is not None:
        where = "link" if hardware.disk is None else "disk"
        about.append(f"[codec], all measured, and [{where}] are this model's; [compute] is for traces of it alone.")
        disk, costs = compressed
        found = replace(hardware.with_disk(disk), compute=measured.compute, predictor=measured.predictor, codec=costs)
        return found, about
    about.append("[link] is how long pieces of this model take; [compute] is used for traces of this model alone.")
    return hardware.with_model(measured.link, measured.compute, measured.predictor), about


# -- for people --------------------------------------------------------------------------------------------------------


_LINK: dict[str, Column] = {
    "copy of": ("nbytes", format_nbytes),
    "to it": ("to_device_nbytes_per_s", format_rate),
    "from it": ("from_device_nbytes_per_s", format_rate),
    "one": ("to_device_ns", lambda ns: format_seconds(ns / 1e9)),
}


def report(profile: MachineProfile, facts: dict[str, Any]) -> str:
    free = f"{format_nbytes(profile.available_nbytes)} of {format_nbytes(profile.memory_nbytes)} memory free"
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    parts = [f"{profile.cpu}, {profile.num_cpus} CPUs, {free}\n{versions}"]
    if profile.disk is not None:
        parts.append(_disk_table(profile.disk))
    rates = [(f"copy, {one.num_threads} threads", one.nbytes_per_s) for one in profile.copies]
    rates += [(f"matrix x vector, {one.dtype}, {one.num_threads} threads", one.nbytes_per_s) for one in profile.matvec]
    decoding = profile.decoding.rates
    rates += [(f"decode planes, {one.num_threads} threads, of weights", one.nbytes_per_s) for one in decoding]
    parts.append(table(("memory", "rate"), [(what, format_rate(rate)) for what, rate in rates]))
    parts.append("kernels {name}: {why}".format(**facts["kernels"]))
    if facts["codec_auto"] is not None:
        parts.append(
            "codec auto, for bfloat16 weights as trained ones are: {codec}: {why}".format(**facts["codec_auto"])
        )
    for device in profile.devices:
        name = f"{device.device}: {device.name}, {format_nbytes(device.memory_nbytes)}"
        parts.append(f"{name}\n{figures_table([asdict(link) for link in device.link], _LINK)}")
        if (host := device.host) is not None:
            rate, slower = format_rate(host.nbytes_per_s), format_ratio(host.link_slowdown)
            parts.append(f"matrix x vector, bfloat16, on the processor during copies: {rate}; a copy takes {slower}")
    if facts["problems"]:
        parts.append("\n".join("{level}: {subject}: {text}".format(**problem) for problem in facts["problems"]))
    return "\n\n".join(parts)


def _disk_table(disk: DiskProfile) -> str:
    depths = sorted({rate.depth for rate in disk.reads})
    rates = {(rate.read_nbytes, rate.depth): rate for rate in disk.reads}
    rows = []
    for size in sorted({rate.read_nbytes for rate in disk.reads}):
        cells = [rates.get((size, depth)) for depth in depths]
        rows.append((format_nbytes(size), *("-" if cell is None else format_rate(cell.nbytes_per_s) for cell in cells)))
    how = "direct" if all(rate.is_direct for rate in disk.reads) else "buffered"
    headers = ("read of", *(f"{depth} at a time" for depth in depths))
    about = f"disk {disk.folder}: {format_nbytes(disk.free_nbytes)} free, writes {format_rate(disk.write_nbytes_per_s)}"
    return f"{about}; {how} random reads of a {format_nbytes(disk.file_nbytes)} file:\n{table(headers, rows)}"


# -- of a model ----------------------------------------------------------------------------------------------------


def expect(model: str, args: DoctorOptions, folder: Path, out: Path, stdout: TextIO) -> int:
    """Forecast a model. The machine's profile is read from `out`, or measured now and written there. Exit code 2 where
    the model cannot run here.
    """
    from expertly.hardware.machine import Effort, available_host_nbytes, examine, is_disturbed
    from expertly.lab.forecast import forecast, measured_hardware
    from expertly.model.needs import needs_of

    network, needs = ClusterNetwork.read(args.network or DEFAULT_NETWORK), needs_of(model)
    workers = [(num, network) for num in args.workers or ()]
    most = min(layer.num_experts for layer in needs.layers) - 1  # this machine has one, too
    if args.workers is not None and args.workers[-1] > most:
        raise ConfigError(f"workers={args.workers[-1]}: accepted: 1 to {most}, for a layer has {most + 1} experts")
    trace = None if args.trace is None else Trace.open(args.trace)
    if out.exists():
        profile = MachineProfile.read(out)
    else:
        profile, problems = examine(folder, Effort(), say_what_is_measured())
        if is_disturbed(problems):
            message(f"expertly: {problems[-1].text}")
        else:
            profile.write(out)
    with progress_bar("runs") as bar:
        hardware = measured_hardware(profile, bar.in_bytes, needs)
        free, progress = available_host_nbytes(), partial(bar, "simulating")
        found = forecast(needs, profile, hardware, free, progress, args.total_memory, workers, trace)
    facts = {**asdict(found), "machine": profile.cpu, "profile_path": str(out)}
    about = _about_network(network) if found.with_workers else None
    show(facts, args.json, lambda: _forecast_report(found, profile, args.total_memory is not None, about), stdout)
    return 0 if any(one.fits for one in found.speeds) and needs.refused is None else 2


def _about_network(network: ClusterNetwork) -> str:
    times = network.latency_ns, network.call_ns, network.send_ns, network.take_ns, network.wake_ns
    latency, call, send, take, wake = (format_seconds(ns / 1e9) for ns in times)
    of_call = f"a call {call}, of which {send} until the next and {take} for its answer; {wake} after waiting for one"
    return f"{network.name} ({format_rate(network.nbytes_per_s)}; latency {latency}; {of_call})"


def _forecast_report(found: ModelForecast, profile: MachineProfile, is_total_stated: bool, network: str | None) -> str:
    """For people. `network`: what is assumed of it, where there are workers."""
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
    rest = ", ".join(f"{format_nbytes(size)} in {name}" for name, size in needs.dense_by_format.items())
    sizes.add_row("the rest", format_nbytes(found.dense_nbytes) + (f": {rest}" if "," in rest else ""))
    caches = ", ".join(f"{format_nbytes(size)} for {tokens} tokens" for tokens, size in found.cache_nbytes.items())
    sizes.add_row("KV cache", f"at most {caches}")
    disk = f"{format_nbytes(found.disk_nbytes)} for the packed store"
    if found.download_nbytes:
        streamed = f"{format_nbytes(found.disk_stream_nbytes)} in all with pack --stream"
        disk += f", {format_nbytes(found.download_nbytes)} to download ({streamed})"
    sizes.add_row("disk", f"{disk}; {format_nbytes(found.disk_free_nbytes)} are free")
    fit = f"{format_share(found.fitting_share)} of the experts beside the rest and 4096 tokens"
    free = "for everything, as stated" if is_total_stated else "are free"
    sizes.add_row("memory", f"{format_nbytes(found.memory_nbytes)} of {found.memory_name} {free}: {fit}")
    several = Text(f"\nWith other machines like this one as workers, over {network}:")
    parts = Group(
        Text(f"{needs.name}: {needs.model_type}, {experts}"),
        sizes,
        Text(),
        Text(
            f"Expected on {profile.cpu}, {counted(profile.num_cpus, 'CPU')}, computed from what it did when it was "
            f"measured ({profile.created}; `expertly doctor` alone measures it anew):"
        ),
        _speeds(found.speeds, ""),
        *((several, _speeds(found.with_workers, "network")) if found.with_workers else ()),
        Text(f"What decides: {found.decided_by}."),
        Text(f"Next: {found.command}"),
    )
    text = io.StringIO()
    Console(file=text, width=max(80, min(120, shutil.get_terminal_size((100, 24)).columns))).print(parts)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _speeds(speeds: Sequence[ExpectedSpeed], last: str) -> Table:
    made = Table("for experts", "tokens/s", "experts hit", "waiting", last, box=None, pad_edge=False)
    for one in speeds:
        made.add_row(*_row(one))
    return made


def _row(one: ExpectedSpeed) -> tuple[str, ...]:
    away = f" + {one.num_workers} x {format_nbytes(one.worker_nbytes)}" if one.num_workers else ""
    away += ", placed by the trace" if one.is_measured else ""
    return (
        f"{format_nbytes(one.memory_nbytes)}{away} ({format_share(one.share)})",
        format_range(format_number, *one.tokens_per_s),
        format_range(format_share, *one.hit_rate),
        format_range(format_share, *one.waiting),
        format_range(format_share, *one.network_time) if one.num_workers else "" if one.fits else "too large",
    )
