"""What every eviction policy promises, and what each of them means."""

from __future__ import annotations

import random

import pytest

from expertly.policies.eviction import EvictionPolicy, ScoredPolicy
from expertly.policies.fmoe import FMoEEviction
from expertly.policies.known import Known
from expertly.policies.registry import EVICTIONS
from expertly.policies.static import Static, StaticOptions
from expertly.testing import EVICTION_CHECKS
from expertly.testing.made_up import KNOWN
from tests.scheduler.drive import geometry
from tests.tables import seeds

SHAPE = geometry(layers=16, experts=64)


@pytest.fixture(params=EVICTIONS)
def make(request: pytest.FixtureRequest):
    return lambda capacity: EVICTIONS[request.param].make(SHAPE, capacity, KNOWN)


def admit(policy: EvictionPolicy, experts: list[int]) -> None:
    for expert in experts:
        policy.admitted(expert)
        policy.used([expert], [1], 1)


@pytest.mark.parametrize("check", EVICTION_CHECKS, ids=lambda check: check.__name__)
def test_conformance(make, check) -> None:
    """A new policy inherits these by being in EVICTIONS."""
    check(make)


class Stated(ScoredPolicy):
    """A score is what somebody says."""

    def __init__(self) -> None:
        super().__init__()
        self.stated: dict[int, float] = {}

    def used(self, experts, num_tokens, batch_tokens) -> None:
        """Nothing is learned."""

    def score(self, expert: int) -> float:
        return self.stated.get(expert, 0.0)


@pytest.mark.parametrize("seed", seeds(3, 6))
def test_scored_victims_are_those_of_sorting_whatever_happened_before(seed: int) -> None:
    """Scores that rise, fall and come back; experts that go and return; questions read to any depth."""
    dice, policy, kept = random.Random(seed), Stated(), set[int]()
    num, values = dice.choice([6, 90, 300]), dice.choice([3, 1000])
    for expert in dice.sample(range(num), num * 2 // 3):
        kept.add(expert)
        policy.admitted(expert)
    for _ in range(1500):
        action, expert = dice.random(), dice.randrange(num)
        if action < 0.3 and expert not in kept:
            kept.add(expert)
            policy.admitted(expert)
        elif action < 0.4 and expert in kept:
            kept.remove(expert)
            policy.removed(expert)
        elif action < 0.75:
            policy.stated[expert] = dice.randrange(values) / 2
            policy.rescore([expert])
        else:
            protected = set(dice.sample(range(num), dice.randint(0, num // 2)))
            expected = sorted((policy.score(e), e) for e in kept if e not in protected)
            depth = dice.choice([0, 1, 2, 3, 5, 9, len(expected) + 1 if dice.random() < 0.1 else 4])
            asked = policy.scored_victims(protected)
            for wanted, got in zip(expected[:depth], asked, strict=False):
                assert got == wanted
                if dice.random() < 0.5:  # the cache drops it at once
                    kept.remove(got[1])
                    policy.removed(got[1])
            if depth > len(expected):
                assert next(asked, None) is None


def test_fmoe_is_the_papers_formula() -> None:
    """1 / (p * freq) over a random history (section 4.5): p of the newest map of the layer, freq the visits."""
    dice, policy = random.Random(1), FMoEEviction(geometry(layers=4, experts=8))
    layers, num = 4, 8
    probability: dict[int, float] = {}
    frequency = dict.fromkeys(range(layers * num), 1)
    kept: set[int] = set()
    for step in range(2000):
        layer = step % layers
        if dice.random() < 0.6:
            said = [dice.choice([0.0, 1e-9, dice.random()]) for _ in range(num)]
            policy.predicted(layer * num, said)
            probability.update({layer * num + i: p for i, p in enumerate(said)})
        experts = [layer * num + e for e in dice.sample(range(num), 3)]
        tokens = [dice.choice([0, 1, 5]) for _ in experts]
        policy.used(experts, tokens, 5)
        for expert, count in zip(experts, tokens, strict=True):
            frequency[expert] += count > 0
        for expert in experts:
            if expert not in kept:
                kept.add(expert)
                policy.admitted(expert)
        if len(kept) > 12:
            worth = {e: max(probability.get(e, 1e-6), 1e-6) * frequency[e] for e in kept}
            expected = sorted(kept, key=lambda e: (-1 / worth[e], e))
            got = list(policy.victims(set(experts)))
            assert [worth[e] for e in got] == sorted(worth[e] for e in got)
            assert got == [e for e in expected if e not in experts]
            for expert in got[:3]:
                kept.remove(expert)
                policy.removed(expert)


def test_static_learns_popularity_from_the_first_tokens_then_stays() -> None:
    policy = Static(3, options=StaticOptions(spare=1, profile_tokens=10))
    for expert in range(3):
        policy.admitted(expert)
    policy.used([0, 1, 2], [6, 1, 8], 9)
    assert list(policy.victims(set())) == [1, 0, 2], "still learning: the least popular first"
    policy.used([0], [1], 1)
    assert list(policy.victims(set())) == [1], "0 and 2 are pinned now"
    policy.used([1], [100], 100)
    assert list(policy.victims(set())) == [1]


@pytest.mark.parametrize(
    ("profile", "capacity", "spare", "kept", "victims"),
    [
        ({0: 9, 1: 8, 2: 7, 3: 1}, 4, 2, [0, 1, 5, 6], [5, 6]),  # 0 and 1 are pinned
        ({7: 5, 4: 5, 2: 5, 9: 1}, 3, 1, [7, 4, 2], [7]),  # ties go to the lowest id
        ({0: 9}, 2, 2, [0, 1], [0, 1]),  # no more than the spare places: LRU
    ],
)
def test_static_pins_the_most_popular_of_a_profile(
    profile: dict[int, int], capacity: int, spare: int, kept: list[int], victims: list[int]
) -> None:
    policy = EVICTIONS["static"].make(SHAPE, capacity, Known(popularity=profile), {"spare": str(spare)})
    admit(policy, kept)
    assert list(policy.victims(())) == victims


def test_options_reach_the_policy() -> None:
    """With rho 1/4 a priority halves in 64 tokens, with rho 1/2 and omega 1 in one."""
    found = []
    for given in ({}, {"rho": "0.5", "omega": "1"}):
        policy = EVICTIONS["lcp"].make(SHAPE, 4, given=given)
        admit(policy, [0, 1])
        policy.used([0], [9], 9)
        policy.used([1], [1], 10)
        found.append(list(policy.victims(())))
    assert found == [[1, 0], [0, 1]]
