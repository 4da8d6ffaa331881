"""Which slots are taken, so that an expert's units lie side by side where possible."""

from __future__ import annotations

import pytest

from expertly.scheduler.cache import LOADING, PREFETCHING
from expertly.scheduler.pool import Pool
from tests.scheduler.drive import geometry, scheduler


@pytest.mark.parametrize(
    ("free", "num", "wanted", "taken"),
    [
        ([4, 5, 6, 7, 8], 4, None, [4, 5, 6, 7]),  # a block of four begins at a multiple of four
        ([2, 3, 4, 5, 6, 7], 4, None, [4, 5, 6, 7]),
        ([2, 3, 4, 5, 6, 7], 2, None, [2, 3]),  # what is left of another block first
        ([4, 5, 6, 7, 9, 10, 13], 1, None, [13]),  # as few as are enough
        ([4, 5, 6, 7, 13], 2, None, [4, 5]),  # no block is spared where neighbours are needed
        ([1, 5, 6, 7, 8, 12, 13], 2, 5, [5, 6]),  # where it is wanted, if it fits there
        ([1, 5, 6, 13, 14], 2, 6, [5, 6]),  # one slot is not enough
        ([1, 5, 6, 7, 13, 14], 4, None, [5, 6, 7, 1]),  # of several runs the longest, then what is enough
        ([6, 4, 1, 5, 3, 2, 7], 4, None, [4, 5, 6, 7]),  # slots given back one by one are a block again
        ([4, 9, 2, 7], 1, None, [2]),  # ends of a block, and what lies between them elsewhere, are none
    ],
)
def test_which_slots_are_taken(free: list[int], num: int, wanted: int | None, taken: list[int]) -> None:
    pool = Pool(16, 0, 4)
    assert sorted(pool.take(16)) == list(range(16)) and pool.num_free == 0
    for slot in free:
        pool.give([slot])
    assert list(pool.take(num, wanted)) == taken
    assert pool.num_free == len(free) - num and pool.free_slots() == sorted({*free} - {*taken})


def test_a_whole_expert_is_one_span() -> None:
    cache = scheduler(geometry(1, 4, 2, segments=4), 1.0, "resident").cache
    units = cache.units(2)
    (span,) = cache.allocate(units, PREFETCHING)
    assert span.num_segments == 4
    assert cache.whole[2] is None and [*cache.prefetching] == [*units], "what is on its way is not there"
    assert cache.await_prefetched(2) == [span] and not cache.prefetching
    assert cache.arrived(span) and cache.whole[2] == span
    cache.release(units[3:])
    assert cache.whole[2] is None and cache.num_resident(2) == 3
    assert cache.spans(units[:3]) == [span._replace(num_segments=3)]
    (last,) = cache.allocate(units[3:], LOADING)
    assert cache.arrived(last) and cache.whole[2] == span, "the unit came back to its own place"
    cache.check()
