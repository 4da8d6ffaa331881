"""Examines the machine for `expertly doctor`: measures it and reports problems."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from time import monotonic

import torch

from expertly.core.errors import ConfigError
from expertly.core.resources import NUM_READERS, allowed_cpus, cpu_name
from expertly.core.units import format_nbytes
from expertly.engine.memory import WORKING_NBYTES, available_host_nbytes
from expertly.engine.process import keep_off_trapped_instructions
from expertly.hardware import measure
from expertly.hardware.neighbours import QuietWatch
from expertly.hardware.profile import DeviceProfile, DiskProfile, DiskRate, MachineProfile, MatvecRate

SCRATCH_NBYTES = 1 << 30
LEAST_FREE_NBYTES = 8 << 30
"""Free disk for packed stores below which `doctor` warns: that of a small MoE model."""

_DISTRIBUTIONS = ("torch", "transformers", "numpy", "safetensors")


@dataclass(frozen=True, slots=True)
class Problem:
    """An error keeps expertly from working here; a warning means that it is slower, or runs smaller models."""

    level: str  # "error", "warning" or "note"
    subject: str
    text: str


_BUSY = "busy machine"


def is_disturbed(problems: Iterable[Problem]) -> bool:
    """Whether the machine was busy with something else while it was measured."""
    return any(problem.subject == _BUSY for problem in problems)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure, in seconds, and how much to write."""

    scratch_nbytes: int = SCRATCH_NBYTES
    write_s: float = 5.0
    reads_s: float = 8.0
    each_s: float = 0.4  # of each thing measured in memory
    device_s: float = 2.0
    wait_s: float = 10.0  # for a quiet moment


def examine(
    folder: Path, effort: Effort, progress: Callable[[str], None] | None = None, watch: QuietWatch | None = None
) -> tuple[MachineProfile, list[Problem]]:
    """Measure this machine, the disk in `folder`. `progress(what)` is called as each part begins. Where `is_disturbed`
    of the problems, nobody is to keep the figures.
    """
    tell, watch = progress or (lambda what: None), watch or QuietWatch()
    keep_off_trapped_instructions()
    requirements = metadata.requires("expertly") if _installed("expertly") else []  # none: run from a source tree
    problems = version_problems(requirements or [], _installed)
    available = available_host_nbytes()
    if available < 2 * WORKING_NBYTES:
        alone = f"torch and a forward pass alone take about {format_nbytes(WORKING_NBYTES)}"
        text = f"{format_nbytes(available)} are free; {alone}"
        problems.append(Problem("warning", "memory", text))
    num_cpus = allowed_cpus()
    watch.wait(effort.wait_s)
    tell("disk")
    disk = _examine_disk(folder, effort, problems)
    tell("memory")
    cache_nbytes = last_level_cache_nbytes()
    nbytes = max(64 << 20, min(max(256 << 20, 4 * cache_nbytes), available // 8))  # more than any cache holds
    threads = sorted({1, torch.get_num_threads()})
    copies = tuple(measure.measure_copy(n, nbytes, effort.each_s) for n in threads)
    tell("matrix-vector speed")
    matvec = tuple(_examine_matvec(threads, nbytes, effort.each_s, problems))
    tell("decompression")
    decoding = measure.measure_decoding(effort.each_s)
    tell("devices")
    devices = _examine_devices(effort.device_s, problems)
    if (disturbance := watch.disturbance()) is not None:
        text = f"{disturbance}: the figures are too low, and are not kept; measure again on a quiet machine"
        problems.append(Problem("warning", _BUSY, text))
    elif not watch.can_tell:
        text = "/proc/stat cannot be read: it cannot be told whether other processes made the figures too low"
        problems.append(Problem("note", "cpu", text))
    profile = MachineProfile(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        platform=platform.platform(),
        cpu=cpu_name(),
        num_cpus=num_cpus,
        cache_nbytes=cache_nbytes,
        memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available_nbytes=available,
        versions={"python": platform.python_version(), **{name: _installed(name) or "" for name in _DISTRIBUTIONS}},
        disk=disk,
        copies=copies,
        matvec=matvec,
        decoding=decoding,
        devices=devices,
    )
    return profile, problems


def _examine_disk(folder: Path, effort: Effort, problems: list[Problem]) -> DiskProfile | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        problems.append(Problem("error", "folder", f"{folder}: cannot be made or read ({error.strerror})"))
        return None
    if free < LEAST_FREE_NBYTES:
        text = f"{format_nbytes(free)} are free in {folder}; a packed store is as large as the model"
        problems.append(Problem("warning", "disk", text))
    nbytes = min(effort.scratch_nbytes, free // 2)
    if nbytes < measure.READ_SIZES[-1]:
        problems.append(
            Problem("error", "disk", f"{folder}: {format_nbytes(free)} free is too little to measure reads")
        )
        return None
    try:
        with measure.scratch_file(folder, nbytes, effort.write_s) as file:
            reads = tuple(_reads(file.path, effort.reads_s))
    except ConfigError as error:
        problems.append(Problem("error", "folder", str(error)))
        return None
    if not all(read.is_direct for read in reads):
        text = (
            f"{folder}: its file system refuses direct reads (O_DIRECT); reads go through the page cache and cost more"
        )
        problems.append(Problem("warning", "disk", text))
    return DiskProfile(str(folder), free, file.nbytes, file.write_nbytes_per_s, reads)


def _reads(path: Path, seconds: float) -> list[DiskRate]:
    """Every read size at every depth, the better of two rounds, since the disks of virtual machines vary.

    On a disk too slow for all of them, one thread and the engine's number of threads come first.
    """
    end = monotonic() + 1.5 * seconds
    each = seconds / (2 * len(measure.DEPTHS) * len(measure.READ_SIZES))
    sizes = [size for size in measure.READ_SIZES if size <= path.stat().st_size]
    depths = sorted(measure.DEPTHS, key=lambda depth: depth not in (1, NUM_READERS))
    best: dict[tuple[int, int], DiskRate] = {}
    for depth, size in 2 * [(depth, size) for depth in depths for size in sizes]:
        if monotonic() > end:
            break
        rate = measure.measure_disk(path, size, depth, each)
        if (depth, size) not in best or best[depth, size].nbytes_per_s < rate.nbytes_per_s:
            best[depth, size] = rate
    return list(best.values())


def _examine_matvec(threads: list[int], nbytes: int, seconds: float, problems: list[Problem]) -> Iterable[MatvecRate]:
    for dtype in measure.DTYPES:
        try:
            for num_threads in threads:
                yield measure.measure_matvec(dtype, num_threads, nbytes, seconds)
        except RuntimeError as error:  # torch builds differ in what they multiply on a CPU
            problems.append(
                Problem("warning", "torch", f"no {dtype} products on this CPU: {str(error).splitlines()[0]}")
            )


def _examine_devices(seconds: float, problems: list[Problem]) -> tuple[DeviceProfile, ...]:
    try:
        devices = measure.measure_devices(seconds)
    except RuntimeError as error:
        problems.append(Problem("warning", "device", f"found but not usable: {str(error).splitlines()[0]}"))
        return ()
    if not devices:
        problems.append(Problem("note", "device", "no CUDA device (or a torch without CUDA): models run on the CPU"))
    return devices


def version_problems(requirements: Iterable[str], installed: Callable[[str], str | None]) -> list[Problem]:
    """Requirements of package metadata, without those of extras, that the installed versions do not meet."""
    from packaging.requirements import Requirement

    problems = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed(requirement.name)
        if version is None:
            problems.append(Problem("error", requirement.name, f"not installed; needed: {text}"))
        elif not requirement.specifier.contains(version, prereleases=True):
            accepted = f"{version} is installed; accepted: {requirement.specifier}"
            problems.append(Problem("error", requirement.name, accepted))
    return problems


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def last_level_cache_nbytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """The size of a core's largest cache, 0 where the system does not say."""
    sizes = [0]
    for path in root.glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)
        digits = text[:-1] if unit else text
        sizes.append(int(digits) << unit if digits.isdigit() else 0)
    return max(sizes)
