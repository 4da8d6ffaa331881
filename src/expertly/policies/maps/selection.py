"""Which experts of a matched map are worth fetching: fewer, the surer the match (fMoE, section 4.3)."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from expertly.core.observation import Floats

Select = Literal["delta", "top-k"]


def select(probabilities: Floats, score: float, top_k: int, mode: Select = "delta") -> tuple[list[int], list[float]]:
    """Experts by falling probability [E] (ties: the lowest id), and their probabilities.

    "delta": the fewest whose sum reaches clip(1 - score, 0, 1), at least `top_k` (equations 6 to 8). "top-k": `top_k`.
    Either leaves out those of probability 0, however few remain.
    """
    order = (-probabilities).argsort(kind="stable")
    falling: list[float] = probabilities[order].tolist()
    count = top_k
    threshold = 1.0 - score if mode == "delta" else 0.0
    reached = sum(falling[:top_k])
    num_experts = len(falling)
    if threshold > reached:
        threshold = min(threshold, 1.0)
        while reached < threshold and count < num_experts:
            reached += falling[count]
            count += 1
    while count and falling[count - 1] <= 0.0:
        count -= 1
    return order[:count].tolist(), falling[:count]


def select_rows(probabilities: Floats, scores: Floats, top_k: int, mode: Select = "delta") -> npt.NDArray[np.bool_]:
    """`select` of every row: which experts [T, E], given probabilities [T, E] and scores [T]."""
    falling = -np.sort(-probabilities, axis=1)
    counts = np.full(len(falling), min(top_k, falling.shape[1]))
    if mode == "delta":
        threshold = np.clip(1.0 - scores.astype(np.float64), 0.0, 1.0)
        reached = np.cumsum(falling, axis=1, dtype=np.float64) >= threshold[:, None]
        counts = np.maximum(counts, np.where(reached[:, -1], reached.argmax(axis=1) + 1, falling.shape[1]))
    counts = np.minimum(counts, (falling > 0).sum(axis=1))
    least = falling[np.arange(len(falling)), np.maximum(counts, 1) - 1][:, None]
    selected: npt.NDArray[np.bool_] = probabilities > least
    is_equal = probabilities == least
    num_left = (counts - selected.sum(axis=1))[:, None]
    selected |= is_equal & (np.cumsum(is_equal, axis=1, dtype=np.int32) <= num_left)
    return selected


def union(probabilities: Floats, selected: npt.NDArray[np.bool_]) -> tuple[list[int], list[float]]:
    """What any row selected, by its highest probability among the rows that did (ties: the lowest id)."""
    highest = np.where(selected, probabilities, 0.0).max(axis=0)
    order = (-highest).argsort(kind="stable")[: int((highest > 0).sum())]
    return order.tolist(), highest[order].tolist()
