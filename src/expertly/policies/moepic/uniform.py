"""Equal budgets and half of each expert: where the configurator starts, and MoEpic without it (algorithm 1, line 4)."""

from __future__ import annotations

from collections.abc import Sequence

from expertly.core.errors import BudgetError
from expertly.core.geometry import Geometry
from expertly.policies.moepic.plan import LayerSplit, SplitPlan


def uniform_budgets(geometry: Geometry, kept_segments: Sequence[int]) -> list[int]:
    """Segments of each layer: equal shares of those kept in each size class, a remainder to the lowest layers.

    None gets more than its experts fill. Raises BudgetError where `kept_segments` is not a number at least 0 for each
    class.
    """
    if len(kept_segments) != geometry.num_size_classes or min(kept_segments) < 0:
        accepted = f"a number at least 0 for each of {geometry.num_size_classes} size classes"
        raise BudgetError(f"kept_segments={list(kept_segments)}: must be {accepted}")
    budgets = [0] * geometry.num_layers
    for size_class, total in enumerate(kept_segments):
        most = {
            layer: geometry.layers[layer].num_experts * geometry.segments_per_expert
            for layer, one in enumerate(geometry.size_classes)
            if one == size_class
        }
        left = min(total, sum(most.values()))
        waiting = sorted(most, key=most.__getitem__)  # those that an equal share more than fills come first
        while waiting and most[waiting[0]] * len(waiting) <= left:
            layer = waiting.pop(0)
            budgets[layer] = most[layer]
            left -= most[layer]
        for number, layer in enumerate(sorted(waiting)):
            budgets[layer] = left // len(waiting) + (number < left % len(waiting))
    return budgets


def half_split(budget: int, num_experts: int, segments_per_expert: int) -> LayerSplit:
    """theta 0.5, rounded down to segments but not to none; less of one expert where the budget is less than that, more
    where it keeps half of every expert.
    """
    if not budget:
        return LayerSplit(0, 0, 0)
    segments = min(max(segments_per_expert // 2, budget // num_experts, 1), segments_per_expert, budget)
    return LayerSplit(min(budget // segments, num_experts), segments, budget)


def uniform_plan(geometry: Geometry, kept_segments: Sequence[int]) -> SplitPlan:
    """Equal budgets, theta 0.5. Raises BudgetError as `uniform_budgets`."""
    budgets = uniform_budgets(geometry, kept_segments)
    num_segments = geometry.segments_per_expert
    layers = [half_split(v, shape.num_experts, num_segments) for v, shape in zip(budgets, geometry.layers, strict=True)]
    return SplitPlan(geometry, tuple(layers))
