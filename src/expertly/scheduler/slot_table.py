"""One tier: which segments are resident or loading, and in which slots."""

from __future__ import annotations

from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.scheduler.runs import RunPool
from expertly.scheduler.slots import SlotPool


def bits(mask: int) -> list[int]:
    """Positions of the ones, lowest first."""
    out, i = [], 0
    while mask:
        if mask & 1:
            out.append(i)
        mask >>= 1
        i += 1
    return out


class SlotTable:
    """Segments of an expert are a bit mask (bit s: segment s). Experts are dense ids over all layers.

    A segment owns exactly one slot from `allocate` to `release`; it is loading until `arrived`, then resident.
    """

    def __init__(self, geometry: Geometry, slots_per_class: list[int], *, in_parts: bool = False) -> None:
        """`in_parts`: experts come and go in parts, so that a frame for each would leave holes."""
        self.geometry = geometry
        num_segments = geometry.segments_per_expert
        self.full = (1 << num_segments) - 1
        self.pools: list[SlotPool | RunPool] = [
            RunPool(num_slots) if in_parts else SlotPool(num_slots, num_segments) for num_slots in slots_per_class
        ]
        self.resident = [0] * geometry.num_experts
        self.loading = [0] * geometry.num_experts
        self.whole: list[Span | None] = [None] * geometry.num_experts  # resident in one frame: the fast path
        self._slots: dict[int, list[int | None]] = {}
        self._frame: dict[int, int] = {}  # first slot, of experts allocated whole
        self._num_segments = num_segments

    def pool_of(self, layer: int) -> SlotPool | RunPool:
        return self.pools[self.geometry.size_classes[layer]]

    def allocate(self, layer: int, expert: int, mask: int) -> list[Span]:
        """Give `mask` of (layer, expert) slots and call it loading; the spans to load. Needs that many free slots."""
        pool = self.pool_of(layer)
        eid = self.geometry.first_expert_id(layer) + expert
        assert not mask & (self.resident[eid] | self.loading[eid]), "a segment has one slot"
        self.loading[eid] |= mask
        if isinstance(pool, RunPool):
            return self._runs(layer, expert, self._take_runs(pool, eid, mask), mask)
        if mask == self.full:
            start = pool.take_frame()
            if start is not None:
                self._frame[eid] = start
                return [Span(layer, expert, 0, self._num_segments, start)]
        slots = self._own_slots(eid)
        home = self._home(slots)
        for segment in bits(mask):
            slot = pool.take(None if home is None else home + segment)
            slots[segment] = slot
            if home is None and slot % self._num_segments == segment:
                home = slot - segment
        return self._runs(layer, expert, slots, mask)

    def _take_runs(self, pool: RunPool, eid: int, mask: int) -> list[int | None]:
        """Slots for `mask`, beside those that the expert has; all of its slots."""
        slots = self._own_slots(eid)
        segments = bits(mask)
        while segments:
            first = segments[0]
            num = next((i for i, segment in enumerate(segments) if segment != first + i), len(segments))
            before = slots[first - 1] if first else None
            slots[first : first + num] = pool.take(num, None if before is None else before + 1)
            del segments[:num]
        return slots

    def arrived(self, span: Span) -> None:
        """A span that was loading is resident."""
        eid = self.geometry.first_expert_id(span.layer) + span.expert
        mask = ((1 << span.num_segments) - 1) << span.segment
        assert self.loading[eid] & mask == mask, "only what is loading arrives"
        self.loading[eid] ^= mask
        self.resident[eid] |= mask
        if self.resident[eid] == self.full:
            spans = self.spans(span.layer, span.expert, self.full)
            self.whole[eid] = spans[0] if len(spans) == 1 else None

    def release(self, layer: int, expert: int, mask: int) -> None:
        """Free the slots of `mask`, resident or loading."""
        pool = self.pool_of(layer)
        eid = self.geometry.first_expert_id(layer) + expert
        assert (self.resident[eid] | self.loading[eid]) & mask == mask, "only what has a slot gives it back"
        self.resident[eid] &= ~mask
        self.loading[eid] &= ~mask
        self.whole[eid] = None
        if mask == self.full and eid in self._frame:
            assert isinstance(pool, SlotPool)
            pool.give_frame(self._frame.pop(eid))
            return
        slots = self._own_slots(eid)
        for segment in bits(mask):
            slot = slots[segment]
            assert slot is not None
            pool.give(slot)
            slots[segment] = None
        if not self.resident[eid] | self.loading[eid]:
            del self._slots[eid]

    def spans(self, layer: int, expert: int, mask: int) -> list[Span]:
        """`mask` as runs of adjacent segments in adjacent slots."""
        eid = self.geometry.first_expert_id(layer) + expert
        whole = self.whole[eid]
        if whole is not None and mask == self.full:
            return [whole]
        start = self._frame.get(eid)
        if start is not None:
            slots: list[int | None] = list(range(start, start + self._num_segments))
            return self._runs(layer, expert, slots, mask)
        return self._runs(layer, expert, self._slots[eid], mask)

    def _own_slots(self, eid: int) -> list[int | None]:
        """The slot list of an expert; a frame is turned into single slots."""
        start = self._frame.pop(eid, None)
        if start is not None:
            self._slots[eid] = list(range(start, start + self._num_segments))
        return self._slots.setdefault(eid, [None] * self._num_segments)

    def _home(self, slots: list[int | None]) -> int | None:
        for segment, slot in enumerate(slots):
            if slot is not None and slot % self._num_segments == segment:
                return slot - segment
        return None

    def _runs(self, layer: int, expert: int, slots: list[int | None], mask: int) -> list[Span]:
        runs: list[Span] = []
        first, count, start = 0, 0, 0
        for segment in bits(mask):
            slot = slots[segment]
            assert slot is not None
            if count and segment == first + count and slot == start + count:
                count += 1
                continue
            if count:
                runs.append(Span(layer, expert, first, count, start))
            first, count, start = segment, 1, slot
        if count:
            runs.append(Span(layer, expert, first, count, start))
        return runs

    def check(self) -> None:
        """Every slot of every pool is free or owned by exactly one segment; masks agree with slots."""
        geometry = self.geometry
        owned: list[list[int]] = [[] for _ in self.pools]
        for eid in range(geometry.num_experts):
            layer = geometry.layer_of_expert(eid)
            mask = self.resident[eid] | self.loading[eid]
            assert not self.resident[eid] & self.loading[eid], f"expert {eid} both resident and loading"
            start, slots = self._frame.get(eid), self._slots.get(eid)
            if start is not None:
                assert mask == self.full, f"expert {eid}: slots do not match its state"
                owned[geometry.size_classes[layer]].extend(range(start, start + self._num_segments))
            elif mask or slots:
                held = [(segment, slot) for segment, slot in enumerate(slots or ()) if slot is not None]
                assert [segment for segment, _ in held] == bits(mask), f"expert {eid}: slots do not match its state"
                owned[geometry.size_classes[layer]].extend([slot for _, slot in held])
        for pool, slots_used in zip(self.pools, owned, strict=True):
            everything = sorted([*slots_used, *pool.free_slots()])
            assert everything == list(range(pool.num_slots)), "a slot is lost or owned twice"
            assert pool.num_free == pool.num_slots - len(slots_used), "free count is wrong"
