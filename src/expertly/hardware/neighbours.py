"""Whether other processes, or a hypervisor, disturb what is measured: load average, pressure (PSI), and who takes
processor time.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

MAX_OTHERS, MAX_STOLEN, MAX_PRESSURE = 0.15, 0.03, 0.2
"""Shares that leave figures as they are: of the processors' time that other processes take and that a hypervisor does,
and of the time in which a process waits for a processor.
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the system says at a moment. Seconds count from some time in the past; None: it does not say."""

    time_s: float
    load: float  # processes that ran or waited, on average over the last minute
    own_s: float  # processor time of this process and its children
    busy_s: float | None = None  # of all processes, on the processors that this one may use
    stolen_s: float | None = None
    pressure: float | None = None  # the share of the last ten seconds in which some process waited for a processor


def read_system(proc: Path = Path("/proc")) -> Reading:
    mine = os.times()
    busy_s = stolen_s = pressure = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in (proc / "stat").read_text().splitlines()]
        ticks = [[int(word) for word in words[1:9]] for words in lines if words and words[0] in allowed]
        per_s = os.sysconf("SC_CLK_TCK")
        if ticks:
            user, nice, system, _, _, interrupts, soft, stolen = (sum(column) for column in zip(*ticks, strict=True))
            busy_s, stolen_s = (user + nice + system + interrupts + soft) / per_s, stolen / per_s
    with contextlib.suppress(OSError, ValueError, IndexError):
        first = (proc / "pressure" / "cpu").read_text().splitlines()[0]  # "some avg10=1.53 avg60=0.87 ..."
        pressure = float(first.split()[1].removeprefix("avg10=")) / 100
    own_s = mine.user + mine.system + mine.children_user + mine.children_system
    return Reading(time.monotonic(), os.getloadavg()[0], own_s, busy_s, stolen_s, pressure)


def disturbance(before: Reading, after: Reading, num_cpus: int) -> str | None:
    """What disturbed what was measured between two readings; None: nothing that the system tells of."""
    if before.load > max(1.0, num_cpus / 2):
        return f"{before.load:.1f} processes were running on {num_cpus} CPUs in the minute before"
    if before.pressure is not None and before.pressure > MAX_PRESSURE:
        return f"processes waited for a processor {before.pressure:.0%} of the ten seconds before"
    if before.busy_s is None or after.busy_s is None:
        return None
    whole_s = max(1e-3, after.time_s - before.time_s) * num_cpus
    stolen = ((after.stolen_s or 0.0) - (before.stolen_s or 0.0)) / whole_s
    if stolen > MAX_STOLEN:
        return f"meanwhile the hypervisor took {stolen:.0%} of the processors' time"
    taken = (after.busy_s - before.busy_s - (after.own_s - before.own_s)) / whole_s
    return None if taken <= MAX_OTHERS else f"meanwhile other processes took {taken:.0%} of the processors' time"
