"""Every layer keeps as much as any other."""

from __future__ import annotations

from collections.abc import Sequence

from expertly.core.geometry import Geometry
from expertly.policies.allocation.base import Allocation


class Uniform(Allocation):
    """Equal shares of whole experts, the remainder to the lowest layers."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry

    def shares(self, kept_slots: Sequence[int]) -> list[int]:
        return uniform_shares(self._geometry, kept_slots)


def uniform_shares(geometry: Geometry, kept_slots: Sequence[int]) -> list[int]:
    """Equal shares of each class's kept slots; a layer never gets more than its experts fill.

    Whole experts are shared out, then what is left of one. A layer whose share ends within an expert keeps a part of
    one, which leaves a hole in a frame; one such layer a class is harmless, one in every layer left the ring no frame
    (3.5 pieces an expert instead of 1, at P = 4).
    """
    num_segments = geometry.segments_per_expert
    shares = [0] * geometry.num_layers
    for size_class, slots in enumerate(kept_slots):
        layers = layers_of(geometry, size_class)
        num_experts = slots // num_segments
        open_layers = {layer: geometry.layers[layer].num_experts for layer in layers}
        for layer in sorted(layers, key=open_layers.__getitem__):  # those that an equal share more than fills
            if open_layers[layer] * len(open_layers) > num_experts:
                break
            shares[layer] = open_layers.pop(layer) * num_segments
            num_experts -= shares[layer] // num_segments
        for i, layer in enumerate(open_layers):
            more = num_experts // len(open_layers) + (i < num_experts % len(open_layers))
            shares[layer] = more * num_segments
    return with_rests(geometry, kept_slots, shares)


def with_rests(geometry: Geometry, kept_slots: Sequence[int], shares: list[int]) -> list[int]:
    """Shares of whole experts; what is left of one in a size class goes to the lowest layer of it that is not full."""
    num_segments = geometry.segments_per_expert
    for size_class, slots in enumerate(kept_slots):
        if rest := slots % num_segments:
            most = {
                layer: geometry.layers[layer].num_experts * num_segments for layer in layers_of(geometry, size_class)
            }
            shares[next(layer for layer, num in most.items() if shares[layer] < num)] += rest
    return shares


def layers_of(geometry: Geometry, size_class: int) -> list[int]:
    """The layers of a size class, from the lowest."""
    return [layer for layer, its_class in enumerate(geometry.size_classes) if its_class == size_class]
