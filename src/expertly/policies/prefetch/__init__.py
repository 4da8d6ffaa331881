"""Which predicted expert is loaded first. One priority a file; `PREFETCHES` has them by name. Imports core only."""

from __future__ import annotations

from collections.abc import Callable

from expertly.policies.prefetch.proximity import by_proximity
from expertly.policies.prefetch.score import by_score

Priority = Callable[[float, int], float]
"""(score, layers to go until the expert's layer runs, from 1) -> the higher, the sooner. Never falls with the score."""

PREFETCHES: dict[str, Priority] = {"score": by_score, "proximity": by_proximity}

__all__ = ["PREFETCHES", "Priority", "by_proximity", "by_score"]
