"""From a memory budget to slots: the ring, what is kept, and each cache's share (docs/conventions.md)."""

from __future__ import annotations

from dataclasses import dataclass

from expertly.core.errors import BudgetError
from expertly.core.geometry import Geometry


@dataclass(frozen=True, slots=True)
class Budget:
    """Slots of each size class. `kept_slots + ring_slots` is the whole pool; bytes never exceed what was given."""

    memory_nbytes: int
    ring_slots: tuple[int, ...]
    kept_slots: tuple[int, ...]
    layer_shares: tuple[int, ...]  # kept slots of each layer, when caches are per layer

    def pool_slots(self) -> list[int]:
        return [ring + kept for ring, kept in zip(self.ring_slots, self.kept_slots, strict=True)]

    def ring_nbytes(self, geometry: Geometry) -> int:
        return sum(n * size for n, size in zip(self.ring_slots, class_segment_nbytes(geometry), strict=True))

    def kept_nbytes(self, geometry: Geometry) -> int:
        return sum(n * size for n, size in zip(self.kept_slots, class_segment_nbytes(geometry), strict=True))


def class_segment_nbytes(geometry: Geometry) -> list[int]:
    """Bytes of a segment of each size class."""
    nbytes = [0] * geometry.num_size_classes
    for layer, size_class in enumerate(geometry.size_classes):
        nbytes[size_class] = geometry.segment_nbytes(layer)
    return nbytes


def default_ring(geometry: Geometry) -> list[int]:
    """K * P slots of each size class: what one token's experts need."""
    slots = [1] * geometry.num_size_classes
    for layer, size_class in enumerate(geometry.size_classes):
        slots[size_class] = max(slots[size_class], geometry.layers[layer].top_k * geometry.segments_per_expert)
    return slots


def split_budget(geometry: Geometry, memory_nbytes: int, ring: int | None = None) -> Budget:
    """Cut `memory_nbytes` into ring and kept slots, equal shares a layer, the remainder to the lowest layers.

    A budget that holds every expert keeps every expert and needs no ring. Raises BudgetError naming the least
    budget when it is below the ring.
    """
    sizes = class_segment_nbytes(geometry)
    totals = [0] * len(sizes)
    for layer, size_class in enumerate(geometry.size_classes):
        totals[size_class] += geometry.layers[layer].num_experts * geometry.segments_per_expert
    if memory_nbytes >= geometry.nbytes:
        shares = tuple(layer.num_experts * geometry.segments_per_expert for layer in geometry.layers)
        return Budget(memory_nbytes, (0,) * len(sizes), tuple(totals), shares)
    if ring is not None and ring < 1:
        raise BudgetError(f"ring={ring}: must be at least 1 segment")
    rings = default_ring(geometry) if ring is None else [ring] * len(sizes)
    rings = [min(slots, total) for slots, total in zip(rings, totals, strict=True)]
    least = sum(slots * size for slots, size in zip(rings, sizes, strict=True))
    if memory_nbytes < least:
        raise BudgetError(
            f"memory={memory_nbytes} bytes: below the ring through which experts are streamed; the least that works "
            f"is {least} bytes ({_percent_up(least, geometry.nbytes)}% of the experts)"
        )
    kept = _kept_slots(memory_nbytes - least, sizes, totals, rings)
    return Budget(memory_nbytes, tuple(rings), tuple(kept), tuple(_uniform_shares(geometry, kept)))


def _kept_slots(nbytes: int, sizes: list[int], totals: list[int], rings: list[int]) -> list[int]:
    """Kept slots of each class: the bytes left, in proportion to the classes' experts."""
    left = [total - ring for total, ring in zip(totals, rings, strict=True)]
    all_nbytes = sum(n * size for n, size in zip(left, sizes, strict=True))
    return [min(n, nbytes * n // all_nbytes) if all_nbytes else 0 for n in left]


def _uniform_shares(geometry: Geometry, kept: list[int]) -> list[int]:
    """Equal shares of each class's kept slots; a layer never gets more than its experts fill.

    Whole experts are shared out, then what is left of one. A layer whose share ends within an expert keeps a part of
    one, which leaves a hole in a frame; one such layer a class is harmless, one in every layer left the ring no frame
    (3.5 pieces an expert instead of 1, at P = 4).
    """
    num_segments = geometry.segments_per_expert
    shares = [0] * geometry.num_layers
    for size_class, slots in enumerate(kept):
        layers = [layer for layer, c in enumerate(geometry.size_classes) if c == size_class]
        num_experts, rest = divmod(slots, num_segments)
        open_layers = {layer: geometry.layers[layer].num_experts for layer in layers}
        for layer in sorted(layers, key=open_layers.__getitem__):  # those that an equal share more than fills
            if open_layers[layer] * len(open_layers) > num_experts:
                break
            shares[layer] = open_layers.pop(layer) * num_segments
            num_experts -= shares[layer] // num_segments
        for i, layer in enumerate(open_layers):
            more = num_experts // len(open_layers) + (i < num_experts % len(open_layers))
            shares[layer] = more * num_segments
        if rest:
            most = [geometry.layers[layer].num_experts * num_segments for layer in layers]
            shares[next(layer for layer, n in zip(layers, most, strict=True) if shares[layer] < n)] += rest
    return shares


def _percent_up(part: int, whole: int) -> str:
    """A percentage that, given back as a budget, is enough."""
    hundredths = -(-10_000 * part // whole)
    return f"{hundredths // 100}.{hundredths % 100:02}"
