"""The allocation of Pre-gated MoE: no layer keeps anything."""

from __future__ import annotations

from collections.abc import Sequence

from expertly.policies.allocation import Allocation


class NoneKept(Allocation):
    """Every expert uses staging slots, and is dropped when its layer ends."""

    name = "none"
    keeps = False

    def quotas(self, kept_slots: Sequence[int]) -> list[int]:
        return [0] * self.geometry.num_layers
