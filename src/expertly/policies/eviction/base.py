"""The contract of an eviction policy: it orders the kept experts of one scope, and nothing else."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the kept experts of one cache (a layer's, or all layers'). Experts are dense expert ids.

    The cache owns the accounting; a policy owns its counters, which persist after eviction (SYSTEMS, Counters).
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


class ScoredPolicy:
    """A policy that is a score a kept expert: the lowest goes first, then the lowest id."""

    def __init__(self) -> None:
        self._kept: dict[int, None] = {}

    def admitted(self, expert: int) -> None:
        self._kept[expert] = None

    def removed(self, expert: int) -> None:
        del self._kept[expert]

    def score(self, expert: int) -> float:
        """What keeping the expert is worth."""
        raise NotImplementedError

    def victims(self, protected: Container[int]) -> Iterable[int]:
        score = self.score
        return [expert for _, expert in sorted((score(e), e) for e in self._kept if e not in protected)]
