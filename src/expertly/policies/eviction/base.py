"""The contract of an eviction policy: it orders the kept experts of one cache, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import tee
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
    is_scored: ClassVar[bool] = False
    """Whether it is a ScoredPolicy, whose scores the admission `best` compares."""
    needs_future: ClassVar[bool] = False
    """Whether it needs the future, so that it runs in simulations only."""
    needs_probabilities: ClassVar[bool] = False
    """Whether it needs predicted probabilities."""
    needs_best: ClassVar[bool] = False
    """Whether it must be told what is needed before that is kept, as the admission `best` does."""
    is_sized: ClassVar[bool] = False
    """Whether it depends on the capacity that it was made for, which must not change then."""

    @classmethod
    def of_model(cls, geometry: Geometry, known: Known = NOTHING, given: Mapping[str, str] = NO_OPTIONS) -> MakePolicy:
        """A function that makes the policies of all caches of one model, with options as the user wrote them. Raises
        ConfigError where an option is wrong, or `known` lacks what the policy needs.
        """
        options = cls.parse(given)

        def make(capacity: int, layers: Sequence[int]) -> EvictionPolicy:
            popularity = known.popularity
            if len(layers) < geometry.num_layers:
                popularity = {e: num for e, num in popularity.items() if geometry.layer_of_expert(e) in layers}
            return cls.for_cache(geometry, capacity, replace(known, popularity=popularity), options)

        return make

    @classmethod
    def make(
        cls, geometry: Geometry, capacity: int, known: Known = NOTHING, given: Mapping[str, str] = NO_OPTIONS
    ) -> EvictionPolicy:
        """The policy of a model's only cache. Raises ConfigError where an option is wrong, or `known` lacks what it
        needs.
        """
        return cls.of_model(geometry, known, given)(capacity, range(geometry.num_layers))

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

_Entry = tuple[float, int]  # (score, expert)

_MANY = 64
"""Kept experts from which on sorting all of them costs more than keeping a heap."""
_NEVER = np.inf  # the score of what is not kept, among victims
_FEW = 16
"""Victims up to which searching an array for the next costs less than sorting it."""


class ScoredPolicy(EvictionPolicy):
    """A policy that gives each kept expert a score: the lowest is evicted first, then the lowest id.

    A subclass calls `rescore` when scores have changed. Scored policies serve the admission `best`: they are told what
    a layer needs before anything is decided, and also score experts that are not kept.
    """

    is_scored = True

    def __init__(self) -> None:
        self._kept: dict[int, float] = {}  # expert -> score
        # A cache over all layers keeps hundreds of experts and evicts a few. So once there are many, each has one live
        # entry in a heap, no higher than its score: a score that rises costs nothing until its entry comes up.
        self._has_heap = False
        self._heap: list[_Entry] = []
        self._live: dict[int, _Entry] = {}
        # What questions took out of the heap, by rising score: mostly protected experts, which the next passes again.
        self._out: list[_Entry] = []

    def needed(self, experts: Sequence[int], router: RouterRan) -> None:
        """With admission `best`: a layer is about to run with these experts, kept or not, as `router` chose them."""

    def scores(self, experts: Sequence[int]) -> Sequence[float]:
        return [self.score(expert) for expert in experts]

    @abstractmethod
    def score(self, expert: int) -> float:
        """The value of keeping the expert."""

    def admitted(self, expert: int) -> None:
        self._enter({expert: self.score(expert)})

    def removed(self, expert: int) -> None:
        del self._kept[expert]

    def rescore(self, experts: Iterable[int]) -> None:
        """The scores of these experts, kept or not, have changed."""
        kept, score = self._kept, self.score
        self._enter({expert: score(expert) for expert in experts if expert in kept})

    def victims(self, protected: Container[int]) -> Iterator[int]:
        return (expert for _, expert in self.scored_victims(protected))

    def scored_victims(self, protected: Container[int]) -> Iterator[tuple[float, int]]:
        """(score, expert) of the kept experts outside `protected`, by rising score, then id. The caller reads them
        before it calls anything but `removed`, and before it asks again.
        """
        if not self._has_heap:
            if len(self._kept) < _MANY:
                some = list(zip(self._kept.values(), self._kept, strict=True))
                heapify(some)
                while some:
                    entry = heappop(some)
                    if entry[1] not in protected:
                        yield entry
                return
            self._has_heap = True
            self._begin_anew()
        heap, live, kept = self._heap, self._live, self._kept
        before, out, num_seen = self._out, list[_Entry](), 0
        self._out = out
        try:
            while heap or num_seen < len(before):
                if num_seen < len(before) and not (heap and heap[0] < before[num_seen]):
                    entry = before[num_seen]
                    num_seen += 1
                else:
                    entry = heappop(heap)
                expert = entry[1]
                if live.get(expert) is not entry:
                    continue
                score = kept.get(expert)
                if score is None:
                    del live[expert]
                elif score > entry[0]:
                    live[expert] = entry = (score, expert)
                    heappush(heap, entry)
                else:
                    out.append(entry)
                    if expert not in protected:
                        yield entry
        finally:
            out += before[num_seen:]

    def _enter(self, scores: dict[int, float]) -> None:
        self._kept.update(scores)
        if not self._has_heap:
            return
        heap, live = self._heap, self._live
        for expert, score in scores.items():
            entry = live.get(expert)
            if entry is None or score < entry[0]:
                entry = live[expert] = (score, expert)
                heappush(heap, entry)
        if len(heap) > 2 * len(self._kept) + 64:  # most are void
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._heap = [(score, expert) for expert, score in self._kept.items()]
        self._live = {entry[1]: entry for entry in self._heap}
        self._out.clear()
        heapify(self._heap)


class DenseScoredPolicy(ScoredPolicy):
    """A ScoredPolicy of a whole model, where many scores change at a time: `all_scores` computes them when they are
    asked for.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self._barrier = np.full(num_experts, np.inf, np.float32)
        """0 for kept experts: added to scores, it leaves only these finite."""

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
        return self._found(self.all_scores(), protected)

    def scored_victims(self, protected: Container[int]) -> Iterator[tuple[float, int]]:
        scores = self.all_scores()
        experts, again = tee(self._found(scores, protected))
        return zip(map(scores.item, experts), again, strict=True)

    def _found(self, scores: npt.NDArray[np.floating[Any]], protected: Container[int]) -> Iterator[int]:
        left = scores + self._barrier
        for _ in range(_FEW):
            expert = int(left.argmin())  # of equal ones the lowest id
            if left[expert] == _NEVER:
                return
            if expert not in protected:
                yield expert
            left[expert] = _NEVER
        experts = np.flatnonzero(left < _NEVER)
        for expert in experts[left[experts].argsort(kind="stable")].tolist():
            if expert not in protected:
                yield expert
