"""Evicts the highest 1 / (p * freq) first (fMoE, section 4.5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.geometry import Geometry
from expertly.policies.eviction.base import DenseScoredPolicy
from expertly.policies.known import Known

LEAST = 1e-6
"""The least p, and the p of layers without a map, where frequency alone decides."""


class FMoEEviction(DenseScoredPolicy):
    """p is the expert's probability in the newest map found for its layer. The frequency starts at 1, counts the tokens
    served since the start, whether the expert was kept or not, and persists after eviction.
    """

    name = "fmoe"
    needs_probabilities = True

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry.num_experts)
        self._frequency = np.ones(geometry.num_experts)
        self._probability = np.full(geometry.num_experts, LEAST)

    @classmethod
    def for_cache(cls, geometry: Geometry, capacity: int, known: Known, options: Any) -> FMoEEviction:
        return cls(geometry)

    def predicted(self, first_expert: int, probabilities: Sequence[float]) -> None:
        of_layer = self._probability[first_expert : first_expert + len(probabilities)]
        np.maximum(probabilities, LEAST, out=of_layer)

    def used(self, experts: Sequence[int], num_tokens: Sequence[int], batch_tokens: int) -> None:
        self._frequency[list(experts)] += num_tokens

    def all_scores(self) -> npt.NDArray[np.float64]:
        return self._probability * self._frequency
