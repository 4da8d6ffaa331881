"""Memory as users state it, and the memory and processors that this process may have."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from pathlib import Path

from expertly.core.errors import BudgetError, ConfigError

NUM_READERS = 4
"""Reader threads of an engine, and reads of one span. Disks are at their best from 4 in flight (`expertly doctor`)."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_CGROUP = Path("/sys/fs/cgroup")
_AMOUNT = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(%|[a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_memory(memory: str | int, whole_nbytes: int, field: str = "memory") -> int | None:
    """Bytes of "25%" (of `whole_nbytes`), "1.5GiB" or a number of bytes; None for "auto". Raises ConfigError naming the
    field.
    """
    if memory == "auto":
        return None
    match = _AMOUNT.fullmatch(str(memory))
    unit = match.group(2).lower() if match else None
    accepted = 'accepted are a share ("25%"), an amount ("1.5GiB", "800MB") and "auto"'
    if match is None or (unit != "%" and unit not in _UNITS):
        raise ConfigError(f"{field}={memory!r:.80}: {accepted}")
    amount = float(match.group(1))
    nbytes = int(whole_nbytes * amount / 100) if unit == "%" else int(amount * _UNITS[unit])
    if nbytes < 1:
        raise BudgetError(f"{field}={memory!r}: no memory at all; {accepted}")
    return nbytes


def parse_size(size: str | int, whole_nbytes: int, field: str, whole: str) -> int:
    """Bytes of an amount, or of a share of `whole`, as `parse_memory` has them. Raises ConfigError naming the field."""
    nbytes = None
    with contextlib.suppress(ConfigError, BudgetError):
        nbytes = parse_memory(size, whole_nbytes)
    if nbytes is None:
        raise ConfigError(f'{field}={size!r:.80}: accepted: an amount ("20GiB"), or a share ("25%") of {whole}')
    return nbytes


def available_host_nbytes() -> int:
    """Host memory this process may still take: the system's free memory, within all limits of its cgroups."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")  # without what the page cache could give
    with contextlib.suppress(OSError):  # no /proc
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        free = next((int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:"), free)
    for limit, usage, cache in _cgroup_limits():
        free = min(free, limit - usage + cache)
    return max(0, free)


def _cgroup_limits() -> list[tuple[int, int, int]]:
    """(limit, usage, droppable page cache) in bytes of each memory cgroup we are in, version 1 and 2."""
    limits = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / path.lstrip("/")
        for level in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file; "max": no limit
                limit, usage = (int((level / name).read_text()) for name in names)
                inactive = 0
                with contextlib.suppress(OSError, ValueError):  # a limit counts all the same
                    stat = dict(line.split()[:2] for line in (level / "memory.stat").read_text().splitlines())
                    inactive = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
                limits.append((limit, usage, inactive))
            if level == root:
                break
    return limits


def allowed_cpus() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The system's name for the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def granted_cpus(cgroup: Path = _CGROUP) -> int:
    """Processors that this process may fully use, at least 1: also within its container's quota (of the cgroup at the
    root that it sees). One and a half count as one, since of two threads both would be throttled.
    """
    quota = _quota(cgroup)
    return allowed_cpus() if quota is None else max(1, min(allowed_cpus(), int(quota)))


def _quota(cgroup: Path) -> float | None:
    """Processors; None where there is no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_us, period_us = (int((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return None if quota_us <= 0 else quota_us / period_us
    return None
