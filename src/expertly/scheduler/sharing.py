"""Shares that change while a model runs: what an allocation sees, and what comes of its answers."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from expertly.core.messages import RouterRan
from expertly.policies.allocation import Allocation
from expertly.scheduler.counters import LayerCounters
from expertly.scheduler.keeper import Keeper


class Sharing:
    """An allocation beside a keeper, between layers."""

    def __init__(
        self,
        allocation: Allocation,
        keeper: Keeper,
        counters: Sequence[LayerCounters],
        shares: Sequence[int],
        *,
        is_gated: bool = False,
    ) -> None:
        """`shares`: what the budget gives each layer. `is_gated`: not all that is predicted is loaded ahead."""
        self._allocation = allocation
        self._keeper = keeper
        self._counters = counters
        self._is_gated = is_gated
        allocation.begin(shares)

    def layer_ended(self, demand: RouterRan, protected: Callable[[], Container[int]]) -> None:
        """Tell the allocation; on the way to other shares, evict what is not `protected`."""
        keeper = self._keeper
        shares = self._allocation.ran(demand, self._recall)
        if shares is not None:
            keeper.resize(shares)
        if keeper.targets is not None:
            keeper.rearrange(protected())

    def _recall(self, layer: int) -> float:
        """A prediction that came too late named nothing in time; one that a gate refused spared nothing."""
        decode = self._counters[layer].decode
        if self._is_gated:
            return decode.coverage or 0.0
        return decode.predicted_needed / max(1, decode.predicted_of, decode.demands)
