"""How much of what a model can route a store covers: the bounds of fMoE, section 4.4, and how alike its maps are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertly.policies.learned import ModelShape
from expertly.policies.predictor.fmoe.store import MapStore


@dataclass(frozen=True, slots=True)
class Bound:
    """With so many maps, any iteration has one at least that similar to it."""

    num_maps: int
    similarity: float


def coverage_bounds(shape: ModelShape) -> tuple[Bound, Bound]:
    """2 L E maps and L E ln(L E) / 2 maps, rounded up; L E is the number of experts of the model."""
    num = sum(shape.num_experts)
    return Bound(2 * num, 0.75), Bound(math.ceil(num * math.log(num) / 2), 0.98)


def mean_similarities(store: MapStore, max_maps: int = 512, seed: int = 0) -> tuple[float | None, float | None]:
    """Mean cosine of two maps, and of two embeddings, over all pairs of at most `max_maps` maps drawn with `seed`.

    None where there are no two of them. A store of maps that are all alike has 1.
    """
    slots = np.arange(store.num_maps)
    if len(slots) > max_maps:
        slots = np.sort(np.random.default_rng(seed).choice(slots, max_maps, replace=False))
    maps = store.maps[:, slots].transpose(1, 0, 2).reshape(len(slots), -1)
    embeddings = np.zeros((0, 1), np.float32) if store.embeddings is None else store.embeddings[slots]
    return _mean_cosine(maps), _mean_cosine(embeddings)


def _mean_cosine(rows: npt.NDArray[np.float32]) -> float | None:
    """Over the pairs of rows [T, N] that are not zero: |sum of unit rows|^2 is T and twice every pair."""
    lengths = np.linalg.norm(rows, axis=1)
    unit = rows[lengths > 0] / lengths[lengths > 0, None]
    num = len(unit)
    if num < 2:
        return None
    total = unit.sum(axis=0, dtype=np.float64)
    return float((total @ total - num) / (num * (num - 1)))
