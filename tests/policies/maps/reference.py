"""Slow and plain ways to say what the map store must do, and random maps to try them on."""

from __future__ import annotations

import numpy as np

from expertly.core.observation import Floats

TIE = 1e-6


def random_scores(dice: np.random.Generator, num_rows: int, num_layers: int, num_experts: int) -> Floats:
    """[T, L, E] that sum to 1, representable in float16."""
    scores = dice.dirichlet(np.full(num_experts, 0.4), (num_rows, num_layers))
    return scores.astype(np.float16).astype(np.float32)


def top(scores: Floats, top_k: int) -> np.ndarray:
    """The ids of the K highest, [..., K]."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :top_k]


def cosine(left: Floats, right: Floats) -> float:
    """Of two vectors; 0 where either is zero."""
    left, right = left.astype(np.float64).ravel(), right.astype(np.float64).ravel()
    length = np.linalg.norm(left) * np.linalg.norm(right)
    return float(left @ right / length) if length else 0.0


class NaiveStore:
    """Equation by equation, a map at a time: what `MapStore` holds, in any order."""

    def __init__(self, capacity: int, semantic_weight: float, quota: float) -> None:
        self.capacity, self.weight = capacity, semantic_weight
        self.max_of_request = max(1, int(quota * capacity))
        self.rows: list[tuple[int, int, Floats, Floats | None]] = []  # born, request, scores, embedding
        self.num_added = 0

    def add(self, scores: Floats, request: int, embedding: Floats | None) -> None:
        """Append, or replace the most redundant (the oldest of equals)."""
        own = [slot for slot, row in enumerate(self.rows) if row[1] == request]
        new = (self.num_added, request, scores, embedding)
        self.num_added += 1
        if len(own) >= self.max_of_request:
            candidates = own
        elif len(self.rows) < self.capacity:
            self.rows.append(new)
            return
        else:
            candidates = list(range(len(self.rows)))
        redundancy = {slot: self.redundancy(scores, embedding, slot) for slot in candidates}
        best = max(redundancy.values())
        equal = [slot for slot in candidates if redundancy[slot] >= best - TIE]
        self.rows[min(equal, key=lambda slot: self.rows[slot][0])] = new

    def redundancy(self, scores: Floats, embedding: Floats | None, slot: int) -> float:
        """RDY of a new map and a stored one."""
        _, _, stored, stored_embedding = self.rows[slot]
        trajectory = cosine(scores, stored)
        if embedding is None:
            return trajectory
        semantic = 0.0 if stored_embedding is None else cosine(embedding, stored_embedding)
        return self.weight * semantic + (1 - self.weight) * trajectory
