"""Any kept expert goes, with equal chance: the baseline every policy must beat."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
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

    def predicted(self, first_expert: int, probabilities: Sequence[float]) -> None:
        """Nothing is learned."""

    def expected(self, outlook: Sequence[float]) -> None:
        """Nothing is learned."""

    def victims(self, protected: Container[int]) -> Iterator[int]:
        candidates = [e for e in self._kept if e not in protected]  # a dict keeps its order: as repeatable as sorted
        while candidates:
            chosen = int(self._random.random() * len(candidates))
            candidates[chosen], candidates[-1] = candidates[-1], candidates[chosen]
            yield candidates.pop()
