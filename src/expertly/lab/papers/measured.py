"""Numbers that were measured on requests: what is made of them by arithmetic has a 95 % interval, too."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEAST_REQUESTS = 5
"""Of fewer no interval is made: what hangs on them cannot be told."""
DRAWS = 1000


@lru_cache(maxsize=16)
def redrawn(num: int) -> Floats:
    """[DRAWS, num]: how often each of so many requests is in each draw with replacement. The same for the same number,
    so that two numbers of the same requests are drawn together, and what both have in common cancels.
    """
    return np.random.default_rng(0).multinomial(num, np.full(num, 1 / num), DRAWS).astype(np.float64)


@lru_cache(maxsize=4)
def _students(num: int) -> Floats:
    """[DRAWS, num] weights of deviations from a mean: their sums are Student's, and as wide as the mean is."""
    dice = np.random.default_rng(1)
    normal, spread = dice.standard_normal((DRAWS, num)), np.sqrt(dice.chisquare(num - 1, (DRAWS, 1)) / (num - 1))
    found: Floats = normal / spread / np.sqrt(num * (num - 1))
    return found


def _arithmetic(made: Callable[[Any, Any], Any]) -> Callable[[Estimate, float], Estimate]:
    """Of a number and another one: of their values, and of their draws one by one."""

    def with_other(own: Estimate, other: float) -> Estimate:
        with np.errstate(divide="ignore", invalid="ignore"):
            draws = made(own.draws, other.draws if isinstance(other, Estimate) else float(other))
        return Estimate.of(made(float(own), float(other)), draws)

    return with_other


class Estimate(float):
    """A number, and what it is in each draw of the requests that it was measured on (bootstrap)."""

    draws: Floats  # [DRAWS]; NaN where nothing can be said

    @classmethod
    def of(cls, value: float, draws: Floats) -> Estimate:
        made = cls(value)
        made.draws = draws
        return made

    @classmethod
    def around(cls, value: float, draws: Floats) -> Estimate:
        """Of what is larger in every draw than in all requests, as the use of the experts used most is."""
        return cls.of(value, draws + (value - draws.mean()))

    @classmethod
    def mean(cls, sums: npt.NDArray[Any], counts: npt.NDArray[Any] | None = None) -> Estimate:
        """Of all requests: each one's sum, and how much it counts (once, where nothing is said). A request that was
        simulated with several seeds is one.
        """
        counts = np.ones(len(sums)) if counts is None else counts
        weights = redrawn(max(1, len(sums)))
        with np.errstate(divide="ignore", invalid="ignore"):
            draws = (weights @ sums) / (weights @ counts) if len(sums) >= LEAST_REQUESTS else np.full(DRAWS, np.nan)
            return cls.of(float(np.sum(sums) / np.sum(counts)), draws)

    @classmethod
    def percentile(cls, values: npt.NDArray[Any], percent: int, request_of: npt.NDArray[np.int64]) -> Estimate:
        """Of `values`, each of a request (0, 1, ...): the least that `percent` percent of them do not exceed."""
        order = np.argsort(values, kind="stable")
        rising, owners, num = values[order], request_of[order], int(request_of.max()) + 1

        def at(weights: Floats) -> Any:  # [..., num]
            so_far = weights[..., owners].cumsum(axis=-1)
            return rising[(so_far < so_far[..., -1:] * (percent / 100) - 1e-9).sum(axis=-1).clip(max=len(rising) - 1)]

        draws = np.array([at(one) for one in redrawn(num)]) if num >= LEAST_REQUESTS else np.full(DRAWS, np.nan)
        return cls.of(float(at(np.ones(num))), draws)

    @classmethod
    def of_seeds(cls, values: Sequence[float]) -> Estimate:
        """The mean of what no request has a part in, by seed; Student's t says how far off it may be, and of two such
        numbers of the same seeds, how far off their difference.
        """
        each = np.array(values, np.float64)
        mean = each.mean()
        if len(each) < 2:
            return cls.of(float(mean), np.full(DRAWS, np.nan))
        return cls.of(float(mean), mean + _students(len(each)) @ (each - mean))

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 %; None where nothing can be said."""
        known = self.draws[np.isfinite(self.draws)]
        if len(known) < DRAWS / 2:
            return None
        low, high = np.percentile(known, (2.5, 97.5))
        return float(low), float(high)

    def __reduce__(self) -> Any:
        return Estimate.of, (float(self), self.draws)

    __add__ = __radd__ = _arithmetic(operator.add)
    __mul__ = __rmul__ = _arithmetic(operator.mul)
    __sub__ = _arithmetic(operator.sub)
    __rsub__ = _arithmetic(lambda own, other: other - own)
    __truediv__ = _arithmetic(operator.truediv)
    __rtruediv__ = _arithmetic(lambda own, other: other / own)

    def __abs__(self) -> Estimate:
        return Estimate.of(abs(float(self)), np.abs(self.draws))


def joined(function: Callable[..., Any], values: Sequence[float]) -> float:
    """What a function with an `axis` (np.median, np.max) makes of several numbers, of which some may be measured."""
    if not any(isinstance(one, Estimate) for one in values):
        return float(function(np.array(values), axis=0))
    draws = np.stack([one.draws if isinstance(one, Estimate) else np.full(DRAWS, one) for one in values])
    return Estimate.of(float(function(np.array([float(one) for one in values]), axis=0)), function(draws, axis=0))
