"""Least cache priority goes first (MoEpic, section 3.3, equation 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from expertly.policies.eviction.base import ScoredPolicy


class LCP(ScoredPolicy):
    """Priority mu * rho ** (nu / omega): mu tokens served, nu tokens since the last use.

    All priorities of a cache decay at the same rate between uses, so their order only changes at a use: it is
    kept as last_use + omega * log(mu) / log(1 / rho), in tokens, which never underflows. The powers of two in mu are
    added apart: the priorities the formula makes equal (twice the tokens, `halving` tokens earlier) stay equal.
    """

    def __init__(self, rho: float = 0.25, omega: float = 128.0) -> None:
        super().__init__()
        self._halving = omega / -math.log2(rho)  # tokens in which a priority halves
        self._count: dict[int, int] = {}
        self._score: dict[int, float] = {}
        self._num_tokens = 0

    def used(self, experts: Sequence[int], num_tokens: Sequence[int], batch_tokens: int) -> None:
        self._num_tokens += batch_tokens
        now, halving = self._num_tokens, self._halving
        for expert, num in zip(experts, num_tokens, strict=True):
            if num:
                count = self._count[expert] = self._count.get(expert, 0) + num
                mantissa, exponent = math.frexp(count)
                self._score[expert] = (now + exponent * halving) + math.log2(mantissa) * halving
        self.rescore(experts)

    def score(self, expert: int) -> float:
        return self._score.get(expert, -math.inf)
