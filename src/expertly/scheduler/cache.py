"""What is kept between layers: one cache a scope (a layer, or all layers of a size class), with a capacity."""

from __future__ import annotations

from collections.abc import Container

from expertly.policies.eviction import EvictionPolicy
from expertly.scheduler.slot_table import bits


class KeptCache:
    """Owns the accounting of kept segments; the policy only orders. Capacity and counts are in segments."""

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self.capacity = capacity
        self.policy = policy
        self.used = 0
        self.kept: dict[int, int] = {}  # expert id -> mask of kept segments

    @property
    def room(self) -> int:
        return self.capacity - self.used

    def keep(self, expert: int, mask: int) -> None:
        """Keep `mask` of the expert from now on. Needs room for it."""
        before = self.kept.get(expert, 0)
        assert not before & mask
        self.used += mask.bit_count()
        assert self.used <= self.capacity, "the kept budget is never exceeded"
        self.kept[expert] = before | mask
        if not before:
            self.policy.admitted(expert)

    def drop(self, expert: int, mask: int) -> None:
        """No longer keep `mask` of the expert."""
        left = self.kept[expert] & ~mask
        self.used -= mask.bit_count()
        if left:
            self.kept[expert] = left
        else:
            del self.kept[expert]
            self.policy.removed(expert)

    def evict(self, num_segments: int, protected: Container[int]) -> list[tuple[int, int]] | None:
        """Drop `num_segments` segments of experts outside `protected`; (expert, mask) of each, or None and no change.

        A victim loses its last segments first, so that what stays of it is its top.
        """
        if num_segments > self.used:
            return None
        victims, missing = self._victims(num_segments, protected)
        if missing:
            return None
        for expert, mask in victims:
            self.drop(expert, mask)
        return victims

    def shrink(self, capacity: int, protected: Container[int]) -> list[tuple[int, int]]:
        """Hold no more than `capacity` from now on, or as little more as experts outside `protected` allow; what went
        for it, as `evict` has it.
        """
        victims, missing = self._victims(max(0, self.used - capacity), protected)
        for expert, mask in victims:
            self.drop(expert, mask)
        self.capacity = capacity + missing
        return victims

    def _victims(self, num_segments: int, protected: Container[int]) -> tuple[list[tuple[int, int]], int]:
        """What goes for so many segments, and how many are missing still. Changes nothing."""
        victims: list[tuple[int, int]] = []
        if not num_segments:
            return victims, 0
        missing = num_segments
        for expert in self.policy.victims(protected):
            mask = self.kept[expert]
            count = mask.bit_count()
            if count > missing:
                mask = sum(1 << segment for segment in bits(mask)[count - missing :])
                count = missing
            victims.append((expert, mask))
            missing -= count
            if not missing:
                break
        return victims, missing
