"""Evicts the expert least likely to be used again, in later layers before earlier ones (MoE-Infinity, section 4.7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.geometry import Geometry
from expertly.policies.eviction.base import DenseScoredPolicy
from expertly.policies.known import Known

EPSILON = 1e-6
"""Added to each p, and the sum of a layer's p where all are 0."""


class EAMEviction(DenseScoredPolicy):
    """Evicts the least (p + eps) x (1 - l / L) / sum of the layer's p, layers l from 0 (algorithm 1). The p are those
    of the newest outlook; before the first one, of the newest prediction of each layer, or 0.
    """

    name = "eam"
    needs_probabilities = True

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry.num_experts)
        sizes = [layer.num_experts for layer in geometry.layers]
        self._first = np.cumsum([0, *sizes[:-1]])  # expert id of each layer
        self._layer = np.repeat(np.arange(len(sizes)), sizes)  # of each expert
        self._decay = 1 - self._layer / len(sizes)
        self._likely = np.zeros(len(self._layer))
        self._has_outlook = False
        self._scores: npt.NDArray[np.float64] | None = None  # of every expert; None: to be computed

    @classmethod
    def for_cache(cls, geometry: Geometry, capacity: int, known: Known, options: Any) -> EAMEviction:
        return cls(geometry)

    def used(self, experts: Sequence[int], num_tokens: Sequence[int], batch_tokens: int) -> None:
        """Uses change no score."""

    def predicted(self, first_expert: int, probabilities: Sequence[float]) -> None:
        if not self._has_outlook:
            self._likely[first_expert : first_expert + len(probabilities)] = probabilities
            self._scores = None

    def expected(self, outlook: Sequence[float]) -> None:
        self._has_outlook = True
        self._likely = np.asarray(outlook, np.float64)
        self._scores = None

    def all_scores(self) -> npt.NDArray[np.float64]:
        if self._scores is None:
            total = np.add.reduceat(self._likely, self._first)
            total[total == 0] = EPSILON
            self._scores = (self._likely + EPSILON) * self._decay / total[self._layer]
        return self._scores
