"""A budget of memory as it was asked for: an amount, a share, or experts a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from expertly.core.errors import BudgetError, ConfigError
from expertly.core.geometry import Geometry
from expertly.core.resources import parse_memory
from expertly.scheduler.budget import Budget, class_segment_nbytes, default_ring, split_budget


@dataclass(frozen=True, slots=True)
class Memory:
    """One budget, as it was asked for: an amount, or a number of experts that every layer keeps."""

    label: str
    experts_per_layer: int | None = None

    def budget(self, geometry: Geometry, has_sizes: bool = True) -> Budget:
        """Raises BudgetError or ConfigError naming what does not fit. Without sizes only shares can be cut."""
        num_experts = self.experts_per_layer
        if num_experts is None:
            if not has_sizes and not self.label.strip().endswith("%"):
                raise ConfigError(
                    f"memory={self.label!r}: the trace does not know its experts' sizes; accepted without them: a "
                    'share ("25%")'
                )
            nbytes = parse_memory(self.label, geometry.nbytes)
            if nbytes is None:
                raise ConfigError("memory='auto': there is no machine to ask; accepted: a share (\"25%\") or an amount")
            self._check_ring(geometry, nbytes, has_sizes)
            return split_budget(geometry, nbytes)
        most = min(layer.num_experts for layer in geometry.layers)
        if not 0 <= num_experts <= most:
            raise BudgetError(f"experts_per_layer={num_experts}: must be from 0 to the {most} experts of a layer")
        shares = tuple(num_experts * geometry.segments_per_expert for _ in geometry.layers)
        kept = [0] * geometry.num_size_classes
        for size_class, share in zip(geometry.size_classes, shares, strict=True):
            kept[size_class] += share
        budget = Budget(0, tuple(default_ring(geometry)), tuple(kept), shares)
        return replace(budget, memory_nbytes=budget.kept_nbytes(geometry) + budget.ring_nbytes(geometry))

    def _check_ring(self, geometry: Geometry, nbytes: int, has_sizes: bool) -> None:
        """In the words of who asked: bytes say nothing where sizes are made up."""
        rings = zip(default_ring(geometry), class_segment_nbytes(geometry), strict=True)
        least = sum(slots * size for slots, size in rings)
        if nbytes < min(least, geometry.nbytes):
            percent = -(-10_000 * least // geometry.nbytes) / 100
            raise BudgetError(
                f"memory={self.label!r}: below the ring through which experts are streamed; the least is "
                f"{percent:.2f}% of the experts" + (f" ({least} bytes)" if has_sizes else "")
            )
