"""Which predicted expert is loaded first. `PREFETCHES` has the orders by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from expertly.policies.base import NO_OPTIONS, Policy, PolicyOptions
from expertly.policies.registry import PolicyRegistry


class PrefetchOrder(Policy, ABC):
    """Orders the prefetch queue. Made with its options."""

    family = "prefetch"

    def __init__(self, options: Any = PolicyOptions()) -> None: ...

    @classmethod
    def make(cls, given: Mapping[str, str] = NO_OPTIONS) -> PrefetchOrder:
        """One with these options, as the user wrote them. Raises ConfigError."""
        return cls(cls.parse(given))

    @abstractmethod
    def priority(self, score: float, layers_to_go: int) -> float:
        """The priority of an expert with this score, 1 or more layers before its layer runs: the highest is loaded
        first. Never falls as the score rises.
        """
        ...


class ByScore(PrefetchOrder):
    """The highest score first, whichever layer it is of; the predictor may have weighed the distance itself."""

    name = "score"

    def priority(self, score: float, layers_to_go: int) -> float:
        return score


class ByProximity(PrefetchOrder):
    """The highest p / (l - l_now) first, for scores that are probabilities (fMoE, section 4.5)."""

    name = "proximity"

    def priority(self, score: float, layers_to_go: int) -> float:
        return score / layers_to_go


PREFETCHES: PolicyRegistry[PrefetchOrder] = PolicyRegistry(PrefetchOrder, "expertly.prefetches", (ByScore, ByProximity))
