"""MoE-Infinity's cache: algorithm 1."""

from __future__ import annotations

import random

import numpy as np
import pytest

from expertly.policies.moe_infinity import EPSILON, EAMEviction
from tests.scheduler.drive import geometry

SHAPE = geometry(layers=4, experts=6, top_k=2)


def priorities(likely: np.ndarray) -> list[float]:
    """Algorithm 1, lines 11 and 12, an expert at a time."""
    found = []
    for layer, row in enumerate(likely):
        total = row.sum() or EPSILON
        found += [(p + EPSILON) * (1 - layer / len(likely)) / total for p in row]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_in_lock_step_with_algorithm_1(seed: int) -> None:
    """Whatever is admitted, removed and said in between."""
    dice, numbers = random.Random(seed), np.random.default_rng(seed)
    policy, kept, likely = EAMEviction(SHAPE), set[int](), np.zeros((4, 6))
    for _ in range(300):
        what = dice.choice(["admit", "remove", "say", "ask"])
        if what == "admit" and len(kept) < 24:
            expert = dice.choice([one for one in range(24) if one not in kept])
            kept.add(expert)
            policy.admitted(expert)
        elif what == "remove" and kept:
            expert = dice.choice(sorted(kept))
            kept.remove(expert)
            policy.removed(expert)
        elif what == "say":
            likely = np.round(numbers.random((4, 6)) * (numbers.random((4, 6)) < 0.5), 6)
            likely[dice.randrange(4)] = 0
            policy.expected(tuple(likely.ravel().tolist()))
        expected = priorities(likely)
        protected = set(dice.sample(range(24), 5))
        wanted = sorted((expected[expert], expert) for expert in kept - protected)
        found = list(policy.scored_victims(protected))
        assert [expert for _, expert in found] == [expert for _, expert in wanted]
        assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted])


def test_rows_of_single_layers_serve_until_an_outlook_comes() -> None:
    """So that it works with any predictor of probabilities."""
    policy = EAMEviction(SHAPE)
    for expert in (6, 7, 8):
        policy.admitted(expert)
    policy.predicted(6, [0.1, 0.6, 0.3, 0.0, 0.0, 0.0])
    assert list(policy.victims(())) == [6, 8, 7]
    policy.expected((*([0.0] * 6), 0.6, 0.3, 0.1, *([0.0] * 15)))
    assert list(policy.victims(())) == [8, 7, 6]
    policy.predicted(6, [0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    assert list(policy.victims(())) == [8, 7, 6], "an outlook is what was said last of the whole model"
