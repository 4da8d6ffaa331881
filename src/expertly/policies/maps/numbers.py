"""Arithmetic that the parts of the store share, all in float32."""

from __future__ import annotations

import numpy as np

from expertly.core.observation import Floats

TIE = 1e-6
"""Cosines that differ by no more than this are equal: float32 rounds equal maps apart, by where they lie in memory."""


def through_float16(values: Floats) -> Floats:
    """What float16 makes of them, in float32 and C order."""
    return np.ascontiguousarray(values, np.float16).astype(np.float32)


def inverse_root(squares: Floats) -> Floats:
    """1 / sqrt, and 0 for 0."""
    roots: Floats = np.sqrt(squares)
    roots[roots == 0] = np.inf
    inverse: Floats = np.reciprocal(roots)
    return inverse


def unit_rows(rows: Floats) -> Floats:
    """Rows scaled to length 1; zeros stay."""
    rows = np.asarray(rows, np.float32)
    unit: Floats = rows * inverse_root(np.einsum("th,th->t", rows, rows))[:, None]
    return unit
