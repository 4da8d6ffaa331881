"""The contract of an eviction policy: it orders the kept experts of one cache, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan
from expertly.policies.base import NO_OPTIONS, Policy
from expertly.policies.known import NOTHING, Known


class EvictionPolicy(Policy, ABC):
    """Orders the kept experts of one cache (a layer's, or all layers'). Experts are dense expert ids.

    The cache owns the accounting; a policy owns its counters, which persist after eviction (docs/conventions.md). No
    policy reads a clock or iterates over a set; ties go to the lowest id.
    """

    family = "eviction"
    needs_future: ClassVar[bool] = False  # it runs in simulations only
    needs_probabilities: ClassVar[bool] = False  # predicted ones
    needs_best: ClassVar[bool] = False  # to be told what is needed before that is kept, as the admission `best` does
    is_sized: ClassVar[bool] = False  # it depends on the capacity that it was made for, which must not change then

    @classmethod
    def of_model(cls, geometry: Geometry, known: Known = NOTHING, texts: Mapping[str, str] = NO_OPTIONS) -> MakePolicy:
        """A function that makes the policies of all caches of one model, with options as the user wrote them. Raises
        ConfigError where an option is wrong, or `known` lacks what the policy needs.
        """
        options = cls.parse(texts)

        def make(capacity: int, layers: Sequence[int]) -> EvictionPolicy:
            popularity = known.popularity
            if len(layers) < geometry.num_layers:
                popularity = {e: num for e, num in popularity.items() if geometry.layer_of[e] in layers}
            return cls.for_cache(geometry, capacity, replace(known, popularity=popularity), options)

        return make

    @classmethod
    def make(
        cls, geometry: Geometry, capacity: int, known: Known = NOTHING, texts: Mapping[str, str] = NO_OPTIONS
    ) -> EvictionPolicy:
        """The policy of a model's only cache. Raises ConfigError where an option is wrong, or `known` lacks what it
        needs.
        """
        return cls.of_model(geometry, known, texts)(capacity, range(geometry.num_layers))

    @classmethod
    def for_cache(cls, geometry: Geometry, capacity: int, known: Known, options: Any) -> EvictionPolicy:
        """The policy of one cache of `capacity` experts; `known.popularity` holds only experts of the cache's layers. A
        policy that uses any of this overrides it.
        """
        return cls()

    @abstractmethod
    def admitted(self, expert: int) -> None:
        """A first segment of the expert is kept from now on."""

    @abstractmethod
    def removed(self, expert: int) -> None:
        """No segment of the expert is kept any more."""

    def used(self, experts: Sequence[int], num_tokens: Sequence[int], batch_tokens: int) -> None:
        """A layer ran `batch_tokens` tokens; each of these experts served so many of them (0: pad tokens only)."""

    def predicted(self, first_expert: int, probabilities: Sequence[float]) -> None:
        """The layer whose first expert has this id will need its experts with these probabilities when it runs next."""

    def expected(self, outlook: Sequence[float]) -> None:
        """How likely each expert of the model, by id, is used again; holds until the next call."""

    @abstractmethod
    def victims(self, protected: Container[int]) -> Iterable[int]:
        """Kept experts outside `protected`, in the order in which they are to be evicted. The cache may stop reading
        early.
        """


MakePolicy = Callable[[int, Sequence[int]], EvictionPolicy]
"""Makes the policy of a cache of so many experts, of these layers."""


class ScoredPolicy(EvictionPolicy):
    """A policy that gives each kept expert a score: the lowest is evicted first, then the lowest id.

    A subclass calls `rescore` when scores have changed. Scored policies serve the admission `best`: they are told what
    a layer needs before anything is decided, and also score experts that are not kept.
    """

    def __init__(self) -> None:
        self._kept: dict[int, float] = {}  # of kept experts
        self._rising: list[tuple[float, int]] = []  # (score, expert) of the same, rising

    def needed(self, experts: Sequence[int], router: RouterRan) -> None:
        """With admission `best`: a layer is about to run with these experts, kept or not, as `router` chose them."""

    def scores(self, experts: Sequence[int]) -> Sequence[float]:
        return [self.score(expert) for expert in experts]

    @abstractmethod
    def score(self, expert: int) -> float:
        """The value of keeping the expert."""

    def admitted(self, expert: int) -> None:
        score = self._kept[expert] = self.score(expert)
        insort(self._rising, (score, expert))

    def removed(self, expert: int) -> None:
        del self._rising[bisect_left(self._rising, (self._kept.pop(expert), expert))]

    def rescore(self, experts: Iterable[int]) -> None:
        """The scores of these experts, kept or not, have changed."""
        kept, rising = self._kept, self._rising
        for expert in experts:
            before = kept.get(expert)
            if before is not None and (score := self.score(expert)) != before:
                del rising[bisect_left(rising, (before, expert))]
                insort(rising, (score, expert))
                kept[expert] = score

    def victims(self, protected: Container[int]) -> Iterator[int]:
        return (expert for _, expert in list(self._rising) if expert not in protected)

    def cheapest(self, protected: Container[int], most: int) -> list[tuple[float, int]]:
        """(score, expert) of the kept experts outside `protected`, by rising score, then id: at most so many."""
        return list(islice((entry for entry in self._rising if entry[1] not in protected), most))


class DenseScoredPolicy(ScoredPolicy):
    """A ScoredPolicy of a whole model, where many scores change at a time: `all_scores` computes them when they are
    asked for.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        # 0 for kept experts: added to scores, it leaves only these finite.
        self._barrier = np.full(geometry.num_experts, np.inf, np.float32)

    @classmethod
    def for_cache(cls, geometry: Geometry, capacity: int, known: Known, options: Any) -> EvictionPolicy:
        return cls(geometry)

    @abstractmethod
    def all_scores(self) -> npt.NDArray[np.floating[Any]]:
        """The score of every expert by dense id. Callers must not write it."""

    def admitted(self, expert: int) -> None:
        self._barrier[expert] = 0

    def removed(self, expert: int) -> None:
        assert not self._barrier[expert]
        self._barrier[expert] = np.inf

    def rescore(self, experts: Iterable[int]) -> None:
        """Scores are computed when they are asked for."""

    def score(self, expert: int) -> float:
        return float(self.all_scores()[expert])

    def scores(self, experts: Sequence[int]) -> Sequence[float]:
        values: list[float] = self.all_scores()[list(experts)].tolist()
        return values

    def victims(self, protected: Container[int]) -> Iterator[int]:
        scores = self.all_scores() + self._barrier
        while entries := _cheapest(scores, protected, 1):
            yield entries[0][1]

    def cheapest(self, protected: Container[int], most: int) -> list[tuple[float, int]]:
        return _cheapest(self.all_scores() + self._barrier, protected, most)


def _cheapest(scores: npt.NDArray[np.floating[Any]], protected: Container[int], most: int) -> list[tuple[float, int]]:
    """The lowest finite scores outside `protected`, rising, of equal ones the lowest id first; sets them infinite."""
    entries: list[tuple[float, int]] = []
    while len(entries) < most:
        expert = int(scores.argmin())
        score = float(scores[expert])
        if score == np.inf:
            break
        if expert not in protected:
            entries.append((score, expert))
        scores[expert] = np.inf
    return entries
