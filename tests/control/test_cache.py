"""The kept cache owns the accounting: eviction is atomic, segments go last first."""

from __future__ import annotations

from expertly.control.cache import KeptCache
from expertly.policies.eviction.lru import LRU


def filled(capacity: int, experts: dict[int, int]) -> KeptCache:
    cache = KeptCache(capacity, LRU())
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
