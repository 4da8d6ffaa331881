"""The pool of slots beside a plain set of free slots."""

from __future__ import annotations

import random

import pytest

from expertly.scheduler.slots import SlotPool


def test_an_empty_pool_has_nothing() -> None:
    pool = SlotPool(0, 4)
    assert pool.num_free == 0 and pool.take_frame() is None and pool.free_slots() == []


def test_fewer_slots_than_a_frame_are_all_loose() -> None:
    pool = SlotPool(3, 4)
    assert pool.take_frame() is None
    assert [pool.take(None) for _ in range(3)] == [0, 1, 2]
    for slot in (2, 0, 1):
        pool.give(slot)
    assert pool.take_frame() is None and pool.free_slots() == [0, 1, 2]


def test_a_frame_given_back_slot_by_slot_is_a_frame_again() -> None:
    pool = SlotPool(4, 4)
    assert pool.take_frame() == 0
    for slot in (3, 1, 0):
        pool.give(slot)
        assert pool.take_frame() is None
    pool.give(2)
    assert pool.take_frame() == 0


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_slots", [1, 7, 12, 13])
def test_every_slot_has_one_owner(num_slots: int, size: int) -> None:
    dice = random.Random(num_slots * size)
    pool = SlotPool(num_slots, size)
    free, frames, single = set(range(num_slots)), [], []

    def is_free(frame: int) -> bool:
        return set(range(frame * size, (frame + 1) * size)) <= free

    for _ in range(2000):
        action = dice.choice(["frame", "one", "one", "give", "give frame"])
        if action == "frame":
            start = pool.take_frame()
            whole = [frame for frame in range(num_slots // size) if is_free(frame)]
            assert (start is None) == (not whole)
            if start is not None:
                assert start % size == 0 and is_free(start // size)
                free -= set(range(start, start + size))
                frames.append(start)
        elif action == "one" and free:
            wanted = dice.choice([None, dice.randrange(num_slots)])
            slot = pool.take(wanted)
            assert slot in free
            free.remove(slot)
            single.append(slot)
        elif action == "give" and single:
            slot = single.pop(dice.randrange(len(single)))
            pool.give(slot)
            free.add(slot)
        elif action == "give frame" and frames:
            start = frames.pop(dice.randrange(len(frames)))
            free |= set(range(start, start + size))
            if dice.random() < 0.5:
                pool.give_frame(start)
            else:
                for slot in range(start, start + size):
                    pool.give(slot)
        assert pool.free_slots() == sorted(free)
        assert pool.num_free == len(free)
    for start in frames:
        pool.give_frame(start)
    for slot in single:
        pool.give(slot)
    starts = [pool.take_frame() for _ in range(num_slots // size)]
    assert sorted(starts) == [frame * size for frame in range(num_slots // size)], "all frames are whole again"
