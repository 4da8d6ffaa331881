"""Layers keep the tops of experts: of many a part instead of few whole (MoEpic, section 3.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.policies.allocation.base import Allocation
from expertly.policies.allocation.uniform import layers_of, uniform_shares
from expertly.policies.moepic.plan import SplitPlan
from expertly.policies.moepic.uniform import uniform_budgets


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """Options of `split`."""

    theta: float = 0.5  # the kept part of an expert that is kept

    def __post_init__(self) -> None:
        if not 0 < self.theta <= 1:
            raise ConfigError(f"theta={self.theta}: must be above 0 and at most 1")


class Split(Allocation):
    """Equal shares; of each expert that is kept its first segments are, theta of it: the nearest number, the lower of
    two that are as near, at least one. More where a layer so keeps some of every expert and could keep more of each.

    With a plan, which fits the model and the budget, layers keep what that says, as where it comes while they run.
    """

    def __init__(
        self, geometry: Geometry, options: SplitOptions = SplitOptions(), plan: SplitPlan | None = None
    ) -> None:
        self._geometry = geometry
        self._plan = plan
        self._top = max(1, math.ceil(options.theta * geometry.segments_per_expert - 0.5))

    def shares(self, kept_slots: Sequence[int]) -> list[int]:
        """Whole tops, as equal as can be; what is left of one goes to the lowest layers that have room."""
        geometry, top = self._geometry, self._top
        if self._plan is not None:
            return [layer.budget_segments for layer in self._plan.layers]
        if top == geometry.segments_per_expert:
            return uniform_shares(geometry, kept_slots)
        shares = uniform_budgets(geometry, kept_slots)
        num_tops = [slots // top for slots in kept_slots]
        experts = uniform_budgets(replace(geometry, segments_per_expert=1), num_tops)
        for size_class, slots in enumerate(kept_slots):
            layers = layers_of(geometry, size_class)
            if sum(experts[layer] for layer in layers) < num_tops[size_class]:
                continue  # some of every expert is kept, and there is more
            rest = slots % top
            for layer in layers:
                shape = geometry.layers[layer]
                most = shape.num_experts * geometry.segments_per_expert
                shares[layer] = min(experts[layer] * top + rest, most)
                rest -= shares[layer] - experts[layer] * top
        return shares

    def tops(self, shares: Sequence[int]) -> list[int] | None:
        geometry = self._geometry
        if self._plan is not None:
            return [layer.kept_segments or geometry.segments_per_expert for layer in self._plan.layers]
        if self._top == geometry.segments_per_expert:
            return None
        pairs = zip(shares, geometry.layers, strict=True)
        return [max(self._top, share // layer.num_experts) for share, layer in pairs]
