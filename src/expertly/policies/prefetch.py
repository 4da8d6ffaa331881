"""Which predicted expert is loaded first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from expertly.policies.base import NO_OPTIONS, Policy, PolicyOptions


class PrefetchOrder(Policy, ABC):
    """Orders the prefetch queue. Made with its options."""

    family = "prefetch"
    needs_probabilities: ClassVar[bool] = False  # whether scores must be probabilities

    def __init__(self, options: Any = PolicyOptions()) -> None: ...

    @classmethod
    def make(cls, given: Mapping[str, str] = NO_OPTIONS) -> PrefetchOrder:
        """One with these options, as the user wrote them. Raises ConfigError."""
        return cls(cls.parse(given))

    @abstractmethod
    def priority(self, score: float, layers_to_go: int) -> float:
        """The priority of an expert with this score, 1 or more layers before its layer runs: the highest is loaded
        first, of equal ones the one that was predicted first. Never falls as the score rises.
        """


class ByScore(PrefetchOrder):
    """The highest score first, whichever layer it is of; the predictor may have weighed the distance itself."""

    name = "score"

    def priority(self, score: float, layers_to_go: int) -> float:
        return score


class FirstIn(PrefetchOrder):
    """First in, first out: of equal priorities the queue takes the one that came first (ProMoE, section 5)."""

    name = "fifo"

    def priority(self, score: float, layers_to_go: int) -> float:
        return 0.0
