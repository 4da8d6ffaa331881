"""The tier behind a device: what it keeps, what goes from it, and what must not."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from expertly.core.errors import BudgetError
from expertly.core.messages import Span
from expertly.scheduler.cache import RESIDENT
from expertly.scheduler.systems import get_system
from expertly.scheduler.tier import Tier
from tests.scheduler.drive import geometry


def span(expert: int, layer: int = 0, segment: int = 0, num_segments: int = 1) -> Span:
    return Span(layer, expert, segment, num_segments, 0)


def bring(tier: Tier, wanted: Span, busy: tuple[int, ...] = ()) -> int | None:
    """Have a device's span in the tier; how many units of it were read. None: there was no room."""
    decided = tier.request(wanted, lambda: busy)
    if decided is None:
        return None
    there, reads = decided
    for read in reads:
        tier.arrived(read)
    assert sum(each.num_segments for each in [*there, *reads]) == wanted.num_segments
    tier.check()
    return sum(read.num_segments for read in reads)


def held(tier: Tier) -> list[int]:
    return [eid for eid, num in enumerate(tier.cache.residency()) if num]


def test_the_least_recently_asked_for_goes_whatever_its_layer() -> None:
    tier = Tier(geometry(layers=2, experts=8, top_k=2), geometry(2).nbytes * 3 // 16)
    assert [bring(tier, span(*at)) for at in ((0, 0), (1, 1), (2, 0), (0, 0))] == [1, 1, 1, 0]
    assert bring(tier, span(3)) == 1
    assert held(tier) == [0, 2, 3], "expert 1 of layer 1 went: 0 was asked for again"


def test_the_policy_is_the_systems() -> None:
    """0 was asked for twice, then 1 and 2 once: the least frequent goes, not the least recent."""
    shape = geometry(layers=1, experts=8, top_k=2)
    left = {}
    for system in ("lru", "lru:host=lfu"):
        tier = get_system(system).tier(shape, shape.nbytes * 3 // 8)
        for expert in (0, 0, 1, 2, 3):
            bring(tier, span(expert))
        left[system] = held(tier)
    assert left == {"lru": [1, 2, 3], "lru:host=lfu": [0, 2, 3]}


def test_what_is_busy_stays_and_nothing_goes_where_too_little_would() -> None:
    shape = geometry(layers=1, experts=8, top_k=2, segments=2)
    tier = Tier(shape, shape.nbytes * 3 // 8)
    for expert in range(3):
        bring(tier, span(expert, num_segments=2))
    assert bring(tier, span(3, num_segments=2), busy=(0, 1, 2)) is None and held(tier) == [0, 1, 2]
    assert bring(tier, span(3, num_segments=2), busy=(0, 2)) == 2 and held(tier) == [0, 2, 3]


def test_a_part_of_an_expert_is_there_and_the_rest_is_read() -> None:
    """Whichever part: the device asks for what it lacks. An expert loses no part for another of its parts."""
    shape = geometry(layers=1, experts=8, top_k=2, segments=4)
    tier = Tier(shape, shape.nbytes * 2 // 8)
    assert bring(tier, span(0, segment=3)) == 1
    assert tier.find(span(0, segment=3)) and not tier.find(span(0, num_segments=4))
    assert bring(tier, span(1, num_segments=4)) == 4
    assert bring(tier, span(0, num_segments=4)) == 3 and tier.find(span(0, num_segments=4))
    assert bring(tier, span(2, segment=1)) == 1 and tier.find(span(0, num_segments=4)), "of 1, which was there before"


def test_a_read_that_is_cancelled_leaves_its_room() -> None:
    shape = geometry(layers=1, experts=8, top_k=2)
    tier = Tier(shape, shape.nbytes * 2 // 8)
    bring(tier, span(0))
    decided = tier.request(span(1), lambda: ())
    assert decided is not None and not tier.find(span(1)), "it is on its way"
    tier.cancelled(decided[1][0])
    tier.check()
    assert bring(tier, span(2)) == 1 and held(tier) == [0, 2]


def test_too_little_for_a_token_is_refused_by_the_options_name() -> None:
    shape = geometry(layers=1, experts=8, top_k=2)
    with pytest.raises(BudgetError, match=r"^host_memory=.* the least that works is"):
        Tier(shape, shape.nbytes // 8)


@pytest.mark.parametrize(("seed", "segments"), [(0, 1), (1, 4), (2, 2)])
def test_it_does_as_a_list_in_order_of_use(seed: int, segments: int) -> None:
    """Beside a naive cache of parts; some reads end late, or never, and experts are busy by the way."""
    dice, shape = random.Random(seed), geometry(layers=3, experts=6, top_k=2, segments=segments)
    tier = Tier(shape, shape.nbytes * 2 // 5)
    size, order = tier.slots[0], OrderedDict[int, set[int]]()  # expert -> its units that are here or on their way
    coming: list[Span] = []
    refused = 0
    for _ in range(600):
        if coming and dice.random() < 0.6:
            read = coming.pop(dice.randrange(len(coming)))
            if dice.random() < 0.8:
                tier.arrived(read)
            else:
                tier.cancelled(read)
                eid = shape.expert_id(read.layer, read.expert)
                order[eid].difference_update(tier.cache.units_of(read))
                if not order[eid]:
                    del order[eid]
            continue
        first = dice.randrange(segments)
        wanted = span(dice.randrange(6), dice.randrange(3), first, dice.randint(1, segments - first))
        eid, units = shape.expert_id(wanted.layer, wanted.expert), set(tier.cache.units_of(wanted))
        reading = {shape.expert_id(read.layer, read.expert) for read in coming}
        if units & {unit for read in coming for unit in tier.cache.units_of(read)}:
            continue  # a device asks once
        busy = reading | set(dice.sample(range(18), dice.choice([3, 14])))
        lacking = len(units - order.get(eid, set())) - (size - sum(map(len, order.values())))
        victims = []
        for other in order:
            if lacking > 0 and other not in busy | {eid}:
                victims.append((other, sorted(order[other])[-lacking:]))
                lacking -= len(victims[-1][1])
        decided = tier.request(wanted, lambda busy=busy: busy)
        assert (decided is None) == (lacking > 0)
        if decided is None:
            refused += 1
            continue
        for other, lost in victims:
            order[other].difference_update(lost)
            if not order[other]:
                del order[other]
        order.setdefault(eid, set()).update(units)
        order.move_to_end(eid)
        coming += decided[1]
        tier.check()
        there = {unit for unit, state in enumerate(tier.cache.state) if state == RESIDENT}
        on_way = {unit for read in coming for unit in tier.cache.units_of(read)}
        assert there | on_way == {unit for held_units in order.values() for unit in held_units}
    assert refused > 5
