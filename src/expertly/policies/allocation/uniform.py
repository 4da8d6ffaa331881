"""Equal quotas, or none at all."""

from __future__ import annotations

from collections.abc import Sequence

from expertly.core.errors import BudgetError
from expertly.core.geometry import Geometry
from expertly.policies.allocation.base import Allocation


class Uniform(Allocation):
    """Equal quotas of whole experts, the remainder to the lowest layers."""

    name = "uniform"

    def quotas(self, kept_slots: Sequence[int]) -> list[int]:
        return uniform_quotas(self.geometry, kept_slots)


class NoneKept(Allocation):
    """No layer keeps anything (Pre-gated MoE): every expert uses staging slots and is dropped when its layer ends."""

    name = "none"
    keeps = False

    def quotas(self, kept_slots: Sequence[int]) -> list[int]:
        return [0] * self.geometry.num_layers


def equal_quotas(geometry: Geometry, totals: Sequence[int], segments_per_expert: int | None = None) -> list[int]:
    """For each layer an equal quota of the segments of its size class, the remainder to the lowest layers, and none
    more than its experts fill. `segments_per_expert`: 1 counts whole experts; None: as the model is cut.

    Raises BudgetError where `totals` is not a number at least 0 for each class.
    """
    if len(totals) != geometry.num_size_classes or min(totals) < 0:
        accepted = f"a number at least 0 for each of {geometry.num_size_classes} size classes"
        raise BudgetError(f"kept_segments={list(totals)}: must be {accepted}")
    per_expert = segments_per_expert or geometry.segments_per_expert
    quotas = [0] * geometry.num_layers
    for size_class, total in enumerate(totals):
        most = {
            layer: geometry.layers[layer].num_experts * per_expert for layer in geometry.layers_of_class(size_class)
        }
        left = min(total, sum(most.values()))
        waiting = sorted(most, key=most.__getitem__)  # those that an equal quota more than fills come first
        while waiting and most[waiting[0]] * len(waiting) <= left:
            layer = waiting.pop(0)
            quotas[layer] = most[layer]
            left -= most[layer]
        for number, layer in enumerate(sorted(waiting)):
            quotas[layer] = left // len(waiting) + (number < left % len(waiting))
    return quotas


def uniform_quotas(geometry: Geometry, kept_slots: Sequence[int]) -> list[int]:
    """Equal quotas of whole experts; then the remainder.

    A layer whose quota ends within an expert keeps a part of one, which leaves a hole in a block of slots. One such
    layer a class is harmless; one in every layer left no whole block (3.5 spans an expert instead of 1, at P = 4).
    """
    num_segments = geometry.segments_per_expert
    experts = equal_quotas(geometry, [slots // num_segments for slots in kept_slots], 1)
    return with_rests(geometry, kept_slots, [num * num_segments for num in experts])


def with_rests(geometry: Geometry, kept_slots: Sequence[int], quotas: list[int]) -> list[int]:
    """Quotas of whole experts to which what remains of one in a size class is added, in its lowest layer that is not
    full.
    """
    num_segments = geometry.segments_per_expert
    for size_class, slots in enumerate(kept_slots):
        if rest := slots % num_segments:
            layers = geometry.layers_of_class(size_class)
            quotas[next(one for one in layers if quotas[one] < geometry.layers[one].num_experts * num_segments)] += rest
    return quotas


def whole_tops(quota: int, top: int, num_experts: int) -> int:
    """The segments of a layer's quota that hold whole tops, of `top` segments each."""
    return min(quota // top, num_experts) * top
