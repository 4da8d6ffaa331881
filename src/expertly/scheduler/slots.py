"""Which segments are on a device or on their way to it, in which slots, and which slots are free."""

from __future__ import annotations

from functools import lru_cache

from expertly.core.geometry import Geometry
from expertly.core.messages import Span

_NO_SLOT = -1


class SlotTable:
    """The state of every segment, and its slot. Experts are dense ids; masks have bit s for segment s.

    A segment is absent (it has no slot), in flight or resident. In flight, it is `awaited` (the running layer needs it
    now), `requested` (the running layer needs it in a later turn) or `prefetching` (it is predicted). Each state is one
    mask an expert; the masks of an expert are disjoint, which `check` verifies.
    """

    def __init__(self, geometry: Geometry, slots_per_class: list[int], *, in_parts: bool = False) -> None:
        """`in_parts`: experts come and go in parts, so that giving each a whole block would leave holes."""
        self.geometry = geometry
        self.full = (1 << geometry.segments_per_expert) - 1
        self.pools: list[BlockPool | RunPool] = [
            RunPool(num) if in_parts else BlockPool(num, geometry.segments_per_expert) for num in slots_per_class
        ]
        self.resident = [0] * geometry.num_experts
        self.whole: list[Span | None] = [None] * geometry.num_experts
        """The span of each expert that is wholly resident in adjacent slots."""
        self.in_flight = [0] * geometry.num_experts
        """Segments that are awaited, requested or prefetching."""
        self.awaited: dict[int, int] = {}
        self.requested: dict[int, int] = {}
        self.prefetching: dict[int, int] = {}
        self._num_segments = geometry.segments_per_expert
        self._layer_of = [geometry.layer_of_expert(eid) for eid in range(geometry.num_experts)]
        self._first_of = [geometry.first_expert_id(layer) for layer in range(geometry.num_layers)]
        self._pool_of = [self.pools[size_class] for size_class in geometry.size_classes]
        self._slots: dict[int, list[int]] = {}  # of experts with slots, by segment
        self._blocks: dict[int, Span] = {}  # for experts in one block of slots, in place of that

    def absent(self, eid: int) -> int:
        return self.full & ~(self.resident[eid] | self.in_flight[eid])

    def num_free(self, layer: int) -> int:
        """Free slots of the layer's size class."""
        return self._pool_of[layer].num_free

    def allocate(self, eid: int, mask: int, purpose: dict[int, int]) -> list[Span]:
        """Give absent segments slots, of which there are enough: they are in flight as `purpose` says (`awaited`,
        `requested` or `prefetching`). Returns the spans to load.
        """
        layer = self._layer_of[eid]
        pool = self._pool_of[layer]
        assert not mask & (self.resident[eid] | self.in_flight[eid]), "a segment has one slot"
        self.in_flight[eid] |= mask
        purpose[eid] = purpose.get(eid, 0) | mask
        if isinstance(pool, BlockPool):
            if mask == self.full:
                start = pool.take_block()
                if start is not None:
                    span = self._blocks[eid] = Span(layer, eid - self._first_of[layer], 0, self._num_segments, start)
                    return [span]
            slots = self._own_slots(eid)
            home = self._home(slots)
            for segment in bits(mask):
                slots[segment] = slot = pool.take(None if home is None else home + segment)
                if home is None and slot % self._num_segments == segment:
                    home = slot - segment
        else:
            slots = self._own_slots(eid)
            self._take_runs(pool, slots, mask)
        return self._spans(eid, slots, mask)

    def arrived(self, eid: int, mask: int, purpose: dict[int, int]) -> None:
        """Segments in flight for this purpose are resident now."""
        left = purpose[eid] & ~mask
        if left:
            purpose[eid] = left
        else:
            del purpose[eid]
        assert self.in_flight[eid] & mask == mask, "only segments in flight arrive"
        self.in_flight[eid] ^= mask
        resident = self.resident[eid] = self.resident[eid] | mask
        if resident == self.full:
            whole = self._blocks.get(eid)
            if whole is None:
                spans = self._spans(eid, self._slots[eid], resident)
                whole = spans[0] if len(spans) == 1 else None
            self.whole[eid] = whole

    def await_in_flight(self, eid: int) -> list[Span]:
        """The running layer needs the expert now: its segments in flight are awaited. Returns their spans."""
        mask = self.requested.pop(eid, 0) | self.prefetching.pop(eid, 0)
        if not mask:
            return []
        self.awaited[eid] = self.awaited.get(eid, 0) | mask
        return self.spans(eid, mask)

    def release(self, eid: int, mask: int) -> None:
        """Free the slots of segments that are resident or in flight: they are absent now."""
        assert (self.resident[eid] | self.in_flight[eid]) & mask == mask, "only segments with a slot can be released"
        if self.in_flight[eid] & mask:
            self.in_flight[eid] &= ~mask
            for purpose in (self.awaited, self.requested, self.prefetching):
                if eid in purpose:
                    purpose[eid] &= ~mask
                    if not purpose[eid]:
                        del purpose[eid]
        self.resident[eid] &= ~mask
        self.whole[eid] = None
        pool = self._pool_of[self._layer_of[eid]]
        if mask == self.full and eid in self._blocks:
            assert isinstance(pool, BlockPool)
            pool.give_block(self._blocks.pop(eid).slot)
            return
        slots = self._own_slots(eid)
        for segment in bits(mask):
            pool.give(slots[segment])
            slots[segment] = _NO_SLOT
        if not self.resident[eid] | self.in_flight[eid]:
            del self._slots[eid]

    def spans(self, eid: int, mask: int) -> list[Span]:
        """`mask` as runs of adjacent segments in adjacent slots."""
        whole = self.whole[eid]
        if whole is not None and mask == self.full:
            return [whole]
        block = self._blocks.get(eid)
        slots = self._slots[eid] if block is None else range(block.slot, block.slot + self._num_segments)
        return self._spans(eid, slots, mask)

    def _own_slots(self, eid: int) -> list[int]:
        """The slots of an expert by segment; its block, if it has one, becomes single slots."""
        block = self._blocks.pop(eid, None)
        if block is not None:
            self._slots[eid] = list(range(block.slot, block.slot + self._num_segments))
        return self._slots.setdefault(eid, [_NO_SLOT] * self._num_segments)

    def _home(self, slots: list[int]) -> int | None:
        """First slot of the block in which the expert has segments already."""
        for segment, slot in enumerate(slots):
            if slot != _NO_SLOT and slot % self._num_segments == segment:
                return slot - segment
        return None

    def _take_runs(self, pool: RunPool, slots: list[int], mask: int) -> None:
        """Take slots for `mask`, next to those that the expert has."""
        segments = list(bits(mask))
        while segments:
            first = segments[0]
            num = next((i for i, segment in enumerate(segments) if segment != first + i), len(segments))
            before = slots[first - 1] if first else _NO_SLOT
            slots[first : first + num] = pool.take(num, None if before == _NO_SLOT else before + 1)
            del segments[:num]

    def _spans(self, eid: int, slots: list[int] | range, mask: int) -> list[Span]:
        layer = self._layer_of[eid]
        expert = eid - self._first_of[layer]
        spans: list[Span] = []
        first, count, start = 0, 0, 0
        for segment in bits(mask):
            slot = slots[segment]
            if count and segment == first + count and slot == start + count:
                count += 1
                continue
            if count:
                spans.append(Span(layer, expert, first, count, start))
            first, count, start = segment, 1, slot
        if count:
            spans.append(Span(layer, expert, first, count, start))
        return spans

    def check(self) -> None:
        """Assert that every slot is free or belongs to one segment, and that every segment is in one state."""
        owned: list[list[int]] = [[] for _ in self.pools]
        for eid in range(self.geometry.num_experts):
            purposes = [purpose.get(eid, 0) for purpose in (self.awaited, self.requested, self.prefetching)]
            assert not self.resident[eid] & self.in_flight[eid], f"expert {eid} both resident and in flight"
            assert sum(purposes) == self.in_flight[eid], f"expert {eid}: in flight for no purpose, or for two"
            mask = self.resident[eid] | self.in_flight[eid]
            size_class = self.geometry.size_classes[self._layer_of[eid]]
            block, slots = self._blocks.get(eid), self._slots.get(eid)
            if block is not None:
                assert mask == self.full and slots is None, f"expert {eid}: slots do not match its state"
                owned[size_class] += range(block.slot, block.slot + self._num_segments)
            elif mask or slots is not None:
                held = {segment: slot for segment, slot in enumerate(slots or ()) if slot != _NO_SLOT}
                assert tuple(held) == bits(mask), f"expert {eid}: slots do not match its state"
                owned[size_class] += held.values()
        for pool, used in zip(self.pools, owned, strict=True):
            assert sorted([*used, *pool.free_slots()]) == list(range(pool.num_slots)), "a slot is lost or owned twice"
            assert pool.num_free == pool.num_slots - len(used), "free count is wrong"


class BlockPool:
    """The free slots of one size class. P neighbouring slots that start at a multiple of P are a block: a whole expert
    gets one where one is free, so that it is loaded and computed as one span. Other free slots are loose.
    """

    def __init__(self, num_slots: int, segments_per_expert: int) -> None:
        self.num_slots = self.num_free = num_slots
        self._size = size = segments_per_expert
        num_blocks = num_slots // size
        self._blocks = list(range(num_blocks - 1, -1, -1))  # wholly free, lowest on top
        self._free_in_block = [size] * num_blocks
        self._loose: dict[int, None] = dict.fromkeys(range(num_blocks * size, num_slots))

    def take_block(self) -> int | None:
        """First slot of a free block, or None."""
        if not self._blocks:
            return None
        block = self._blocks.pop()
        self._free_in_block[block] = 0
        self.num_free -= self._size
        return block * self._size

    def take(self, wanted: int | None) -> int:
        """One slot: `wanted` if it is loose, else any. The caller has checked `num_free`."""
        loose = self._loose
        if wanted is None or wanted not in loose:
            if not loose:
                block = self._blocks.pop()
                loose.update(dict.fromkeys(range(block * self._size, (block + 1) * self._size)))
            if wanted is None or wanted not in loose:
                wanted = next(iter(loose))
        del loose[wanted]
        self.num_free -= 1
        block = wanted // self._size
        if block < len(self._free_in_block):
            self._free_in_block[block] -= 1
        return wanted

    def give_block(self, slot: int) -> None:
        """Return a block taken with `take_block`."""
        block = slot // self._size
        self._blocks.append(block)
        self._free_in_block[block] = self._size
        self.num_free += self._size

    def give(self, slot: int) -> None:
        """Return one slot; a block that is wholly free is a block again."""
        self.num_free += 1
        block = slot // self._size
        if block >= len(self._free_in_block):
            self._loose[slot] = None
            return
        self._free_in_block[block] += 1
        if self._free_in_block[block] < self._size:
            self._loose[slot] = None
            return
        for other in range(block * self._size, (block + 1) * self._size):
            if other != slot:
                del self._loose[other]
        self._blocks.append(block)

    def free_slots(self) -> list[int]:
        in_blocks = [block * self._size + i for block in self._blocks for i in range(self._size)]
        return sorted([*in_blocks, *self._loose])


class RunPool:
    """The free slots of one size class where experts come and go in parts. Free slots form runs; a request takes the
    shortest run that is long enough, else the longest and the rest from others.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = self.num_free = num_slots
        self._length: dict[int, int] = {}  # first slot of a run -> its length
        self._first: dict[int, int] = {}  # last slot of a run -> its first
        self._of_length: dict[int, dict[int, None]] = {}  # length -> first slots of runs, the newest last
        if num_slots:
            self._add(0, num_slots)

    def take(self, num: int, wanted: int | None) -> list[int]:
        """So many slots, neighbours as far as can be: from `wanted` on where a run long enough begins there. The caller
        has checked `num_free`.
        """
        taken: list[int] = []
        while len(taken) < num:
            left = num - len(taken)
            first = wanted
            if first is None or self._length.get(first, 0) < left:
                fitting = [length for length in self._of_length if length >= left]
                length = min(fitting) if fitting else max(self._of_length)
                first = next(iter(self._of_length[length]))
            length = self._length[first]
            self._remove(first, length)
            if length > left:
                self._add(first + left, length - left)
                length = left
            taken += range(first, first + length)
        self.num_free -= num
        return taken

    def give(self, slot: int) -> None:
        """Return one slot; neighbours become one run."""
        self.num_free += 1
        first, length = slot, 1
        if slot - 1 in self._first:
            first = self._first[slot - 1]
            before = self._length[first]
            self._remove(first, before)
            length += before
        if slot + 1 in self._length:
            behind = self._length[slot + 1]
            self._remove(slot + 1, behind)
            length += behind
        self._add(first, length)

    def free_slots(self) -> list[int]:
        return sorted(first + i for first, length in self._length.items() for i in range(length))

    def _add(self, first: int, length: int) -> None:
        self._length[first] = length
        self._first[first + length - 1] = first
        self._of_length.setdefault(length, {})[first] = None

    def _remove(self, first: int, length: int) -> None:
        del self._length[first]
        del self._first[first + length - 1]
        same = self._of_length[length]
        del same[first]
        if not same:
            del self._of_length[length]


@lru_cache(1 << 12)
def bits(mask: int) -> tuple[int, ...]:
    """Positions of the ones, lowest first."""
    return tuple(position for position in range(mask.bit_length()) if mask >> position & 1)


@lru_cache(1 << 12)
def lowest_bits(mask: int, count: int) -> int:
    """The lowest `count` ones of `mask`: an expert's first segments."""
    return sum(1 << segment for segment in bits(mask)[: max(0, count)])


@lru_cache(1 << 12)
def highest_bits(mask: int, count: int) -> int:
    """The highest `count` ones of `mask`: an expert's last segments."""
    return mask & ~lowest_bits(mask, mask.bit_count() - count) if count < mask.bit_count() else mask
