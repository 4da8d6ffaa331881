"""Slow and plain ways to say what a collection of activation matrices must do, and random matrices to try them on."""

from __future__ import annotations

import numpy as np

from expertly.policies.learned import ModelShape
from tests.policies.maps.reference import TIE, cosine

LAYERS, EXPERTS, TOP_K = 5, 7, 2
SHAPE = ModelShape((EXPERTS,) * LAYERS, (TOP_K,) * LAYERS)


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
            del self.matrices[next(at for at, found in enumerate(cosines) if found >= max(cosines) - TIE)]
        self.matrices.append(matrix)

    def nearest(self, running: np.ndarray, layers: list[int], num: int) -> list[int]:
        """Places of the `num` nearest over the rows of these layers; of equal ones the newest; none of cosine 0."""
        cosines = [cosine(running[layers], matrix[layers]) for matrix in self.matrices]
        alike = [at for at, found in enumerate(cosines) if found > TIE]
        if not alike:
            return []
        ranked = sorted((cosines[at] for at in alike), reverse=True)
        least = ranked[min(num, len(ranked)) - 1]
        sure = [at for at in alike if cosines[at] > least + TIE]
        equal = [at for at in alike if abs(cosines[at] - least) <= TIE]
        return sorted([*sure, *sorted(equal, reverse=True)[: num - len(sure)]])
