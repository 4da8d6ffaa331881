"""The contract of an eviction policy: it orders the kept experts of one scope, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Sequence
from heapq import heapify, heappop
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the kept experts of one cache (a layer's, or all layers'). Experts are dense expert ids.

    The cache owns the accounting; a policy owns its counters, which persist after eviction (docs/conventions.md).
    No policy reads a clock or iterates over a set; ties go to the lowest id.
    """

    def admitted(self, expert: int) -> None:
        """A first segment of the expert is kept from now on."""

    def removed(self, expert: int) -> None:
        """No segment of the expert is kept any more."""

    def used(self, experts: Sequence[int], num_tokens: Sequence[int], batch_tokens: int) -> None:
        """After a layer ran `batch_tokens` tokens: these experts served so many of them each (0: pad tokens only)."""

    def victims(self, protected: Container[int]) -> Iterable[int]:
        """Kept experts outside `protected`, the one to go first first. The cache may stop reading early."""


class ScoredPolicy(ABC):
    """A policy that is a score a kept expert: the lowest goes first, then the lowest id.

    A subclass calls `rescore` when the score of an expert has changed. Scored policies serve the admission `best`
    (control.admission): they are told what a layer needs before anything is decided, and value what is not kept, too.
    """

    def __init__(self) -> None:
        self._kept: dict[int, float] = {}  # its score

    def admitted(self, expert: int) -> None:
        self._kept[expert] = self.score(expert)

    def removed(self, expert: int) -> None:
        del self._kept[expert]

    def rescore(self, expert: int) -> None:
        """Take the new score of the expert, kept or not."""
        if expert in self._kept:
            self._kept[expert] = self.score(expert)

    def needed(self, experts: Sequence[int]) -> None:  # noqa: B027 - nothing to do for most
        """A layer is about to run with these experts, kept or not."""

    @abstractmethod
    def score(self, expert: int) -> float:
        """What keeping the expert is worth."""

    def victims(self, protected: Container[int]) -> Iterator[int]:
        return (expert for _, expert in self.scored_victims(protected))

    def scored_victims(self, protected: Container[int]) -> Iterator[tuple[float, int]]:
        """(score, expert) of the kept experts outside `protected`, by rising score, then id."""
        heap = list(zip(self._kept.values(), self._kept, strict=True))
        heapify(heap)  # few are taken of the hundreds that a cache over all layers holds
        while heap:
            entry = heappop(heap)
            if entry[1] not in protected:
                yield entry
