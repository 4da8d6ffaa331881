"""Evicts the least frequently used expert."""

from __future__ import annotations

from collections.abc import Sequence

from expertly.policies.eviction import ScoredPolicy


class LFU(ScoredPolicy):
    """Evicts the least frequently used expert. Frequency counts the tokens served since the start, whether it was kept
    or not.
    """

    name = "lfu"

    def __init__(self) -> None:
        super().__init__()
        self._count: dict[int, int] = {}

    def used(self, experts: Sequence[int], num_tokens: Sequence[int], batch_tokens: int) -> None:
        count = self._count
        for expert, num in zip(experts, num_tokens, strict=True):
            if num:
                count[expert] = count.get(expert, 0) + num
        self.rescore(experts)

    def score(self, expert: int) -> float:
        return self._count.get(expert, 0)
