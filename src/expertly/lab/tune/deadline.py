"""Time that is shared out: a limit for everything, and a part of what is left of it for each stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]
"""Seconds, rising."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of a clock."""

    clock: Clock
    end_s: float

    @classmethod
    def after(cls, clock: Clock, seconds: float) -> Deadline:
        return cls(clock, clock() + seconds)

    @property
    def left_s(self) -> float:
        """Never under 0."""
        return max(0.0, self.end_s - self.clock())

    @property
    def is_over(self) -> bool:
        return self.clock() >= self.end_s

    def share(self, part: float) -> Deadline:
        """Of what is left now, the first `part`."""
        return Deadline(self.clock, self.clock() + part * self.left_s)
