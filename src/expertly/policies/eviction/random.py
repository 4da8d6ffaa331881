"""Any kept expert goes, with equal chance: the baseline every policy must beat."""

from __future__ import annotations

from collections.abc import Container, Sequence
from random import Random


class RandomEviction:
    """Seeded: the same demands give the same victims."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)
        self._kept: dict[int, None] = {}

    def admitted(self, expert: int) -> None:
        self._kept[expert] = None

    def removed(self, expert: int) -> None:
        del self._kept[expert]

    def used(self, experts: Sequence[int], num_tokens: Sequence[int], batch_tokens: int) -> None:
        """Nothing is learned."""

    def victims(self, protected: Container[int]) -> list[int]:
        candidates = sorted(e for e in self._kept if e not in protected)
        self._random.shuffle(candidates)
        return candidates
