"""The cheapest way to share out whole experts among layers, exactly: a dynamic program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError

_NEVER = 1 << 62
_STEPS = 30
"""Costs are rounded to 2**-30 of one, or less finely where sums would not fit 63 bits."""


def cheapest_shares(costs: Sequence[npt.NDArray[np.floating] | npt.NDArray[np.integer]], num_experts: int) -> list[int]:
    """Experts of each layer, `num_experts` in all, with the least sum of `costs[layer][experts of it]`.

    `costs[layer]` is [E + 1], of at least 0, falling or not. Of what costs the same, what is most even (the least sum
    of squares) comes first, then what gives the lowest layers most. O(sum of E x num_experts).
    """
    limits = [len(cost) - 1 for cost in costs]
    if not 0 <= num_experts <= sum(limits):
        raise ConfigError(f"num_experts={num_experts}: must be from 0 to {sum(limits)}")
    keys = _keys(costs)
    below = [
        np.full(num_experts + 1, _NEVER, np.int64)
    ]  # of the layers from the last one up: the least for each number
    below[0][0] = 0
    most = 0  # that these layers can hold
    for key in reversed(keys):
        following = below[-1]
        least = np.full(num_experts + 1, _NEVER, np.int64)
        for num, price in enumerate(key.tolist()):
            end = min(num_experts, most + num) + 1
            if end > num:
                np.minimum(least[num:end], following[: end - num] + price, out=least[num:end])
        most = min(num_experts, most + len(key) - 1)
        below.append(least)
    shares, left = [], num_experts
    for layer, key in enumerate(keys):
        here, following = below[len(keys) - layer][left], below[len(keys) - layer - 1]
        nums = np.arange(min(left, limits[layer]) + 1)
        (best,) = np.nonzero(key[nums] + following[left - nums] == here)
        shares.append(int(best[-1]))
        left -= shares[-1]
    return shares


def _keys(costs: Sequence[npt.NDArray[np.floating] | npt.NDArray[np.integer]]) -> list[npt.NDArray[np.int64]]:
    """Cost, then square, as one integer: sums of them compare as the pairs of sums do, without rounding."""
    squares = sum((len(cost) - 1) ** 2 for cost in costs).bit_length()
    whole = int(np.ceil(sum(float(cost.max()) for cost in costs))).bit_length()
    steps = min(_STEPS, 60 - squares - whole)
    return [
        (np.rint(np.ldexp(cost.astype(np.float64), steps)).astype(np.int64) << squares) + np.arange(len(cost)) ** 2
        for cost in costs
    ]
