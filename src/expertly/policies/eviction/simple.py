"""Policies of a few lines: LRU, LFU, random eviction and Belady."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from itertools import filterfalse
from random import Random
from typing import Any

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan
from expertly.policies.eviction.base import EvictionPolicy, ScoredPolicy
from expertly.policies.known import NEVER, Future, Known


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


class RandomEviction(EvictionPolicy):
    """Evicts any kept expert, with equal chance: the baseline that every policy must beat. Seeded: the same demands
    give the same victims.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)
        self._kept: dict[int, None] = {}

    @classmethod
    def for_cache(cls, geometry: Geometry, capacity: int, known: Known, options: Any) -> RandomEviction:
        return cls(known.seed)

    def admitted(self, expert: int) -> None:
        self._kept[expert] = None

    def removed(self, expert: int) -> None:
        del self._kept[expert]

    def victims(self, protected: Container[int]) -> Iterator[int]:
        candidates = [e for e in self._kept if e not in protected]  # in the order of admission, which repeats
        while candidates:
            chosen = int(self._random.random() * len(candidates))
            candidates[chosen], candidates[-1] = candidates[-1], candidates[chosen]
            yield candidates.pop()


class Belady(ScoredPolicy):
    """Evicts the expert that is used again last (Belady, 1966). Needs the future, which only a simulation has. Optimal
    with the admission `best`: after a layer has run, the cache holds those of the kept and needed experts that are used
    again soonest.
    """

    name = "belady"
    needs_future = True
    needs_best = True

    def __init__(self, future: Future) -> None:
        super().__init__()
        self._future = future
        self._next_use: dict[int, int] = {}

    @classmethod
    def for_cache(cls, geometry: Geometry, capacity: int, known: Known, options: Any) -> Belady:
        if known.future is None:
            raise ConfigError("eviction 'belady': needs to know the demands to come; only a simulation does")
        return cls(known.future)

    def needed(self, experts: Sequence[int], router: RouterRan) -> None:
        for expert in experts:
            self._next_use[expert] = self._future.next_use(expert)  # after the running layer
        self.rescore(experts)

    def score(self, expert: int) -> float:
        return -self._next_use.get(expert, NEVER)
