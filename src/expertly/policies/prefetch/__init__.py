"""Which predicted expert is loaded first. One priority a file; `PREFETCHES` has them by name. Imports core only."""

from __future__ import annotations

from collections.abc import Callable

from expertly.policies.prefetch.proximity import by_proximity
from expertly.policies.prefetch.score import by_score
from expertly.policies.registry import Registry

Priority = Callable[[float, int], float]
"""(score, layers to go until the expert's layer runs, from 1) -> the higher, the sooner. Never falls with the score."""

PREFETCHES: Registry[Priority] = Registry(
    "prefetch",
    "expertly.prefetches",
    {"score": by_score, "proximity": by_proximity},
    lambda one: callable(one) and not isinstance(one, type),
    "a function of a score and the layers to go",
)

__all__ = ["PREFETCHES", "Priority", "by_proximity", "by_score"]
