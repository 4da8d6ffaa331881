"""No layer keeps anything: every expert passes through the ring (Pre-gated MoE)."""

from __future__ import annotations

from collections.abc import Sequence

from expertly.core.geometry import Geometry
from expertly.policies.allocation.base import Allocation


class NoneKept(Allocation):
    """All slots are the ring's: what a layer has computed is gone when it ends, only what is loaded ahead is there."""

    def __init__(self, geometry: Geometry) -> None:
        self._num_layers = geometry.num_layers

    def shares(self, kept_slots: Sequence[int]) -> list[int]:
        return [0] * self._num_layers
