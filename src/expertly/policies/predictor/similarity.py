"""What predictors by similarity share: cosines to stored passes, over the layers that the running one has shown."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.observation import Floats

TIE = 1e-6
"""Cosines that differ by no more than this are equal: float32 rounds equal ones apart, by where they lie in memory."""


def inverse_root(squares: npt.NDArray[np.floating[Any]]) -> Floats:
    """1 / sqrt, and 0 for 0, in float32."""
    roots = np.sqrt(squares)
    roots[roots == 0] = np.inf
    inverse: Floats = np.reciprocal(roots).astype(np.float32, copy=False)
    return inverse


class LayersSeen:
    """The layers that a pass has shown so far, and the lengths of stored passes over these layers alone."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self._has_gap = False  # a layer was left out

    def add(self, layer: int) -> None:
        """The next layer; layers come in order, and some may be left out."""
        self._has_gap |= layer != (self.layers[-1] if self.layers else -1) + 1
        self.layers.append(layer)

    def inverse_norms(self, up_to: Floats, squares: npt.NDArray[np.floating[Any]], num: int) -> Floats:
        """[num] 1 / length of the first `num` stored passes over these layers. `up_to` [L, C]: the same over all layers
        up to each; `squares` [L, C]: squared lengths of single layers.
        """
        if not self._has_gap:
            return up_to[self.layers[-1], :num]
        return inverse_root(squares[self.layers, :num].sum(axis=0))
