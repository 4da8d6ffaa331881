"""Which slots are taken, so that an expert's segments lie side by side where possible."""

from __future__ import annotations

import pytest

from expertly.scheduler.slots import BlockPool, RunPool, SlotTable
from tests.scheduler.drive import geometry


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
    table.allocate(2, 0b1000, table.awaited)
    table.arrived(2, 0b1000, table.awaited)
    assert table.whole[2] == span, "the segment came back to its own place"
