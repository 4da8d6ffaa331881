"""Slow and plain ways to say what a map store and a collection of activation matrices must do, and random ones to try
them on.
"""

from __future__ import annotations

import math

import numpy as np

from expertly.core.observation import Floats

TIE = 1e-6


def random_scores(dice: np.random.Generator, num_rows: int, num_layers: int, num_experts: int) -> Floats:
    """[T, L, E] that sum to 1, representable in float16."""
    scores = dice.dirichlet(np.full(num_experts, 0.4), (num_rows, num_layers))
    return scores.astype(np.float16).astype(np.float32)


def cosine(left: Floats, right: Floats) -> float:
    """Of two vectors; 0 where either is zero."""
    left, right = left.astype(np.float64).ravel(), right.astype(np.float64).ravel()
    length = np.linalg.norm(left) * np.linalg.norm(right)
    return float(left @ right / length) if length else 0.0


def cosines(rows: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """`cosine` of each row to each other, [T, n], of whatever dimensions they have."""
    rows, rest = (each.reshape(len(each), math.prod(each.shape[1:])).astype(np.float64) for each in (rows, rest))
    lengths = np.linalg.norm(rows, axis=1)[:, None] * np.linalg.norm(rest, axis=1)
    return np.divide(rows @ rest.T, lengths, out=np.zeros_like(lengths), where=lengths > 0)


class NaiveStore:
    """Equation by equation, a map at a time: what `MapStore` holds, in any order."""

    def __init__(self, capacity: int, semantic_weight: float, quota: float) -> None:
        self.capacity, self.weight = capacity, semantic_weight
        self.max_of_request = max(1, int(quota * capacity))
        self.rows: list[tuple[int, int, Floats, Floats | None]] = []  # born, request, scores, embedding
        self.num_added = 0

    def add(self, scores: Floats, request: int, embedding: Floats | None) -> None:
        """Append, or replace the most redundant (the oldest of equals)."""
        mine = [slot for slot, row in enumerate(self.rows) if row[1] == request]
        new = (self.num_added, request, scores, embedding)
        self.num_added += 1
        if len(mine) >= self.max_of_request:
            candidates = mine
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


LAYERS, EXPERTS, TOP_K = 5, 7, 2


def choices(dice: np.random.Generator, num_tokens: int) -> np.ndarray:
    """[T, L, K], no expert twice."""
    return np.argsort(dice.random((num_tokens, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K]


def matrix_of(chosen: np.ndarray) -> np.ndarray:
    """[L, E]: how many of the tokens [T, L, K] chose each expert."""
    matrix = np.zeros((LAYERS, EXPERTS), np.int64)
    for token in chosen:
        for layer, experts in enumerate(token):
            for expert in experts:
                matrix[layer, expert] += 1
    return matrix


class NaiveCollection:
    """Matrices in the order in which they came; one that comes to a full one takes the place of the nearest."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.matrices: list[np.ndarray] = []  # the oldest first

    def add(self, matrix: np.ndarray) -> None:
        if not matrix.any():
            return
        if len(self.matrices) == self.capacity:
            cosines = [cosine(matrix, other) for other in self.matrices]
            del self.matrices[next(at for at, result in enumerate(cosines) if result >= max(cosines) - TIE)]
        self.matrices.append(matrix)

    def nearest(self, running: np.ndarray, layers: list[int], num: int) -> list[int]:
        """Places of the `num` nearest over the rows of these layers; of equal ones the newest; none of cosine 0."""
        cosines = [cosine(running[layers], matrix[layers]) for matrix in self.matrices]
        alike = [at for at, result in enumerate(cosines) if result > TIE]
        if not alike:
            return []
        ranked = sorted((cosines[at] for at in alike), reverse=True)
        least = ranked[min(num, len(ranked)) - 1]
        sure = [at for at in alike if cosines[at] > least + TIE]
        equal = [at for at in alike if abs(cosines[at] - least) <= TIE]
        return sorted([*sure, *sorted(equal, reverse=True)[: num - len(sure)]])
