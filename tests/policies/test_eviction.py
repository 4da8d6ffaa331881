"""What every eviction policy promises, and what each of them means."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from expertly.policies.eviction import DenseScoredPolicy, EvictionPolicy, ScoredPolicy
from expertly.policies.fmoe import FMoEEviction
from expertly.policies.known import Known
from expertly.policies.moe_infinity import EPSILON, EAMEviction
from expertly.policies.registry import EVICTIONS
from expertly.policies.static import Static, StaticOptions
from expertly.testing import check_eviction
from tests.scheduler.drive import geometry
from tests.tables import seeds

SHAPE, SMALL = geometry(layers=16, experts=64), geometry(layers=4, experts=6, top_k=2)


def admit(policy: EvictionPolicy, experts: list[int]) -> None:
    for expert in experts:
        policy.admitted(expert)
        policy.used([expert], [1], 1)


@pytest.mark.parametrize("name", EVICTIONS.built_in)
def test_conformance(name: str) -> None:
    """A new policy inherits this by being in EVICTIONS."""
    check_eviction(EVICTIONS[name])


class Stated(ScoredPolicy):
    """A score is what somebody says."""

    def __init__(self) -> None:
        super().__init__()
        self.stated = np.zeros(300)

    def score(self, expert: int) -> float:
        return float(self.stated[expert])


class DenselyStated(DenseScoredPolicy):
    def __init__(self) -> None:
        super().__init__(geometry(layers=3, experts=100))
        self.stated = np.zeros(300)

    def all_scores(self) -> np.ndarray:
        return self.stated


@pytest.mark.parametrize("kind", [Stated, DenselyStated])
@pytest.mark.parametrize("seed", seeds(3, 6))
def test_scored_victims_are_those_of_sorting_whatever_happened_before(seed: int, kind: Any) -> None:
    """Scores that rise, fall and come back; experts that go and return; questions read to any depth."""
    dice, policy, kept = random.Random(seed), kind(), set[int]()
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
            expected = sorted((policy.stated[e], e) for e in kept if e not in protected)
            assert policy.scores([*kept]) == [policy.stated[e] for e in kept]
            depth = dice.choice([0, 1, 2, 3, 5, 9, len(expected) + 1 if dice.random() < 0.1 else 4])
            assert policy.cheapest(protected, depth) == expected[:depth]
            asked = iter(policy.victims(protected))
            for (_, wanted), got in zip(expected[:depth], asked, strict=False):
                assert got == wanted
                if dice.random() < 0.5:  # the cache drops it at once
                    kept.remove(got)
                    policy.removed(got)
            if depth > len(expected):
                assert next(asked, None) is None


def test_fmoe_is_the_papers_formula() -> None:
    """1 / (p * freq) over a random history (section 4.5): p of the newest map of the layer, freq the visits."""
    dice, policy = random.Random(1), FMoEEviction(SMALL)
    probability, frequency = np.zeros((4, 6)), np.ones((4, 6))
    for step in range(500):
        layer = step % 4
        if dice.random() < 0.6:
            probability[layer] = [dice.choice([0.0, 1e-9, dice.random()]) for _ in range(6)]
            policy.predicted(6 * layer, probability[layer].tolist())
        experts, tokens = dice.sample(range(6), 3), [dice.choice([0, 1, 5]) for _ in range(3)]
        policy.used([6 * layer + expert for expert in experts], tokens, 5)
        frequency[layer, experts] += np.array(tokens) > 0
        worth = np.maximum(probability, 1e-6) * frequency
        np.testing.assert_array_equal(policy.all_scores(), worth.ravel())
    for expert in range(24):
        policy.admitted(expert)
    assert list(policy.victims({3, 7})) == [e for e in np.argsort(worth.ravel(), kind="stable") if e not in (3, 7)]


def priorities(likely: np.ndarray) -> list[float]:
    """Algorithm 1, lines 11 and 12, an expert at a time."""
    result = []
    for layer, row in enumerate(likely):
        total = row.sum() or EPSILON
        result += [(p + EPSILON) * (1 - layer / len(likely)) / total for p in row]
    return result


def test_eam_is_algorithm_1() -> None:
    numbers, policy = np.random.default_rng(0), EAMEviction(SMALL)
    for step in range(100):
        likely = np.round(numbers.random((4, 6)) * (numbers.random((4, 6)) < 0.5), 6)
        likely[step % 4] = 0
        policy.expected(tuple(likely.ravel().tolist()))
        assert policy.all_scores().tolist() == pytest.approx(priorities(likely))


def test_eam_goes_by_rows_of_single_layers_until_an_outlook_comes() -> None:
    """So that it works with any predictor of probabilities."""
    policy = EAMEviction(SMALL)
    for expert in (6, 7, 8):
        policy.admitted(expert)
    policy.predicted(6, [0.1, 0.6, 0.3, 0.0, 0.0, 0.0])
    assert list(policy.victims(())) == [6, 8, 7]
    policy.expected((*([0.0] * 6), 0.6, 0.3, 0.1, *([0.0] * 15)))
    assert list(policy.victims(())) == [8, 7, 6]
    policy.predicted(6, [0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    assert list(policy.victims(())) == [8, 7, 6], "an outlook is what was said last of the whole model"


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
    result = []
    for given in ({}, {"rho": "0.5", "omega": "1"}):
        policy = EVICTIONS["lcp"].make(SHAPE, 4, texts=given)
        admit(policy, [0, 1])
        policy.used([0], [9], 9)
        policy.used([1], [1], 10)
        result.append(list(policy.victims(())))
    assert result == [[1, 0], [0, 1]]
