"""Least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence


class LRU:
    """Recency is the call of `used`, a token in decode. Within one call the busiest expert is the most recent, and
    ties go to the lowest id. An expert admitted and not yet used counts as just used.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def admitted(self, expert: int) -> None:
        self._order[expert] = None

    def removed(self, expert: int) -> None:
        del self._order[expert]

    def used(self, experts: Sequence[int], num_tokens: Sequence[int], batch_tokens: int) -> None:
        order = self._order
        for num, expert in sorted(zip(num_tokens, experts, strict=True)):
            if num and expert in order:
                order.move_to_end(expert)

    def predicted(self, first_expert: int, probabilities: Sequence[float]) -> None:
        """Nothing is learned."""

    def expected(self, outlook: Sequence[float]) -> None:
        """Nothing is learned."""

    def victims(self, protected: Container[int]) -> Iterator[int]:
        return (expert for expert in self._order if expert not in protected)
