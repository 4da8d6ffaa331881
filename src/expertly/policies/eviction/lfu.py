"""Least frequently used goes first."""

from __future__ import annotations

from collections.abc import Sequence

from expertly.policies.eviction.base import ScoredPolicy


class LFU(ScoredPolicy):
    """Frequency counts tokens served since the start, whether kept or not."""

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
