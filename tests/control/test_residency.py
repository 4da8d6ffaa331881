"""Slots: one owner each, an expert's segments side by side where possible, frames whole again when given back."""

from __future__ import annotations

import random

import pytest

from expertly.control.residency import Residency, bits
from expertly.control.slots import SlotPool
from tests.control.drive import geometry


def test_bits_lists_the_ones_lowest_first() -> None:
    assert bits(0) == [] and bits(0b1011) == [0, 1, 3]


def test_frames_first_then_loose_slots() -> None:
    pool = SlotPool(10, 4)  # frames 0-3 and 4-7; 8 and 9 are left over
    assert pool.take_frame() == 0
    assert pool.take(None) == 8
    assert pool.take(None) == 9
    assert pool.take(None) == 4, "no loose slot left: a frame is broken"
    assert pool.take_frame() is None
    assert pool.take(6) == 6, "a wanted slot is given when it is loose"
    assert pool.num_free == 2 and pool.free_slots() == [5, 7]
    for slot in (4, 6):
        pool.give(slot)
    assert pool.take_frame() == 4, "the frame is whole again"


def test_a_whole_expert_is_one_piece() -> None:
    residency = Residency(geometry(1, 4, 2, segments=4), [16])
    (piece,) = residency.allocate(0, 2, 0b1111)
    assert piece.num_segments == 4 and piece.slot % 4 == 0
    assert residency.whole[2] is None, "loading is not resident"
    residency.arrived(piece)
    assert residency.whole[2] == piece
    residency.release(0, 2, 0b1000)
    assert residency.whole[2] is None
    assert residency.pieces(0, 2, 0b0111) == [piece._replace(num_segments=3)]
    (tail,) = residency.allocate(0, 2, 0b1000)
    residency.arrived(tail)
    assert residency.whole[2] == piece, "the segment came back to its own place"


def test_segments_that_had_to_scatter_are_several_pieces() -> None:
    residency = Residency(geometry(1, 4, 2, segments=4), [8])
    for expert, mask in ((0, 0b0001), (1, 0b0001), (3, 0b1111)):
        for piece in residency.allocate(0, expert, mask):
            residency.arrived(piece)
    residency.release(0, 3, 0b0101)
    pieces = residency.allocate(0, 2, 0b1111)
    assert sum(piece.num_segments for piece in pieces) == 4 and len(pieces) > 1
    for piece in pieces:
        residency.arrived(piece)
    assert residency.resident[2] == 0b1111 and residency.whole[2] is None
    assert residency.pieces(0, 2, 0b1111) == pieces
    residency.check()


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_any_history_keeps_every_slot_owned_once(segments: int) -> None:
    dice = random.Random(segments)
    residency = Residency(geometry(2, 6, 2, segments), [5 * segments + 1])
    pool = residency.pools[0]
    for _ in range(2000):
        layer, expert = dice.randrange(2), dice.randrange(6)
        eid = layer * 6 + expert
        held = residency.resident[eid] | residency.loading[eid]
        free = residency.full & ~held
        if dice.random() < 0.5 and free and pool.num_free >= free.bit_count():
            mask = free if dice.random() < 0.5 else sum(1 << b for b in bits(free) if dice.random() < 0.5)
            for piece in residency.allocate(layer, expert, mask) if mask else []:
                if dice.random() < 0.7:
                    residency.arrived(piece)
        elif held:
            residency.release(layer, expert, held if dice.random() < 0.6 else 1 << bits(held)[0])
        residency.check()


def test_a_slot_is_never_given_twice() -> None:
    residency = Residency(geometry(1, 4, 2), [2])
    residency.allocate(0, 1, 1)
    with pytest.raises(AssertionError, match="one slot"):
        residency.allocate(0, 1, 1)
    with pytest.raises(AssertionError, match="gives it back"):
        residency.release(0, 3, 1)
