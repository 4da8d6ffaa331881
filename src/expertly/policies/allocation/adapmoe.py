"""Layers that miss more keep more: the least expected demand loads (AdapMoE's cache allocation)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan
from expertly.policies.allocation.base import Allocation
from expertly.policies.allocation.optimum import cheapest_shares
from expertly.policies.allocation.stack import StackDistances
from expertly.policies.allocation.uniform import layers_of, uniform_shares, with_rests
from expertly.policies.known import Usage

LEAST_GAIN = 0.01
"""Share of the expected demand loads that other shares must spare, to be worth moving experts for (our choice)."""


class AdapMoE(Allocation):
    """Whole experts go where they spare most: of layer l with s kept, misses_l(s) x (1 - a_l) demand loads are
    expected. misses_l is of an LRU cache, from stack distances; a_l is the share of what is needed that predictions
    name, and is loaded ahead. Prompts are left out: they fill what is empty and evict nothing.

    With `usage`, what a training part shows, shares are fixed. Without, they are uniform until `tau` tokens have been
    decoded; then, and after every `tau` more, they are worked out from all that was seen.
    """

    def __init__(self, geometry: Geometry, usage: Usage | None = None, tau: int = 256) -> None:
        self.is_online = usage is None
        self._geometry = geometry
        self._usage = usage
        self._tau = tau
        self._seen = [StackDistances(layer.num_experts) for layer in geometry.layers] if self.is_online else []
        self._shares: list[int] = []
        self._kept_slots: list[int] = []
        self._recall: Sequence[float] = () if usage is None else usage.recall
        self._num_tokens = 0
        self._due = tau
        self._num_moves = 0

    def shares(self, kept_slots: Sequence[int]) -> list[int]:
        if self._usage is None:
            return uniform_shares(self._geometry, kept_slots)
        return self._best(kept_slots, self._usage.misses, self._usage.recall)

    def begin(self, shares: Sequence[int]) -> None:
        self._shares = list(shares)
        self._kept_slots = [0] * self._geometry.num_size_classes
        for size_class, share in zip(self._geometry.size_classes, shares, strict=True):
            self._kept_slots[size_class] += share

    def ran(self, demand: RouterRan, recall: Callable[[int], float]) -> list[int] | None:
        if not demand.serves_decode:
            return None
        self._seen[demand.layer].add(
            (num, expert)
            for num, expert, is_decode in zip(demand.num_tokens, demand.experts, demand.is_decode, strict=True)
            if num and is_decode
        )
        if demand.layer < self._geometry.num_layers - 1:
            return None
        self._num_tokens += demand.batch_tokens if False not in demand.is_decode else 1  # a prompt's do not count
        if self._num_tokens < self._due:
            return None
        self._due = self._num_tokens + self._tau
        return self._solve([recall(layer) for layer in range(self._geometry.num_layers)])

    def _solve(self, recall: Sequence[float]) -> list[int] | None:
        misses = [seen.misses() for seen in self._seen]
        shares = self._best(self._kept_slots, misses, recall)
        before, after = (self._expected(one, misses, recall) for one in (self._shares, shares))
        is_first = not self._num_moves
        if shares == self._shares or not (is_first or after < (1 - LEAST_GAIN) * before):
            return None
        self._recall = tuple(recall)
        self._num_moves += 1
        self._shares = shares
        return list(shares)

    def _best(
        self, kept_slots: Sequence[int], misses: Sequence[npt.NDArray[np.int64]], recall: Sequence[float]
    ) -> list[int]:
        geometry, num_segments = self._geometry, self._geometry.segments_per_expert
        shares = [0] * geometry.num_layers
        for size_class, slots in enumerate(kept_slots):
            layers = layers_of(geometry, size_class)
            costs = [misses[layer] * (1 - recall[layer]) for layer in layers]
            found = cheapest_shares(costs, slots // num_segments)
            for layer, num_experts in zip(layers, found, strict=True):
                shares[layer] = num_experts * num_segments
        return with_rests(geometry, kept_slots, shares)

    def _expected(
        self, shares: Sequence[int], misses: Sequence[npt.NDArray[np.int64]], recall: Sequence[float]
    ) -> float:
        """Demand loads of all that was seen."""
        num_segments = self._geometry.segments_per_expert
        loads = (m[share // num_segments] * (1 - a) for m, share, a in zip(misses, shares, recall, strict=True))
        return float(sum(loads))

    def facts(self) -> dict[str, object]:
        """`learned`: from where; `recall`: the a_l by which shares were chosen, None while there are none; `moves`: how
        often shares changed.
        """
        learned = f"online, from {self._num_tokens} decoded tokens" if self._usage is None else self._usage.origin
        recall = [round(a, 4) for a in self._recall]
        return {"learned": learned, "recall": recall or None, "moves": self._num_moves}
