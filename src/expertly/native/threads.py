"""How many processors a process may really use: those that it may run on, and what its cgroup grants it of them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def granted_cpus(cgroup: Path = _CGROUP) -> int:
    """At least 1. A quota of one and a half processors counts as one: with two threads both would be held back.

    Of the limits of a process's groups the one at the root that it sees is looked at, which is its container's.
    """
    num = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return num if quota is None else max(1, min(num, int(quota)))


def _quota(cgroup: Path) -> float | None:
    """Processors, None where there is no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_us, period_us = (int((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return None if quota_us <= 0 else quota_us / period_us
    return None
