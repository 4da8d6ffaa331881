from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from expertly.policies.predictor.fmoe.predictor import select, select_rows, union


def brute(probabilities: np.ndarray, score: float, top_k: int) -> int:
    """The size of the smallest set that meets equations 6 to 8 among experts with p > 0; all of those if none does."""
    positive = [float(p) for p in probabilities if p > 0]
    threshold = max(0.0, min(1 - score, 1.0))
    for size in range(min(top_k, len(positive)), len(positive) + 1):
        if any(sum(sorted(some, reverse=True)) >= threshold for some in combinations(positive, size)):
            return size
    return len(positive)


def test_it_is_the_smallest_set_that_reaches_the_threshold() -> None:
    dice = np.random.default_rng(0)
    for _ in range(400):
        p = dice.dirichlet(np.full(7, 0.5)).astype(np.float16).astype(np.float32)
        p[dice.random(7) < 0.2] = 0
        score, top_k = float(dice.uniform(-1, 1)), int(dice.integers(1, 8))
        experts, likely = select(p, score, top_k)
        assert len(experts) == brute(p, score, top_k)
        assert likely == [float(p[expert]) for expert in experts]
        order = sorted(range(7), key=lambda expert: (-p[expert], expert))
        assert experts == order[: len(experts)]  # by falling p: no other set of this size has more


@pytest.mark.parametrize(
    ("score", "wanted"), [(1.0, 2), (0.5, 2), (0.25, 2), (0.24, 3), (0.1, 3), (0.06, 4), (0.0, 4), (-1.0, 4), (1.1, 2)]
)
def test_the_surer_the_match_the_fewer_experts(score: float, wanted: int) -> None:
    p = np.array([0, 0.25, 0.5, 0.1875, 0.0625, 0], np.float32)
    experts, _ = select(p, score, 2)
    assert experts == [2, 1, 3, 4][:wanted]
    assert select(p, score, 2, "top-k")[0] == [2, 1]


def test_an_expert_without_probability_is_never_named() -> None:
    p = np.array([0, 0.5, 0, 0.5], np.float32)
    assert select(p, -1.0, 3) == ([1, 3], [0.5, 0.5])
    assert select(p, 1.0, 3, "top-k") == ([1, 3], [0.5, 0.5])
    assert select(np.zeros(4, np.float32), 0.0, 2) == ([], [])


@pytest.mark.parametrize("mode", ["delta", "top-k"])
def test_rows_are_selected_as_each_alone(mode: str) -> None:
    dice = np.random.default_rng(1)
    p = dice.dirichlet(np.full(9, 0.3), 300).astype(np.float16).astype(np.float32)
    p[:100] = np.round(p[:100], 1)  # many ties, many zeros
    p[7] = 0
    scores = dice.uniform(-1.0, 1.2, 300).astype(np.float32)
    selected = select_rows(p, scores, 3, mode)  # type: ignore[arg-type]
    for row in range(300):
        alone, _ = select(p[row], float(scores[row]), 3, mode)  # type: ignore[arg-type]
        assert np.flatnonzero(selected[row]).tolist() == sorted(alone)


def test_a_union_ranks_by_the_highest_probability_of_those_who_chose() -> None:
    p = np.array([[0.5, 0.3, 0.2, 0], [0.1, 0.3, 0.35, 0.25]], np.float32)
    selected = np.array([[True, True, False, False], [False, False, True, True]])
    experts, likely = union(p, selected)
    assert experts == [0, 2, 1, 3]
    assert likely == pytest.approx([0.5, 0.35, 0.3, 0.25])
    assert union(p, np.zeros_like(selected)) == ([], [])
