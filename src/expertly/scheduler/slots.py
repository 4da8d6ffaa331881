"""The state of every unit of a device, its slot, and which slots are free."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from expertly.core.geometry import Geometry
from expertly.core.messages import Span

ABSENT, QUEUED, LOADING, PREFETCHING, RESIDENT = range(5)
"""Of a unit: it has no slot; the running layer needs it, and it waits for a slot; it is on its way, and the running
layer waits for it; it is on its way because it was predicted; it is there.
"""

_NO_SLOT = -1


class SlotTable:
    """A *unit* is one of the P parts of an expert: unit = expert * P + part, where experts are dense ids."""

    def __init__(self, geometry: Geometry, slots_per_class: list[int]) -> None:
        self.geometry = geometry
        self.num_parts = geometry.segments_per_expert
        self.pools = [Pool(num, self.num_parts) for num in slots_per_class]
        self.pool_of = [self.pools[size_class] for size_class in geometry.size_classes]  # each layer's
        self.state = [ABSENT] * (geometry.num_experts * self.num_parts)
        self.slot = [_NO_SLOT] * len(self.state)
        self.num_resident = [0] * geometry.num_experts  # of each expert, the units that are there
        self.whole: list[Span | None] = [None] * geometry.num_experts  # where it is wholly there in adjacent slots
        self.first_slot = array("q", [_NO_SLOT]) * geometry.num_experts  # that of `whole`: native code looks there
        self.prefetching: dict[int, int] = {}  # experts that are being prefetched -> how many units of each
        self.segment_nbytes = [geometry.segment_nbytes(layer) for layer in range(geometry.num_layers)]  # of a unit
        self.layer_of = [geometry.layer_of_expert(eid) for eid in range(geometry.num_experts)]
        self.first_of = [geometry.first_expert_id(layer) for layer in range(geometry.num_layers)]

    @property
    def resident_nbytes(self) -> int:
        """Of the units that are there. Any thread may ask."""
        every = zip(self.num_resident, self.layer_of, strict=True)
        return sum(num * self.segment_nbytes[layer] for num, layer in every)

    def units(self, eid: int) -> range:
        return range(eid * self.num_parts, (eid + 1) * self.num_parts)

    def in_state(self, eid: int, state: int) -> list[int]:
        """The units of an expert that are in this state."""
        return [unit for unit in self.units(eid) if self.state[unit] == state]

    def with_slots(self, eid: int) -> list[int]:
        """The units of an expert that are there or on their way."""
        return [unit for unit in self.units(eid) if self.slot[unit] != _NO_SLOT]

    def units_of(self, span: Span) -> range:
        first = (self.first_of[span.layer] + span.expert) * self.num_parts + span.segment
        return range(first, first + span.num_segments)

    def allocate(self, units: Sequence[int], state: int) -> list[Span]:
        """Give units of one expert slots, of which there are enough: next to those of its other units, if they are
        free. Returns the spans to load.
        """
        eid = units[0] // self.num_parts
        layer = self.layer_of[eid]
        pool = self.pool_of[layer]
        if state == PREFETCHING:
            self.prefetching[eid] = self.prefetching.get(eid, 0) + len(units)
        if len(units) == self.num_parts and pool.blocks:  # nearly always: a block
            first, stop, slots = units[0], units[0] + self.num_parts, pool.take(self.num_parts)
            assert self.slot[first:stop] == [_NO_SLOT] * self.num_parts, "a unit has one slot"
            self.slot[first:stop] = slots
            self.state[first:stop] = [state] * self.num_parts
            return [Span(layer, eid - self.first_of[layer], 0, self.num_parts, slots[0])]
        for run in _runs(units):
            before = self.slot[run.start - 1] if run.start % self.num_parts else _NO_SLOT
            slots = pool.take(len(run), None if before == _NO_SLOT else before + 1)
            for unit, slot in zip(run, slots, strict=True):
                assert self.slot[unit] == _NO_SLOT, "a unit has one slot"
                self.state[unit], self.slot[unit] = state, slot
        return self.spans(units)

    def arrived(self, span: Span) -> bool:
        """A span that was on its way is there. Returns whether the running layer waits for it."""
        eid, num = self.first_of[span.layer] + span.expert, span.num_segments
        first = eid * self.num_parts + span.segment
        state = self.state[first]
        assert state in (LOADING, PREFETCHING), "only what is on its way arrives"
        assert self.state[first : first + num].count(state) == num
        self.state[first : first + num] = [RESIDENT] * num
        if state == PREFETCHING:
            self._no_longer_prefetching(eid, num)
        self.num_resident[eid] += num
        if num == self.num_parts:
            self.whole[eid], self.first_slot[eid] = span, span.slot
        elif self.num_resident[eid] == self.num_parts:
            spans = self.spans(self.units(eid))
            if len(spans) == 1:
                self.whole[eid], self.first_slot[eid] = spans[0], spans[0].slot
        return state == LOADING

    def await_prefetched(self, eid: int) -> list[Span]:
        """The running layer needs the expert now, and waits for what is being prefetched of it. Returns its spans."""
        if eid not in self.prefetching:
            return []
        units = self.in_state(eid, PREFETCHING)
        for unit in units:
            self.state[unit] = LOADING
        del self.prefetching[eid]
        return self.spans(units)

    def release(self, units: Sequence[int]) -> None:
        """Free the slots of units of one expert: they are absent now."""
        eid, states = units[0] // self.num_parts, list(map(self.state.__getitem__, units))
        self.pool_of[self.layer_of[eid]].give(list(map(self.slot.__getitem__, units)))
        for unit in units:
            self.state[unit], self.slot[unit] = ABSENT, _NO_SLOT
        self.num_resident[eid] -= states.count(RESIDENT)
        self.whole[eid], self.first_slot[eid] = None, _NO_SLOT
        if PREFETCHING in states:
            self._no_longer_prefetching(eid, states.count(PREFETCHING))

    def spans(self, units: Sequence[int]) -> list[Span]:
        """Units of one expert, rising, as runs of adjacent units in adjacent slots."""
        eid, slot_of = units[0] // self.num_parts, self.slot
        layer = self.layer_of[eid]
        expert, first = eid - self.first_of[layer], eid * self.num_parts
        spans: list[Span] = []
        begin = units[0]
        for unit, following in zip(units, [*units[1:], -1], strict=True):
            if following != unit + 1 or slot_of[following] != slot_of[unit] + 1:
                spans.append(Span(layer, expert, begin - first, unit + 1 - begin, slot_of[begin]))
                begin = following
        return spans

    def _no_longer_prefetching(self, eid: int, num_units: int) -> None:
        self.prefetching[eid] -= num_units
        if not self.prefetching[eid]:
            del self.prefetching[eid]

    def check(self) -> None:
        """Assert that every slot is free or belongs to one unit, and that what is counted is so."""
        taken: list[list[int]] = [[] for _ in self.pools]
        for eid, layer in enumerate(self.layer_of):
            states = [self.state[unit] for unit in self.units(eid)]
            assert self.num_resident[eid] == states.count(RESIDENT)
            assert self.prefetching.get(eid, 0) == states.count(PREFETCHING)
            span = self.whole[eid]
            assert span in (None, *self.spans(self.units(eid))[:1])
            assert self.first_slot[eid] == (_NO_SLOT if span is None else span.slot)
            for unit in self.units(eid):
                assert (self.slot[unit] != _NO_SLOT) == (self.state[unit] >= LOADING), "what has a slot is not absent"
            taken[self.geometry.size_classes[layer]] += [self.slot[unit] for unit in self.with_slots(eid)]
        for pool, used in zip(self.pools, taken, strict=True):
            assert sorted([*used, *pool.free_slots()]) == list(range(pool.num_slots)), "a slot is lost or owned twice"
            assert pool.num_free == pool.num_slots - len(used), "free count is wrong"


class Pool:
    """The free slots of one size class. P slots that begin at a multiple of P are a block: a whole expert gets one
    where one is free, so that it is loaded and computed as one span; parts of experts get what is left of other blocks,
    so that holes do not spread.
    """

    def __init__(self, num_slots: int, num_parts: int) -> None:
        self.num_slots = self.num_free = num_slots
        self._size = num_parts
        num_blocks = num_slots // num_parts
        self.blocks = [block * num_parts for block in reversed(range(num_blocks))]  # first slots of free blocks
        self._loose = set(range(num_blocks * num_parts, num_slots))  # free slots of blocks that are not free

    def take(self, num: int, wanted: int | None = None) -> Sequence[int]:
        """So many slots, of which there are enough. A part of an expert gets those from `wanted` on if they are loose,
        else the shortest run of loose slots that is long enough, else a part of a block, else the longest runs there
        are.
        """
        self.num_free -= num
        if num == self._size and self.blocks:
            first = self.blocks.pop()
            return range(first, first + num)
        taken: list[int] = []
        run = range(0) if wanted is None else range(wanted, wanted + num)
        while len(taken) < num:
            if not (run and self._loose.issuperset(run)):
                run = self._best_run(num - len(taken))
            self._loose.difference_update(run)
            taken += run
        return taken

    def give(self, slots: Sequence[int]) -> None:
        """Return slots; a block that is wholly free is a block again."""
        self.num_free += len(slots)
        first = slots[0]
        if first % self._size == 0 and [*slots] == [*range(first, first + self._size)]:  # nearly always
            self.blocks.append(first)
            return
        self._loose.update(slots)
        for first in dict.fromkeys([slot - slot % self._size for slot in slots]):
            block = self._block(first)
            if self._loose.issuperset(block):
                self._loose.difference_update(block)
                self.blocks.append(first)

    def free_slots(self) -> list[int]:
        return sorted([*self._loose, *(slot for first in self.blocks for slot in self._block(first))])

    def _block(self, first: int) -> range:
        return range(first, first + self._size)

    def _best_run(self, num: int) -> range:
        """Up to so many loose slots beside each other, see `take`."""
        runs = _runs(sorted(self._loose))
        fitting = [run for run in runs if len(run) >= num]
        if not fitting and self.blocks:
            fitting = [self._block(self.blocks.pop())]
            self._loose.update(fitting[0])
        return min(fitting, key=len)[:num] if fitting else max(runs, key=len)


def _runs(numbers: Iterable[int]) -> list[range]:
    """Rising numbers, as runs of neighbours."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs
