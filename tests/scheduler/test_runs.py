"""The pool that gives neighbours, beside a plain set of free slots."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from expertly.scheduler.slots import RunPool


def num_runs(slots: list[int]) -> int:
    return 1 + sum(slot != before + 1 for before, slot in pairwise(slots))


def test_an_empty_pool_has_nothing() -> None:
    pool = RunPool(0)
    assert pool.num_free == 0 and pool.free_slots() == []


def test_the_shortest_run_that_is_long_enough_is_taken() -> None:
    pool = RunPool(16)
    for _ in range(4):
        pool.take(4, None)
    for slot in (2, 3, 8, 9, 10):
        pool.give(slot)
    assert pool.take(2, None) == [2, 3], "not a part of 8-10"
    assert pool.take(2, None) == [8, 9]
    assert pool.free_slots() == [10]


def test_a_run_begins_where_it_is_wanted_if_it_fits_there() -> None:
    pool = RunPool(16)
    pool.take(16, None)
    for slot in (1, 4, 5, 6, 12, 13):
        pool.give(slot)
    assert pool.take(2, 4) == [4, 5]
    assert pool.take(2, 6) == [12, 13], "one slot is not enough"


def test_what_no_run_holds_comes_from_the_longest_ones() -> None:
    pool = RunPool(16)
    pool.take(16, None)
    for slot in (1, 4, 5, 6, 12, 13):
        pool.give(slot)
    assert pool.take(5, None) == [4, 5, 6, 12, 13]
    assert pool.num_free == 1


def test_neighbours_given_back_are_one_run_again() -> None:
    pool = RunPool(8)
    for slot in pool.take(8, None)[::2]:
        pool.give(slot)
    for slot in (1, 3, 5, 7):
        pool.give(slot)
    assert pool.take(8, None) == list(range(8))


@pytest.mark.parametrize("num_slots", [1, 7, 30])
def test_every_slot_has_one_owner_and_no_two_runs_touch(num_slots: int) -> None:
    dice, pool = random.Random(num_slots), RunPool(num_slots)
    free, taken = set(range(num_slots)), []
    for _ in range(3000):
        num = dice.randint(1, 5)
        if num <= pool.num_free and dice.random() < 0.5:
            slots = pool.take(num, dice.choice([None, dice.randrange(num_slots)]))
            assert len(slots) == num and free.issuperset(slots)
            longest = max(len(run) for run in runs_of(free))
            assert num_runs(slots) == 1 or longest < num, "in one span where that can be"
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
