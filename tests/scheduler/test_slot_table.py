"""Slots: one owner each, an expert's segments side by side where possible, frames whole again when given back."""

from __future__ import annotations

import random

import pytest

from expertly.scheduler.slots import SlotPool, SlotTable, bits
from tests.scheduler.drive import geometry


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


def test_a_whole_expert_is_one_span() -> None:
    residency = SlotTable(geometry(1, 4, 2, segments=4), [16])
    (span,) = residency.allocate(0, 2, 0b1111)
    assert span.num_segments == 4 and span.slot % 4 == 0
    assert residency.whole[2] is None, "loading is not resident"
    residency.arrived(span)
    assert residency.whole[2] == span
    residency.release(0, 2, 0b1000)
    assert residency.whole[2] is None
    assert residency.spans(0, 2, 0b0111) == [span._replace(num_segments=3)]
    (tail,) = residency.allocate(0, 2, 0b1000)
    residency.arrived(tail)
    assert residency.whole[2] == span, "the segment came back to its own place"


def test_segments_that_had_to_scatter_are_several_spans() -> None:
    residency = SlotTable(geometry(1, 4, 2, segments=4), [8])
    for expert, mask in ((0, 0b0001), (1, 0b0001), (3, 0b1111)):
        for span in residency.allocate(0, expert, mask):
            residency.arrived(span)
    residency.release(0, 3, 0b0101)
    spans = residency.allocate(0, 2, 0b1111)
    assert sum(span.num_segments for span in spans) == 4 and len(spans) > 1
    for span in spans:
        residency.arrived(span)
    assert residency.resident[2] == 0b1111 and residency.whole[2] is None
    assert residency.spans(0, 2, 0b1111) == spans
    residency.check()


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_any_history_keeps_every_slot_owned_once(segments: int) -> None:
    dice = random.Random(segments)
    residency = SlotTable(geometry(2, 6, 2, segments), [5 * segments + 1])
    pool = residency.pools[0]
    for _ in range(2000):
        layer, expert = dice.randrange(2), dice.randrange(6)
        eid = layer * 6 + expert
        held = residency.resident[eid] | residency.loading[eid]
        free = residency.full & ~held
        if dice.random() < 0.5 and free and pool.num_free >= free.bit_count():
            mask = free if dice.random() < 0.5 else sum(1 << b for b in bits(free) if dice.random() < 0.5)
            for span in residency.allocate(layer, expert, mask) if mask else []:
                if dice.random() < 0.7:
                    residency.arrived(span)
        elif held:
            residency.release(layer, expert, held if dice.random() < 0.6 else 1 << bits(held)[0])
        residency.check()


def test_a_slot_is_never_given_twice() -> None:
    residency = SlotTable(geometry(1, 4, 2), [2])
    residency.allocate(0, 1, 1)
    with pytest.raises(AssertionError, match="one slot"):
        residency.allocate(0, 1, 1)
    with pytest.raises(AssertionError, match="gives it back"):
        residency.release(0, 3, 1)
