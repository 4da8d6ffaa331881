"""Slots: one owner each, an expert's segments side by side where possible."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from expertly.scheduler.slots import BlockPool, RunPool, SlotTable, bits
from tests.scheduler.drive import geometry

# -- blocks --------------------------------------------------------------------------------------------------------


def test_blocks_first_then_loose_slots() -> None:
    pool = BlockPool(10, 4)  # blocks 0-3 and 4-7; 8 and 9 are left over
    assert [pool.take_block(), pool.take(None), pool.take(None)] == [0, 8, 9]
    assert pool.take(None) == 4, "no loose slot left: a block is broken"
    assert pool.take_block() is None
    assert pool.take(6) == 6, "a wanted slot is given when it is loose"
    assert pool.num_free == 2 and pool.free_slots() == [5, 7]
    for slot in (4, 6):
        pool.give(slot)
    assert pool.take_block() == 4, "the block is whole again"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_slots", [1, 7, 12, 13])
def test_every_slot_of_a_block_pool_has_one_owner(num_slots: int, size: int) -> None:
    dice = random.Random(num_slots * size)
    pool = BlockPool(num_slots, size)
    free, blocks, single = set(range(num_slots)), [], []

    def is_free(block: int) -> bool:
        return set(range(block * size, (block + 1) * size)) <= free

    for _ in range(2000):
        action = dice.choice(["block", "one", "one", "give", "give block"])
        if action == "block":
            start = pool.take_block()
            whole = [block for block in range(num_slots // size) if is_free(block)]
            assert (start is None) == (not whole)
            if start is not None:
                assert start % size == 0 and is_free(start // size)
                free -= set(range(start, start + size))
                blocks.append(start)
        elif action == "one" and free:
            slot = pool.take(dice.choice([None, dice.randrange(num_slots)]))
            free.remove(slot)
            single.append(slot)
        elif action == "give" and single:
            slot = single.pop(dice.randrange(len(single)))
            pool.give(slot)
            free.add(slot)
        elif action == "give block" and blocks:
            start = blocks.pop(dice.randrange(len(blocks)))
            free |= set(range(start, start + size))
            if dice.random() < 0.5:
                pool.give_block(start)
            else:
                for slot in range(start, start + size):
                    pool.give(slot)
        assert pool.free_slots() == sorted(free) and pool.num_free == len(free)
    for start in blocks:
        pool.give_block(start)
    for slot in single:
        pool.give(slot)
    starts = [pool.take_block() for _ in range(num_slots // size)]
    assert sorted(starts) == [block * size for block in range(num_slots // size)], "all blocks are whole again"


# -- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "num", "wanted", "taken"),
    [
        ([2, 3, 8, 9, 10], 2, None, [2, 3]),  # the shortest run that is long enough, not a part of 8-10
        ([8, 9, 10], 2, None, [8, 9]),
        ([1, 4, 5, 6, 12, 13], 2, 4, [4, 5]),  # where it is wanted, if it fits there
        ([1, 4, 5, 6, 12, 13], 2, 6, [12, 13]),  # one slot is not enough
        ([1, 4, 5, 6, 12, 13], 5, None, [4, 5, 6, 12, 13]),  # of several runs the longest
        ([6, 4, 1, 5, 3, 2], 6, None, [1, 2, 3, 4, 5, 6]),  # neighbours given back are one run
    ],
)
def test_which_run_is_taken(free: list[int], num: int, wanted: int | None, taken: list[int]) -> None:
    pool = RunPool(16)
    pool.take(16, None)
    for slot in free:
        pool.give(slot)
    assert pool.take(num, wanted) == taken
    assert pool.num_free == len(free) - num and pool.free_slots() == sorted({*free} - {*taken})


@pytest.mark.parametrize("num_slots", [0, 1, 7, 30])
def test_every_slot_of_a_run_pool_has_one_owner_and_no_two_runs_touch(num_slots: int) -> None:
    dice, pool = random.Random(num_slots), RunPool(num_slots)
    free, taken = set(range(num_slots)), []
    for _ in range(3000 if num_slots else 0):
        num = dice.randint(1, 5)
        if num <= pool.num_free and dice.random() < 0.5:
            slots = pool.take(num, dice.choice([None, dice.randrange(num_slots)]))
            assert len(slots) == num and free.issuperset(slots)
            is_one_run = all(slot == before + 1 for before, slot in pairwise(slots))
            assert is_one_run or max(len(run) for run in runs_of(free)) < num, "in one run where that can be"
            free -= set(slots)
            taken += slots
        elif taken:
            slot = taken.pop(dice.randrange(len(taken)))
            pool.give(slot)
            free.add(slot)
        assert pool.num_free == len(free) and pool.free_slots() == sorted(free)


def runs_of(free: set[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for slot in sorted(free):
        if runs and runs[-1][-1] == slot - 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


# -- the table -----------------------------------------------------------------------------------------------------


def bring(table: SlotTable, eid: int, mask: int) -> None:
    table.allocate(eid, mask, table.awaited)
    table.arrived(eid, mask, table.awaited)


def test_a_whole_expert_is_one_span() -> None:
    table = SlotTable(geometry(1, 4, 2, segments=4), [16])
    (span,) = table.allocate(2, 0b1111, table.prefetching)
    assert span.num_segments == 4 and span.slot % 4 == 0
    assert table.whole[2] is None and table.absent(2) == 0, "in flight is not resident"
    assert table.await_in_flight(2) == [span] and table.awaited == {2: 0b1111} and not table.prefetching
    table.arrived(2, 0b1111, table.awaited)
    assert table.whole[2] == span
    table.release(2, 0b1000)
    assert table.whole[2] is None and table.absent(2) == 0b1000
    assert table.spans(2, 0b0111) == [span._replace(num_segments=3)]
    bring(table, 2, 0b1000)
    assert table.whole[2] == span, "the segment came back to its own place"


def test_segments_that_had_to_scatter_are_several_spans() -> None:
    table = SlotTable(geometry(1, 4, 2, segments=4), [8])
    for expert, mask in ((0, 0b0001), (1, 0b0001), (3, 0b1111)):
        bring(table, expert, mask)
    table.release(3, 0b0101)
    spans = table.allocate(2, 0b1111, table.awaited)
    assert sum(span.num_segments for span in spans) == 4 and len(spans) > 1
    table.arrived(2, 0b1111, table.awaited)
    assert table.resident[2] == 0b1111 and table.whole[2] is None
    assert table.spans(2, 0b1111) == spans
    table.check()


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("segments", [1, 2, 4])
def test_any_history_keeps_every_slot_owned_once_and_every_segment_in_one_state(segments: int, in_parts: bool) -> None:
    dice = random.Random(segments)
    table = SlotTable(geometry(2, 6, 2, segments), [5 * segments + 1], in_parts=in_parts)
    purposes = [table.awaited, table.requested, table.prefetching]
    for _ in range(2000):
        eid = dice.randrange(12)
        held, free = table.resident[eid] | table.in_flight[eid], table.absent(eid)
        if dice.random() < 0.5 and free and table.num_free(eid // 6) >= free.bit_count():
            mask = free if dice.random() < 0.5 else sum(1 << b for b in bits(free) if dice.random() < 0.5)
            if mask:
                purpose = dice.choice(purposes)
                spans = table.allocate(eid, mask, purpose)
                assert sum(span.num_segments for span in spans) == mask.bit_count()
                if dice.random() < 0.7:
                    table.arrived(eid, mask, purpose)
        elif dice.random() < 0.2:
            assert sum(span.num_segments for span in table.await_in_flight(eid)) <= table.in_flight[eid].bit_count()
            assert eid not in table.requested and eid not in table.prefetching
        elif held:
            table.release(eid, held if dice.random() < 0.6 else 1 << bits(held)[0])
        table.check()
