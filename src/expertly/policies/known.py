"""What a policy may be told beyond what it sees: a profile, a seed and, in simulations only, the future."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from expertly.policies.allocation.moepic import SplitPlan
    from expertly.policies.eviction.lcp import LCPOptions
    from expertly.policies.eviction.reuse import ReuseModel
    from expertly.policies.learned import LearnedState

NEVER = 1 << 62
"""The step of a next use that does not come."""


class Future(Protocol):
    """The demands to come. A step is one layer of one iteration, counted over the run; experts are dense ids."""

    step: int  # the running one

    def next_use(self, expert: int) -> int:
        """The step at which an expert that the running step needs is needed again, or NEVER."""
        ...

    def needs(self, ahead: int) -> tuple[int, list[int]] | None:
        """(layer, experts by their number in the layer, in router order) of step `step + ahead`; None: past the end."""
        ...


@dataclass(frozen=True, slots=True)
class Usage:
    """What a training part shows of each layer's decode, for an allocation."""

    misses: tuple[npt.NDArray[np.int64], ...]  # [E + 1] of each: demands that an LRU cache of s = 0..E experts misses
    recall: tuple[float, ...]  # share of what a layer needed that the system's predictor named
    origin: str  # in words


@dataclass(frozen=True, slots=True)
class Known:
    """Given to the makers of policies and predictors; each takes what it needs and says so where it is missing."""

    popularity: Mapping[int, int] = field(default_factory=dict)  # tokens that each expert served in a training part
    seed: int = 0
    future: Future | None = None
    learned: LearnedState | None = None  # of the predictor's own class (Predictor.weights), if it was trained before
    usage: Usage | None = None  # of the layers in a training part; None: there is none
    reuse: ReuseModel | None = None  # what a training part taught about reuse
    priority: LCPOptions | None = None  # of the caches, where they go by it: an allocation ranks experts as they do
    plan: SplitPlan | None = None  # what layers keep at the start, for an allocation that takes it


NOTHING = Known()
