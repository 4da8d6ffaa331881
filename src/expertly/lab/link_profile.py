"""A link's rate, overhead and latency from what transfers took."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from expertly.core.costs import Link


def fit_link(shots: Sequence[tuple[int, int, int]]) -> Link:
    """The Link under which `shots` (spans submitted together, their bytes, nanoseconds until all were there) come
    nearest to what they took, each by its own measure: least squares of relative errors, nothing negative.
    """
    spans, nbytes, times = (np.array(column, dtype=np.float64) for column in zip(*shots, strict=True))
    columns = np.stack([nbytes, np.ones_like(times), spans], axis=1) / times[:, None]
    ns_per_byte, latency_ns, overhead_ns = nonnegative_fit(columns, np.ones_like(times), needs_first=True)
    return Link(nbytes_per_s=1e9 / ns_per_byte, latency_ns=round(latency_ns), overhead_ns=round(overhead_ns))


def nonnegative_fit(
    columns: npt.NDArray[np.float64], target: npt.NDArray[np.float64], needs_first: bool = False
) -> list[float]:
    """Factors of the columns [n, few], none negative, whose sum comes nearest to the target [n] in least squares.

    With `needs_first` the first factor is positive; without, no column at all is an answer, too.
    """
    num = columns.shape[1]
    best: tuple[float, list[float]] = (float("inf"), [0.0] * num)
    for used in (list(some) for size in range(num + 1) for some in combinations(range(num), size)):
        if needs_first and 0 not in used:
            continue
        found, *_ = np.linalg.lstsq(columns[:, used], target, rcond=None)
        if np.any(found < 0) or (needs_first and found[0] <= 0):
            continue
        error = float(np.square(columns[:, used] @ found - target).sum())
        if error < best[0] * (1 - 1e-9):
            values = [0.0] * num
            for column, value in zip(used, found, strict=True):
                values[column] = float(value)
            best = error, values
    return best[1]
