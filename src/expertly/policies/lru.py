"""Evicts the least recently used expert."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from itertools import filterfalse

from expertly.policies.eviction import EvictionPolicy


class LRU(EvictionPolicy):
    """Evicts the least recently used expert. Recency counts calls of `used`: a token in decode. Within one call the
    busiest expert is the most recent, and ties go to the lowest id. An expert that was admitted and not used yet counts
    as just used.
    """

    name = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def admitted(self, expert: int) -> None:
        self._order[expert] = None

    def removed(self, expert: int) -> None:
        del self._order[expert]

    def used(self, experts: Sequence[int], num_tokens: Sequence[int], batch_tokens: int) -> None:
        order = self._order
        if num_tokens.count(1) == len(num_tokens):  # a token in decode
            rising = sorted(experts)
        else:
            rising = [expert for num, expert in sorted(zip(num_tokens, experts, strict=True)) if num]
        for expert in rising:
            if expert in order:
                order.move_to_end(expert)

    def victims(self, protected: Container[int]) -> Iterator[int]:
        return filterfalse(protected.__contains__, self._order)
