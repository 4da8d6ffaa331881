"""Least cache priority goes first (MoEpic, section 3.3, equation 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from expertly.policies.eviction.base import ScoredPolicy
from expertly.policies.eviction.priority import CachePriority


class LCP(ScoredPolicy):
    """The score is the `CachePriority`; an expert that was never used has the least."""

    def __init__(self, rho: float = 0.25, omega: float = 128.0) -> None:
        super().__init__()
        self._priority = CachePriority(rho, omega)
        self._count: dict[int, int] = {}
        self._score: dict[int, float] = {}
        self._num_tokens = 0

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
