"""Evicts the least cache priority first (MoEpic, section 3.3, equation 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from expertly.core.geometry import Geometry
from expertly.policies.base import PolicyOptions, option
from expertly.policies.eviction import ScoredPolicy
from expertly.policies.known import Known


@dataclass(frozen=True)
class LCPOptions(PolicyOptions):
    rho: float = option(0.25, "by which a priority falls in `omega` tokens without a use", above=0, below=1)
    omega: float = option(128.0, "tokens", above=0, below=math.inf)


class CachePriority:
    """mu * rho ** (nu / omega): mu tokens served, nu tokens since the last use.

    All priorities of a cache decay at the same rate between uses, so their order changes only at a use. This computes a
    number of the same order that stays the same until the next use: last_use + omega * log(mu) / log(1 / rho), in
    tokens. It never underflows. Powers of two in mu are added separately, so that priorities which the formula makes
    equal (twice the tokens, used `halving` tokens earlier) are equal here.
    """

    __slots__ = ("_halving",)

    def __init__(self, options: LCPOptions = LCPOptions()) -> None:
        self._halving = options.omega / -math.log2(options.rho)  # tokens in which a priority halves

    def __call__(self, count: int, last_use: int) -> float:
        """The priority of an expert that served `count` tokens (at least 1), the last of them token `last_use`."""
        mantissa, exponent = math.frexp(count)
        return (last_use + exponent * self._halving) + math.log2(mantissa) * self._halving


class LCP(ScoredPolicy):
    """The score is the `CachePriority`; an expert that was never used has the lowest."""

    name = "lcp"
    options = LCPOptions

    def __init__(self, options: LCPOptions = LCPOptions()) -> None:
        super().__init__()
        self._priority = CachePriority(options)
        self._count: dict[int, int] = {}
        self._score: dict[int, float] = {}
        self._num_tokens = 0

    @classmethod
    def for_cache(cls, geometry: Geometry, capacity: int, known: Known, options: Any) -> LCP:
        return cls(options)

    def used(self, experts: Sequence[int], num_tokens: Sequence[int], batch_tokens: int) -> None:
        self._num_tokens += batch_tokens
        now, priority = self._num_tokens, self._priority
        for expert, num in zip(experts, num_tokens, strict=True):
            if num:
                count = self._count[expert] = self._count.get(expert, 0) + num
                self._score[expert] = priority(count, now)
        self.rescore(experts)

    def score(self, expert: int) -> float:
        return self._score.get(expert, -math.inf)
