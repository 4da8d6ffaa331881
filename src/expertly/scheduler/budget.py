"""From a memory budget to slots: for staging, for caches, and each layer's quota (docs/conventions.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import gt, mul, sub

from expertly.core.errors import BudgetError, ConfigError
from expertly.core.geometry import Geometry
from expertly.policies.allocation import Allocation, uniform_quotas


@dataclass(frozen=True, slots=True)
class Budget:
    """Slots of each size class: `kept_slots` for caches, `staging_slots` for staging. They never exceed the memory."""

    memory_nbytes: int
    staging_slots: tuple[int, ...]
    kept_slots: tuple[int, ...]
    layer_quotas: tuple[int, ...]  # kept slots of each layer at the start, where each has its own cache

    def pool_slots(self) -> list[int]:
        """Staging and kept slots together, for each size class."""
        return [staging + kept for staging, kept in zip(self.staging_slots, self.kept_slots, strict=True)]

    def staging_nbytes(self, geometry: Geometry) -> int:
        return _nbytes(geometry, self.staging_slots)

    def kept_nbytes(self, geometry: Geometry) -> int:
        return _nbytes(geometry, self.kept_slots)


def class_segment_nbytes(geometry: Geometry) -> list[int]:
    return [geometry.unit_nbytes[geometry.size_classes.index(c)] for c in range(geometry.num_size_classes)]


def default_staging(geometry: Geometry) -> list[int]:
    """Staging slots of each size class: top_k * P, what one token's experts need."""
    top_k = [0] * geometry.num_size_classes
    for size_class, layer in zip(geometry.size_classes, geometry.layers, strict=True):
        top_k[size_class] = max(top_k[size_class], layer.top_k)
    return [num * geometry.segments_per_expert for num in top_k]


def least_nbytes(geometry: Geometry, staging: int | None = None) -> int:
    """The least budget: that of the staging slots."""
    return _nbytes(geometry, _staging_slots(geometry, staging))


def split_budget(geometry: Geometry, memory_nbytes: int, staging: int | None = None) -> Budget:
    """Cut `memory_nbytes` into staging slots (`staging` of each size class) and kept slots, which layers share
    equally; the lowest get what is left. A budget that holds every expert keeps every expert and stages none.

    Raises BudgetError naming the least budget where it is below the staging slots.
    """
    segments = _layer_segments(geometry)
    totals = geometry.class_sums(segments)
    if memory_nbytes >= geometry.nbytes:
        return Budget(memory_nbytes, (0,) * len(totals), tuple(totals), tuple(segments))
    if staging is not None and staging < 1:
        raise BudgetError(f"staging_slots={staging}: must be at least 1 segment")
    staging_slots = _staging_slots(geometry, staging)
    least = _nbytes(geometry, staging_slots)
    if memory_nbytes < least:
        hundredths = -(-10_000 * least // geometry.nbytes)  # rounded up: enough when given back as a budget
        raise BudgetError(
            f"memory={memory_nbytes} bytes: below the staging slots through which experts are streamed; the least that "
            f"works is {least} bytes ({hundredths // 100}.{hundredths % 100:02}% of the experts)"
        )
    left = [total - num for total, num in zip(totals, staging_slots, strict=True)]
    left_nbytes = _nbytes(geometry, left)  # the bytes left are shared in proportion to the classes' experts
    kept = [min(num, (memory_nbytes - least) * num // left_nbytes) if left_nbytes else 0 for num in left]
    return Budget(memory_nbytes, tuple(staging_slots), tuple(kept), tuple(uniform_quotas(geometry, kept)))


def allocate(geometry: Geometry, budget: Budget, allocation: Allocation) -> Budget:
    """The budget with the quotas that an allocation starts with; slots that no layer keeps become staging slots. Raises
    ConfigError where it keeps more than there is.
    """
    quotas = allocation.quotas(budget.kept_slots)
    kept = check_quotas(geometry, quotas)
    if any(map(gt, kept, budget.kept_slots)):
        raise ConfigError(f"allocation: keeps {kept} segments of each size; accepted: at most {budget.kept_slots}")
    if allocation.tops(quotas) is not None:  # what splits leave is for staging now, and another plan may keep it
        return replace(budget, layer_quotas=tuple(quotas))
    staging = map(sub, budget.pool_slots(), kept)
    return Budget(budget.memory_nbytes, tuple(staging), tuple(kept), tuple(quotas))


def check_quotas(geometry: Geometry, quotas: Sequence[int]) -> list[int]:
    """The sum of the layers' quotas in each size class. Raises ConfigError where a quota is impossible."""
    if len(quotas) != geometry.num_layers:
        raise ConfigError(f"allocation: {len(quotas)} quotas; must be one for each of {geometry.num_layers} layers")
    for layer, (most, quota) in enumerate(zip(_layer_segments(geometry), quotas, strict=True)):
        if not 0 <= quota <= most:
            raise ConfigError(f"allocation: quota={quota} of layer {layer}: must be from 0 to its {most} segments")
    return geometry.class_sums(quotas)


def _nbytes(geometry: Geometry, slots: Sequence[int]) -> int:
    return sum(map(mul, slots, class_segment_nbytes(geometry)))


def _layer_segments(geometry: Geometry) -> list[int]:
    return [layer.num_experts * geometry.segments_per_expert for layer in geometry.layers]


def _staging_slots(geometry: Geometry, asked: int | None) -> list[int]:
    """Staging slots of each size class: as many as are `asked` for, at most all segments of the class."""
    each = default_staging(geometry) if asked is None else [asked] * geometry.num_size_classes
    return list(map(min, each, geometry.class_sums(_layer_segments(geometry))))
