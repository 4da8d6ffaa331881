"""How many processors a process may run on, and how many of these it may really use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def allowed_cpus() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def granted_cpus(cgroup: Path = _CGROUP) -> int:
    """At least 1. A quota of one and a half processors counts as one: with two threads both would be held back.

    Of the limits of a process's groups the one at the root that it sees is looked at, which is its container's.
    """
    quota = _quota(cgroup)
    return allowed_cpus() if quota is None else max(1, min(allowed_cpus(), int(quota)))


def _quota(cgroup: Path) -> float | None:
    """Processors, None where there is no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_us, period_us = (int((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return None if quota_us <= 0 else quota_us / period_us
    return None
