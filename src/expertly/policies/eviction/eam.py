"""Evicts the expert least likely to be used again, in later layers before earlier ones (MoE-Infinity, section 4.7)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from expertly.core.geometry import Geometry
from expertly.policies.eviction.base import ScoredPolicy
from expertly.policies.known import Known

EPSILON = 1e-6
"""Added to each p, and the sum of a layer's p where all are 0."""


class EAMEviction(ScoredPolicy):
    """Evicts the least (p + eps) x (1 - l / L) / sum of the layer's p, layers l from 0 (algorithm 1). The p are those
    of the newest outlook; before the first one, of the newest prediction of each layer, or 0.

    Each outlook changes all scores, and most layers bring one. So all scores are computed at once, when one is asked
    for.
    """

    name = "eam"
    needs_probabilities = True

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        sizes = [layer.num_experts for layer in geometry.layers]
        self._first = np.cumsum([0, *sizes[:-1]])  # expert id of each layer
        self._sizes = sizes
        self._layer = np.repeat(np.arange(len(sizes)), sizes)  # of each expert
        self._decay = 1 - self._layer / len(sizes)
        self._likely = np.zeros(len(self._layer))
        self._has_outlook = False
        self._scores: list[float] | None = None  # of every expert; None: to be computed
        self._order: list[tuple[float, int]] | None = None  # of the kept ones, rising

    @classmethod
    def for_cache(cls, geometry: Geometry, capacity: int, known: Known, options: Any) -> EAMEviction:
        return cls(geometry)

    def admitted(self, expert: int) -> None:
        self._kept[expert] = 0.0
        if self._order is not None:
            insort(self._order, (self.score(expert), expert))

    def removed(self, expert: int) -> None:
        del self._kept[expert]
        if self._order is not None:
            del self._order[bisect_left(self._order, (self.score(expert), expert))]

    def rescore(self, experts: Iterable[int]) -> None:
        """Uses change no score."""

    def predicted(self, first_expert: int, probabilities: Sequence[float]) -> None:
        if not self._has_outlook:
            self._likely[first_expert : first_expert + len(probabilities)] = probabilities
            self._scores = self._order = None

    def expected(self, outlook: Sequence[float]) -> None:
        self._has_outlook = True
        self._likely = np.asarray(outlook, np.float64)
        self._scores = self._order = None

    def score(self, expert: int) -> float:
        return self._all_scores()[expert]

    def scored_victims(self, protected: Container[int]) -> Iterator[tuple[float, int]]:
        order = self._order
        if order is None:
            scores = self._all_scores()
            order = self._order = sorted((scores[expert], expert) for expert in self._kept)
        return (entry for entry in order if entry[1] not in protected)

    def _all_scores(self) -> list[float]:
        if self._scores is None:
            total = np.add.reduceat(self._likely, self._first)
            total[total == 0] = EPSILON
            scores: list[float] = ((self._likely + EPSILON) * self._decay / total[self._layer]).tolist()
            self._scores = scores
        return self._scores
