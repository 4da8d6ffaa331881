"""The kept cache owns the accounting: eviction is atomic, segments go last first."""

from __future__ import annotations

import random

import pytest

from expertly.policies.eviction import EVICTIONS
from expertly.policies.eviction.simple import LRU
from expertly.scheduler.cache import Partition
from expertly.scheduler.slots import bits
from expertly.testing.made_up import KNOWN
from tests.scheduler.drive import geometry

SHAPE = geometry(layers=4, experts=64)


def filled(capacity: int, experts: dict[int, int]) -> Partition:
    cache = Partition(capacity, LRU())
    for expert, mask in experts.items():
        cache.keep(expert, mask)
        cache.policy.used([expert], [1], 1)
    return cache


def test_a_victim_loses_its_last_segments_first() -> None:
    cache = filled(8, {1: 0b1111, 2: 0b1111})
    assert cache.evict(2, set()) == [(1, 0b1100)]
    assert cache.kept == {1: 0b0011, 2: 0b1111} and cache.room == 2


def test_as_many_victims_as_it_takes() -> None:
    cache = filled(8, {1: 0b0011, 2: 0b0001, 3: 0b1111})
    assert cache.evict(5, set()) == [(1, 0b0011), (2, 0b0001), (3, 0b1100)]
    assert cache.kept == {3: 0b0011}


def test_what_cannot_be_freed_changes_nothing() -> None:
    cache = filled(8, {1: 0b1111, 2: 0b1111})
    assert cache.evict(5, {2}) is None
    assert cache.evict(9, set()) is None
    assert cache.kept == {1: 0b1111, 2: 0b1111} and cache.used == 8
    assert cache.evict(4, {2}) == [(1, 0b1111)]


def test_the_budget_is_never_exceeded() -> None:
    cache = filled(4, {1: 0b111})
    with pytest.raises(AssertionError, match="never exceeds"):
        cache.keep(2, 0b11)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_counts_follow_any_history(eviction: str) -> None:
    """The cache beside a set of (expert, segment): victims come in the policy's order, all of them or none."""
    dice = random.Random(4)
    cache = Partition(13, EVICTIONS[eviction].make(SHAPE, 3, KNOWN))
    truth: set[tuple[int, int]] = set()
    for _ in range(1500):
        expert, protected = dice.randrange(9), set(dice.sample(range(9), 2))
        absent = [s for s in range(4) if (expert, s) not in truth]
        if absent and dice.random() < 0.6 and cache.room >= len(absent):
            cache.keep(expert, sum(1 << s for s in absent))
            truth |= {(expert, s) for s in absent}
        elif dice.random() < 0.2 and expert in cache.kept:
            mask = cache.kept[expert] & dice.randint(1, 15)
            cache.drop(expert, mask)
            truth -= {(expert, s) for s in bits(mask)}
        else:
            num = dice.randint(1, 7)
            victims = cache.evict(num, protected)
            gone = [(e, s) for e, mask in victims or () for s in bits(mask)]
            assert set(gone) <= truth and len(gone) == (num if victims else 0)
            assert not protected & {e for e, _ in gone}
            truth -= set(gone)
            for e, mask in victims or ():
                assert all((e, s) not in truth for s in range(bits(mask)[0], 4)), "the last segments go first"
        cache.policy.used([expert], [dice.randint(0, 2)], 2)
        assert truth == {(e, s) for e, mask in cache.kept.items() for s in bits(mask)}
        assert cache.used == len(truth) == 13 - cache.room
        assert sorted(cache.policy.victims(())) == sorted(cache.kept) or eviction == "static"
