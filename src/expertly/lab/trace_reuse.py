"""After how many tokens an expert is needed again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.trace.schema import NO_EXPERT

Ints = npt.NDArray[np.int64]


def _bin_edges() -> Ints:
    """Largest distance of each bin: exact at first, then 16 bins an octave; every power of two is one."""
    return np.unique(np.floor(2.0 ** (np.arange(0, 16 * 48 + 1) / 16)).astype(np.int64))


@dataclass(slots=True)
class ReuseMeter:
    """Histograms of reuse distances, per layer; memory does not depend on the number of tokens.

    The reuse distance of a demand (layer, token, expert) is the number of tokens since the last one that chose the
    expert in that layer, 1 if it was the token before, in the order of the stream and across requests (locality as
    MoE-Infinity and ProMoE argue with it). The first demand of an expert has none.
    """

    num_layers: int
    num_experts: int
    edges: Ints = field(init=False)
    counts: Ints = field(init=False)  # [L, bins]
    num_first: Ints = field(init=False)  # [L]
    num_demands: Ints = field(init=False)  # [L, E]
    _last: Ints = field(init=False)  # [L x E], row of the last demand
    _num_rows: int = 0

    def __post_init__(self) -> None:
        size = self.num_layers * self.num_experts
        self.edges = _bin_edges()
        self.counts = np.zeros((self.num_layers, len(self.edges)), np.int64)
        self.num_first = np.zeros(self.num_layers, np.int64)
        self.num_demands = np.zeros((self.num_layers, self.num_experts), np.int64)
        self._last = np.full(size, -1, np.int64)

    def add(self, experts: npt.NDArray[Any]) -> None:
        """The next rows of the stream, [T, L, K]."""
        num_rows = len(experts)
        rows, layers, places = np.nonzero(experts != NO_EXPERT)
        keys = layers * self.num_experts + experts[rows, layers, places]
        in_order = np.sort(keys * num_rows + rows)  # by expert, then by row
        keys, rows = np.divmod(in_order, num_rows)
        rows += self._num_rows
        is_first = np.diff(keys, prepend=-1) > 0
        before = np.empty_like(rows)
        before[1:] = rows[:-1]
        before[is_first] = self._last[keys[is_first]]
        is_last = np.diff(keys, append=-1) != 0
        self._last[keys[is_last]] = rows[is_last]
        self._num_rows += num_rows
        self.num_demands += np.bincount(keys, minlength=self._last.size).reshape(self.num_demands.shape)
        is_new = before < 0
        layers = keys // self.num_experts
        self.num_first += np.bincount(layers[is_new], minlength=self.num_layers)
        bins = np.searchsorted(self.edges, (rows - before)[~is_new])
        bins += layers[~is_new] * len(self.edges)
        self.counts += np.bincount(bins, minlength=self.counts.size).reshape(self.counts.shape)

    def percentile(self, counts: Ints, percent: float) -> int | None:
        """The distance within which `percent` of the demands in `counts` (rows of `self.counts`) are used again."""
        total = int(counts.sum())
        if total == 0:
            return None
        return int(self.edges[int(np.searchsorted(np.cumsum(counts), percent / 100 * total))])

    def share_within(self, counts: Ints, num_first: int, distance: int) -> float | None:
        """Share of all demands whose expert was needed at most `distance` (a power of two) tokens before."""
        total = int(counts.sum()) + num_first
        return float(counts[self.edges <= distance].sum() / total) if total else None
