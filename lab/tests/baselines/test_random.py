"""Evicting at random."""

from __future__ import annotations

from expertly.policies.known import Known
from expertly.policies.registry import EVICTIONS
from tests.policies.test_eviction import SHAPE, admit


def test_random_is_seeded_and_spreads() -> None:
    def first(seed: int) -> list[int]:
        policy = EVICTIONS["random"].make(SHAPE, 10, Known(seed=seed))
        admit(policy, list(range(10)))
        return [next(iter(policy.victims(set()))) for _ in range(200)]

    assert first(1) == first(1) != first(2)
    assert set(first(1)) == set(range(10))
