"""Which segments stay in memory as they are stored, and so come back without a read: decided, not moved, here."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from expertly.core.geometry import Geometry, Segment

HALF_LIFE = 4
"""A load counts half after so many loads a segment of its size class, some dozens of tokens at usual budgets. Where
requests of all kinds follow one another 1 to 4 are best; where one kind goes on, 16, by a point or two.
"""

_MOST = 1e200  # a weight beyond which scores are scaled down


class TierSlot(NamedTuple):
    """Where a segment's stored bytes lie, in the pool of its layer's size class."""

    slot: int
    is_filled: bool  # they are there: decode them; else read them from the disk into it, and they stay


class CompressedTier:
    """Slots of stored segments, between the disk and the tier above. One caller thread; deterministic.

    A copy comes from a read only, never from an eviction above: compressing again would cost more than reading. So what
    is worth a slot is what is *loaded* often, not what is used often: the tier keeps the segments with the most loads,
    each load counting less as it ages. A segment takes another's slot if its loads before this one are worth more than
    all of the other's; so what comes once, or only as often as the rest, passes by. What stays resident above is not
    loaded, and so leaves by itself.

    Call `begin`, then one of `end`, `fail` and `withdraw`, of each segment that is loaded; between them it is
    referenced and never evicted, and not begun again.
    """

    def __init__(self, geometry: Geometry, slots_per_class: Sequence[int]) -> None:
        self._geometry = geometry
        self._classes = [_Class(num, total) for num, total in zip(slots_per_class, _totals(geometry), strict=True)]

    @property
    def slots_per_class(self) -> list[int]:
        """Slots of the pools, by size class."""
        return [one.num_slots for one in self._classes]

    def begin(self, layer: int, expert: int, segment: int) -> TierSlot | None:
        """A segment is to be loaded. None: it is not here and does not stay; read it beside."""
        return self._class(layer).begin(self._id(layer, expert, segment))

    def end(self, layer: int, expert: int, segment: int) -> None:
        """It has arrived: if it had a slot to fill, that is filled now. Nothing where `begin` gave None."""
        self._class(layer).end(self._id(layer, expert, segment), is_good=True)

    def fail(self, layer: int, expert: int, segment: int) -> None:
        """It has not arrived, and what its slot holds is worth nothing: the slot is free again."""
        self._class(layer).end(self._id(layer, expert, segment), is_good=False)

    def withdraw(self, layer: int, expert: int, segment: int) -> None:
        """It is not loaded after all, and nobody has begun to: a slot to fill is free again, a filled one stays."""
        self._class(layer).withdraw(self._id(layer, expert, segment))

    def abandon(self) -> None:
        """Nothing is being loaded any more, and nobody knows how far it came: what was begun is not here any more.

        Puts right what an interrupt in the middle of any other call left.
        """
        for one in self._classes:
            one.abandon()

    def holds(self, layer: int, expert: int, segment: int) -> bool:
        """Whether a load of the segment would need no read now."""
        return self._class(layer).is_filled(self._id(layer, expert, segment))

    def check(self) -> None:
        """Every slot is free or owned once, and what is referenced has one."""
        for one in self._classes:
            one.check()

    def _class(self, layer: int) -> _Class:
        return self._classes[self._geometry.size_classes[layer]]

    def _id(self, layer: int, expert: int, segment: int) -> int:
        return self._geometry.segment_id(Segment(layer, expert, segment))


class _Class:
    """The slots of one size class. Segments are dense ids over all layers."""

    def __init__(self, num_slots: int, num_segments: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # lowest on top
        self._slots: dict[int, int] = {}  # of the segments that have one
        self._filling: dict[int, None] = {}  # referenced, and the slot is not filled yet
        self._decoding: dict[int, None] = {}  # referenced, and it is
        self._scores: dict[int, float] = {}  # of all that were loaded: the sum of their loads' weights
        self._order: list[tuple[float, int]] = []  # a heap over what is in slots, with entries that are out of date
        self._weight = 1.0  # of a load now: it grows, so that loads before it count less
        self._growth = 2.0 ** (1.0 / (HALF_LIFE * num_segments))

    def begin(self, sid: int) -> TierSlot | None:
        assert sid not in self._filling and sid not in self._decoding, "a segment has one load at a time"
        before, score = self._loaded(sid)
        slot = self._slots.get(sid)
        if slot is not None:
            self._decoding[sid] = None
            heappush(self._order, (score, sid))
            return TierSlot(slot, True)
        if not self._free and not self._evict(before):
            return None
        self._filling[sid] = None  # first: what has a slot and is not filling is taken to be filled
        slot = self._slots[sid] = self._free.pop()
        heappush(self._order, (score, sid))
        return TierSlot(slot, False)

    def end(self, sid: int, is_good: bool) -> None:
        if not is_good and (sid in self._filling or sid in self._decoding):
            self._free.append(self._slots.pop(sid))
        self._filling.pop(sid, None)
        self._decoding.pop(sid, None)

    def withdraw(self, sid: int) -> None:
        self.end(sid, is_good=sid not in self._filling)

    def abandon(self) -> None:
        for sid in (*self._filling, *self._decoding):
            self._slots.pop(sid, None)
        self._filling, self._decoding = {}, {}
        owned = set(self._slots.values())
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in owned]
        self._rebuild()

    def is_filled(self, sid: int) -> bool:
        return sid in self._slots and sid not in self._filling

    def check(self) -> None:
        assert sorted([*self._free, *self._slots.values()]) == list(range(self.num_slots))
        assert not self._filling.keys() & self._decoding.keys()
        assert self._filling.keys() | self._decoding.keys() <= self._slots.keys()
        assert self._slots.keys() <= {sid for score, sid in self._order if score == self._scores[sid]}

    def _loaded(self, sid: int) -> tuple[float, float]:
        """Count a load; the segment's score without and with it."""
        self._weight *= self._growth
        if self._weight > _MOST:
            self._scores = {one: score / self._weight for one, score in self._scores.items()}
            self._weight = 1.0
            self._rebuild()
        elif len(self._order) > 4 * self.num_slots + 64:
            self._rebuild()
        before = self._scores.get(sid, 0.0)
        self._scores[sid] = before + self._weight
        return before, self._scores[sid]

    def _rebuild(self) -> None:
        """Drop entries that are out of date."""
        self._order = [(self._scores[sid], sid) for sid in self._slots]
        heapify(self._order)

    def _evict(self, score: float) -> bool:
        """Free the slot of the segment that is worth least; False where no segment that may go is worth less."""
        order, busy = self._order, []
        found = False
        while order:
            worth, sid = order[0]
            if sid not in self._slots or worth != self._scores[sid]:
                heappop(order)
                continue
            if worth >= score:
                break
            heappop(order)
            if sid in self._filling or sid in self._decoding:
                busy.append((worth, sid))
                continue
            self._free.append(self._slots.pop(sid))
            found = True
            break
        for entry in busy:
            heappush(order, entry)
        return found


def _totals(geometry: Geometry) -> list[int]:
    """Segments of all experts of each size class."""
    totals = [0] * geometry.num_size_classes
    for layer, size_class in enumerate(geometry.size_classes):
        totals[size_class] += geometry.layers[layer].num_experts * geometry.segments_per_expert
    return totals


def tier_slots(geometry: Geometry, slot_nbytes: Sequence[int], memory_nbytes: int) -> list[int]:
    """Slots of each size class that `memory_nbytes` pays for, in proportion to the classes' segments, at most one each.

    `slot_nbytes`: of each class, what its largest stored segment takes as it is held.
    """
    totals = _totals(geometry)
    needed = sum(total * size for total, size in zip(totals, slot_nbytes, strict=True))
    return [min(total, memory_nbytes * total // needed) for total in totals]
