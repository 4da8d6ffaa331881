"""What is worth least by what was learned about its reuse goes first (ours)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import numpy as np

from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan
from expertly.policies.eviction.base import ScoredPolicy
from expertly.policies.reuse.model import ReuseModel

_AT_ONCE = 16
"""Victims put in order at a time beyond the number of those that are protected."""

_MANY = 16
"""Times that: of so many kept experts finding the few to go costs less than putting all in order."""


class Reuse(ScoredPolicy):
    """The score is what `model` says, as seen from the layer that ran last. The caches of one model share it; one that
    holds all experts of the model never asks, and spares itself the learning.
    """

    def __init__(self, geometry: Geometry, model: ReuseModel, capacity: int) -> None:
        super().__init__()
        self._model = model
        self._has_choice = capacity < geometry.num_experts
        self._is_kept = np.zeros(geometry.num_experts, np.bool_)

    @property
    def model(self) -> ReuseModel:
        """What the caches of one model share."""
        return self._model

    @property
    def learned(self) -> ReuseModel:
        return self._model

    def adopt(self, learned: ReuseModel) -> None:
        state = learned.state()
        assert state is not None
        self._model.restore(state)

    def needed(self, experts: Sequence[int], router: RouterRan) -> None:
        if self._has_choice:
            self._model.observe(router)

    def used(self, experts: Sequence[int], num_tokens: Sequence[int], batch_tokens: int) -> None:
        """It was seen when it was needed."""

    def admitted(self, expert: int) -> None:
        self._is_kept[expert] = True

    def removed(self, expert: int) -> None:
        assert self._is_kept[expert]
        self._is_kept[expert] = False

    def rescore(self, experts: Iterable[int]) -> None:
        """Scores are those that the model says when somebody asks."""

    def score(self, expert: int) -> float:
        return float(self._model.worth()[expert])

    def scored_victims(self, protected: Container[int]) -> Iterator[tuple[float, int]]:
        experts = np.flatnonzero(self._is_kept)
        scores = self._model.worth()[experts]
        count = _AT_ONCE + (len(protected) if isinstance(protected, (set, frozenset)) else 0)
        while len(experts):
            some, those, num_left = scores, experts, 0
            if len(experts) > _MANY * count:
                is_among = scores <= np.partition(scores, count)[count]  # with all that are equal to the last
                some, those = scores[is_among], experts[is_among]
                scores, experts = scores[~is_among], experts[~is_among]
                num_left = len(experts)
            order = some.argsort(kind="stable")  # ids rise: ties go to the lowest
            for first in range(0, len(order), count):
                part = order[first : first + count]
                for entry in zip(some[part].tolist(), those[part].tolist(), strict=True):
                    if entry[1] not in protected:
                        yield entry
            if not num_left:
                return


def family(geometry: Geometry, model: ReuseModel | None) -> Callable[[int], Reuse]:
    """Makes the policies of one model's caches, which learn together: from what `model` knows, or from nothing."""
    shared = ReuseModel(geometry) if model is None or not model.fits(geometry) else model.copy()
    return lambda capacity: Reuse(geometry, shared, capacity)
