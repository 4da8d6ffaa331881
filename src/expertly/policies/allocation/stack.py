"""How deep in least-recently-used order the experts lie that a layer is asked for (Mattson's stack distances)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class StackDistances:
    """Of one layer. A cache of s experts that evicts the least recently used one holds the s topmost: one pass gives
    the misses of every size.
    """

    def __init__(self, num_experts: int) -> None:
        self._stack: list[int] = []  # the most recently used first
        self._counts = [0] * (num_experts + 1)  # demands by depth; the last entry: first demands

    def add(self, demands: Iterable[tuple[int, int]]) -> None:
        """What one pass asks for: (tokens, expert) of each. All are looked up before any counts as used; then the
        busiest is the most recent, as the policy `lru` has it.
        """
        stack, counts = self._stack, self._counts
        ranked = sorted(demands)
        for _, expert in ranked:
            counts[stack.index(expert) if expert in stack else -1] += 1
        for _, expert in ranked:
            if expert in stack:
                stack.remove(expert)
            stack.insert(0, expert)

    def misses(self) -> npt.NDArray[np.int64]:
        """[E + 1]: the demands so far that a cache of s = 0..E experts would have missed."""
        counts = np.array(self._counts, np.int64)
        beyond: npt.NDArray[np.int64] = counts.sum() - np.concatenate(([0], np.cumsum(counts[:-1])))
        return beyond
