"""Decode steps of one way beside those of another, run just before: how much longer they took, if equally hard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log, sqrt
from statistics import fmean, median
from typing import NamedTuple

_CLIP = 3.0
"""Standard deviations from the median, beyond which a time is an accident: it counts as if it were there."""
_DEVIATION = 1.4826
"""A normal distribution's standard deviation, in median absolute deviations."""
_LEAST_ERROR = 0.01
"""Of a contrast: passes that happen to be alike prove no more."""
_FADE = 0.85
"""What a contrast weighs beside the one after it."""


class Pass(NamedTuple):
    """One decode step."""

    took_ns: int
    difficulty: float


class Contrast(NamedTuple):
    """The logarithm of a ratio of times, its standard error, and from how many passes."""

    log_ratio: float
    error: float
    num_passes: int

    def is_clear(self, least: float, errors: float) -> bool:
        """Is one way longer than the other by that share, and by so many standard errors?"""
        return abs(self.log_ratio) > max(log(1 + least), errors * self.error)

    def reversed(self) -> Contrast:
        """Of the inverse ratio."""
        return self._replace(log_ratio=-self.log_ratio)


def slope_of(epochs: Iterable[Sequence[Pass]]) -> float:
    """What one more of difficulty costs, in nanoseconds, within epochs; never less than 0."""
    products = squares = 0.0
    for passes in epochs:
        mean_x, mean_y = fmean(one.difficulty for one in passes), fmean(one.took_ns for one in passes)
        products += sum((one.difficulty - mean_x) * (one.took_ns - mean_y) for one in passes)
        squares += sum((one.difficulty - mean_x) ** 2 for one in passes)
    return max(0.0, products / squares) if squares else 0.0


def contrast(passes: Sequence[Pass], others: Sequence[Pass], slope: float) -> Contrast:
    """How much longer the first took than the others; at least two each. `slope`: of time by difficulty."""
    both = [*passes, *others]
    difficulty = fmean(one.difficulty for one in both)
    mean, error = _mean(passes, difficulty, slope)
    other_mean, other_error = _mean(others, difficulty, slope)
    error = sqrt((error / mean) ** 2 + (other_error / other_mean) ** 2 + _LEAST_ERROR**2)
    return Contrast(log(mean / other_mean), error, len(both))


def together(contrasts: Sequence[Contrast]) -> Contrast:
    """Of several, the newest at the end: it weighs most, and the surer the more. Where they disagree by more than their
    errors the error is as much larger.
    """
    weights = [_FADE**age / one.error**2 for age, one in zip(range(len(contrasts) - 1, -1, -1), contrasts, strict=True)]
    total = sum(weights)
    mean = sum(weight * one.log_ratio for weight, one in zip(weights, contrasts, strict=True)) / total
    every = list(zip(weights, contrasts, strict=True))
    error = sqrt(sum((weight * one.error) ** 2 for weight, one in every)) / total
    if len(contrasts) > 1:
        scatter = sum(weight * ((one.log_ratio - mean) / one.error) ** 2 for weight, one in every) / total
        error *= sqrt(max(1.0, scatter * len(contrasts) / (len(contrasts) - 1)))
    return Contrast(mean, error, sum(one.num_passes for one in contrasts))


def _mean(passes: Sequence[Pass], difficulty: float, slope: float) -> tuple[float, float]:
    """Time of a pass that is as hard as that, and its standard error."""
    times = [max(1.0, one.took_ns - slope * (one.difficulty - difficulty)) for one in passes]
    middle = median(times)
    limit = _CLIP * _DEVIATION * median([abs(time - middle) for time in times])
    clipped = [min(max(time, middle - limit), middle + limit) for time in times]
    mean = fmean(clipped)
    variance = sum((time - mean) ** 2 for time in clipped) / (len(clipped) - 1)
    return mean, sqrt(variance / len(clipped))
