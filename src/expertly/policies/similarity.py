"""What predictors by similarity share: cosines to stored passes, over the layers that the running one has shown."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.observation import Floats

Numbers = npt.NDArray[Any]

TIE = 1e-6
"""Cosines that differ by no more than this are equal: float32 rounds equal ones apart, by where they lie in memory."""


def inverse_root(squares: Numbers) -> Floats:
    """1 / sqrt, and 0 for 0, in float32."""
    roots = np.sqrt(squares)
    roots[roots == 0] = np.inf
    inverse: Floats = np.reciprocal(roots).astype(np.float32, copy=False)
    return inverse


class RunningCosines:
    """Cosines of T rows to n stored passes, which grow by a layer at a time, each for one product; valid until what is
    stored changes.
    """

    def __init__(self, num_rows: int, num_stored: int) -> None:
        self.num_stored = num_stored
        self._dots: Floats = np.zeros((num_rows, num_stored), np.float32)
        self._squares = np.zeros(num_rows)  # squared lengths of the rows, over the layers so far
        self._stored_squares = np.zeros(num_stored)
        self._inverse: Floats | None = None  # of the same

    def add(self, dots: Numbers, squares: Numbers, stored_squares: Numbers | None) -> None:
        """A layer's products [T, n], and the squared lengths of the rows [T] and of the stored passes [n] there; None:
        those of the layer were added before.
        """
        self._dots += dots
        self._squares += squares
        if stored_squares is not None:
            self._stored_squares += stored_squares
            self._inverse = None

    def cosines(self, stored_squares: Numbers | None = None) -> Floats | None:
        """[T, n]; `stored_squares` [n]: of all layers, in place of those so far. None where nothing is stored, a row is
        not finite, or all rows are zero.
        """
        if not self.num_stored or not np.isfinite(self._squares).all() or not self._squares.any():
            return None
        if self._inverse is None:
            self._inverse = inverse_root(self._stored_squares)
        cosines: Floats = self._dots * (self._inverse if stored_squares is None else inverse_root(stored_squares))
        cosines *= inverse_root(self._squares)[:, None]
        return cosines
