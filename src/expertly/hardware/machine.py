"""Examines the machine for `expertly doctor`: measures it, and says what is in the way or disturbed it."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from expertly.core.errors import ConfigError
from expertly.core.resources import NUM_READERS, allowed_cpus, available_host_nbytes, cpu_name
from expertly.core.units import format_nbytes
from expertly.engine.memory import WORKING_NBYTES
from expertly.engine.process import keep_off_trapped_instructions
from expertly.hardware import measure, neighbours
from expertly.hardware.profile import DeviceProfile, DiskProfile, MachineProfile

SCRATCH_NBYTES = 1 << 30
LEAST_FREE_NBYTES = 8 << 30
"""Free disk for packed stores below which `doctor` warns: that of a small MoE model."""

BUSY = "busy machine"
"""The subject of a problem of which figures are not to be kept: others took the machine while it was measured."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An error keeps expertly from working here; a warning means that it is slower, or runs smaller models."""

    level: str  # "error", "warning" or "note"
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.subject}: {self.text}"


def examine(
    folder: Path, progress: Callable[[str], None] | None = None, effort: float = 1.0
) -> tuple[MachineProfile, list[Problem]]:
    """Measure this machine, the disk in `folder`, in about half a minute times `effort`. `progress(part)` is called as
    each part begins.
    """
    tell, problems = progress or (lambda part: None), list[Problem]()
    keep_off_trapped_instructions()
    before, available, num_cpus = neighbours.read_system(), available_host_nbytes(), allowed_cpus()
    if available < 2 * WORKING_NBYTES:
        alone = f"torch and a forward pass alone take about {format_nbytes(WORKING_NBYTES)}"
        problems.append(Problem("warning", "memory", f"{format_nbytes(available)} are free; {alone}"))
    tell("disk")
    disk = _examine_disk(folder, effort, problems)
    tell("memory")
    nbytes = max(64 << 20, min(1 << 30, available // 8))  # more than caches hold
    weights = measure.measure_weights_rate(torch.device("cpu"), torch.bfloat16, 0.4 * effort, nbytes)
    tell("devices")
    devices = _examine_devices(2 * effort, problems)
    if (text := neighbours.disturbance(before, neighbours.read_system(), num_cpus)) is not None:
        text += ": the figures are too low, and are not kept; measure again on a quiet machine"
        problems.append(Problem("warning", BUSY, text))
    elif before.busy_s is None:
        text = "/proc/stat cannot be read: it cannot be told whether other processes made the figures too low"
        problems.append(Problem("note", "cpu", text))
    profile = MachineProfile(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        cpu=cpu_name(),
        num_cpus=num_cpus,
        memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available_nbytes=available,
        versions={"python": platform.python_version()}
        | {name: metadata.version(name) for name in ("torch", "transformers", "numpy", "safetensors")},
        disk=disk,
        weights_nbytes_per_s=weights,
        devices=devices,
    )
    return profile, problems


def _examine_disk(folder: Path, effort: float, problems: list[Problem]) -> DiskProfile | None:
    def say(level: str, subject: str, text: str) -> None:
        problems.append(Problem(level, subject, f"{folder}: {text}"))

    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        say("error", "folder", f"cannot be made or read ({error.strerror})")
        return None
    if free < LEAST_FREE_NBYTES:
        say("warning", "disk", f"{format_nbytes(free)} are free; a packed store is as large as the model")
    nbytes = min(int(effort * SCRATCH_NBYTES), free // 2)
    if nbytes < 4 * measure.LARGE_NBYTES:
        say("error", "disk", f"{format_nbytes(free)} free is too little to measure reads")
        return None
    try:
        with measure.scratch_file(folder, nbytes, 5 * effort) as (path, write_nbytes_per_s):
            small, large = (  # the better of two, since the disks of virtual machines vary
                max(measure.measure_disk(path, size, depth, effort) for _ in range(2))
                for size, depth in ((measure.SMALL_NBYTES, 1), (measure.LARGE_NBYTES, NUM_READERS))
            )
    except ConfigError as error:
        say("error", "folder", str(error))
        return None
    is_direct = small.is_direct and large.is_direct
    if not is_direct:
        say("warning", "disk", "its file system refuses direct reads (O_DIRECT); the page cache makes them cost more")
    latency_ns = round(measure.SMALL_NBYTES / small.nbytes_per_s * 1e9)
    return DiskProfile(str(folder), free, large.nbytes_per_s, latency_ns, write_nbytes_per_s, is_direct)


def _examine_devices(seconds: float, problems: list[Problem]) -> tuple[DeviceProfile, ...]:
    try:
        devices = measure.measure_devices(seconds)
    except RuntimeError as error:
        problems.append(Problem("warning", "device", f"found but not usable: {str(error).splitlines()[0]}"))
        return ()
    if not devices:
        problems.append(Problem("note", "device", "no CUDA device (or a torch without CUDA): models run on the CPU"))
    return devices
