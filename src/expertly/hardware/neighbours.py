"""Whether other processes, or a hypervisor, disturb what is measured: load average, pressure (PSI), processor time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from expertly.core.resources import allowed_cpus

QUIET_S = 1.0
"""How long a moment is."""

MAX_OTHERS, MAX_STOLEN, MAX_PRESSURE = 0.15, 0.03, 0.2
"""Shares that leave figures as they are: of the processors' time that other processes take and that a hypervisor does,
and of the time in which a process waits for a processor.
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the system says at a moment. Seconds count from some time in the past; None: it does not say."""

    time_s: float
    load: float
    """Processes that ran or waited, on average over the last minute."""
    own_s: float
    """Processor time of this process and its children."""
    busy_s: float | None = None
    """Processor time of all processes, on the processors that this one may use."""
    stolen_s: float | None = None
    pressure_s: float | None = None
    """Time in which some process waited for a processor."""


def read_system(proc: Path = Path("/proc")) -> Reading:
    mine = os.times()
    busy_s = stolen_s = pressure_s = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in (proc / "stat").read_text().splitlines()]
        ticks = [[int(word) for word in words[1:9]] for words in lines if words and words[0] in allowed]
        per_s = os.sysconf("SC_CLK_TCK")
        if ticks:
            user, nice, system, _, _, interrupts, soft, stolen = (sum(column) for column in zip(*ticks, strict=True))
            busy_s, stolen_s = (user + nice + system + interrupts + soft) / per_s, stolen / per_s
    with contextlib.suppress(OSError, ValueError, IndexError):
        first = (proc / "pressure" / "cpu").read_text().splitlines()[0]
        pressure_s = int(first.rpartition("total=")[2]) / 1e6
    own_s = mine.user + mine.system + mine.children_user + mine.children_system
    return Reading(time.monotonic(), os.getloadavg()[0], own_s, busy_s, stolen_s, pressure_s)


class QuietWatch:
    """Looks before and while something is measured: `wait`, measure, `disturbance`."""

    def __init__(
        self,
        read: Callable[[], Reading] | None = None,
        sleep: Callable[[float], object] = time.sleep,
        num_cpus: int | None = None,
    ) -> None:
        self._read = read or read_system
        self._sleep = sleep
        self._num_cpus = num_cpus or allowed_cpus()
        self._begin = self._read()
        self._before: str | None = None

    @property
    def can_tell(self) -> bool:
        """Whether the system says who takes its processors."""
        return self._begin.busy_s is not None

    def wait(self, seconds: float) -> None:
        """Wait for a quiet moment, at most so long."""
        last = self._read()
        end_s = last.time_s + seconds
        while True:
            self._sleep(QUIET_S)
            now = self._read()
            self._before = self._load(now) or self._pressure(last, now) or self._taken(last, now)
            self._begin = last = now
            if self._before is None or now.time_s >= end_s:
                return

    def disturbance(self) -> str | None:
        """What disturbed before or since `wait` returned; None: nothing that the system tells of."""
        if self._before is not None:
            return f"before measuring {self._before}"
        taken = self._taken(self._begin, self._read())
        return None if taken is None else f"while measuring {taken}"

    def _load(self, now: Reading) -> str | None:
        if now.load <= max(1.0, self._num_cpus / 2):
            return None
        return f"{now.load:.1f} processes were running on {self._num_cpus} CPUs in the last minute"

    def _pressure(self, last: Reading, now: Reading) -> str | None:
        """Of a moment in which this process sleeps: while it measures its own threads wait for each other."""
        if last.pressure_s is None or now.pressure_s is None:
            return None
        share = (now.pressure_s - last.pressure_s) / max(1e-3, now.time_s - last.time_s)
        return None if share <= MAX_PRESSURE else f"processes waited for a processor {share:.0%} of the time"

    def _taken(self, last: Reading, now: Reading) -> str | None:
        if last.busy_s is None or now.busy_s is None:
            return None
        whole_s = max(1e-3, now.time_s - last.time_s) * self._num_cpus
        others = (now.busy_s - last.busy_s - (now.own_s - last.own_s)) / whole_s
        stolen = ((now.stolen_s or 0.0) - (last.stolen_s or 0.0)) / whole_s
        if stolen > MAX_STOLEN:
            return f"the hypervisor took {stolen:.0%} of the processors' time"
        return None if others <= MAX_OTHERS else f"other processes took {others:.0%} of the processors' time"
