"""The median of a few measurements, and how sure it is, whatever they are spread like."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """`low` is at most the true median, and `high` at least it, in CONFIDENCE of all cases each; with fewer than five
    values they are the least and the largest, which is less sure.
    """

    median: float
    low: float
    high: float


def median_interval(values: Sequence[float]) -> Interval:
    """Of independent values, by their order: how many of n lie above the median is a fair coin thrown n times."""
    ordered = sorted(values)
    count = len(ordered)
    below = 0.0
    place = count - 1
    for number in range(count):
        below += comb(count, number) / 2**count
        if below >= CONFIDENCE:
            place = number
            break
    return Interval(statistics.median(ordered), ordered[count - 1 - place], ordered[place])
