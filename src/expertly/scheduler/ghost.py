"""What an LRU cache of each layer would have missed, and what a place is worth."""

from __future__ import annotations

from collections.abc import Sequence

from expertly.core.messages import RouterRan

_FADE = 0.998
"""Of what was counted, what is left after another pass through a layer."""


class Ghost:
    """Experts by layer, in the order of their last use; no bytes. Only what decode needs is seen."""

    def __init__(self, capacities: Sequence[int]) -> None:
        """`capacities`: of each layer, how many experts it keeps."""
        self._capacities = list(capacities)
        self._kept: list[list[int]] = [[] for _ in capacities]  # the last used at the end
        self._misses = [0.0] * len(self._kept)
        self._last_hits = [0.0] * len(self._kept)  # of what would have gone next
        self._num_passes = [0.0] * len(self._kept)

    def ran(self, router: RouterRan) -> int:
        """A layer needs these: how many of them it would have missed."""
        layer = router.layer
        misses, last_hits = self._use(self._kept[layer], self._capacities[layer], router.experts)
        self._misses[layer] = self._misses[layer] * _FADE + misses
        self._last_hits[layer] = self._last_hits[layer] * _FADE + last_hits
        self._num_passes[layer] = self._num_passes[layer] * _FADE + 1
        return misses

    def _use(self, kept: list[int], capacity: int, experts: Sequence[int]) -> tuple[int, int]:
        """Misses, and hits of what would have gone next."""
        if len(experts) > capacity:  # at best it has what it can hold of them
            return len(experts) - capacity, 0
        last = kept[0] if len(kept) == capacity and kept else None
        misses = last_hits = 0
        for expert in experts:
            if expert in kept:
                kept.remove(expert)
                last_hits += expert == last
            else:
                misses += 1
            kept.append(expert)
        if len(kept) > capacity:
            del kept[: len(kept) - capacity]
        return misses, last_hits

    def worth_of_place(self, layer: int) -> float:
        """Demands that are missed, of 0 to 1, because one place of a layer's holds what nobody needs, until that has
        become the oldest: so many misses go by as there are places.
        """
        if not self._misses[layer]:
            return 0.0
        return min(1.0, self._last_hits[layer] * self._capacities[layer] / self._misses[layer])

    def misses_a_pass(self, layer: int) -> float:
        """Experts that a pass through the layer would have missed, on average."""
        return self._misses[layer] / self._num_passes[layer] if self._num_passes[layer] else 0.0
