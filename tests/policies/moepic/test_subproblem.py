"""Equations 5 to 7 worked out by hand; the best split of a layer against trying all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from expertly.policies.moepic import LayerProblem, LayerRates, Timing
from tests.policies.moepic.builders import gathered, shape_of
from tests.tables import seeds

TIMING = Timing.of(shape_of(2, top_k=2), attention_ns=[30, 50], moe_ns=[100, 120], load_ns=[80, 90], head_ns=7)


@pytest.mark.parametrize(
    ("loaded", "exposed_ns", "window_ns"),
    [
        (2.0, 0, 100 + 50),  # all there: the whole layer hides the next one's prefetches
        (0.0, 160, 100 + 50),  # computing comes after loading: all of it is left
        (1.0, 30, 100 - 50 + 50),  # one computes in 50 while the other loads in 80
        (1.75, 0, 100 - 20 + 50),  # a quarter loads in 20 behind 87.5 of computing
    ],
)
def test_what_is_exposed_and_left_to_the_next_window(loaded: float, exposed_ns: int, window_ns: int) -> None:
    assert TIMING.exposed_ns(0, np.array([loaded])) == exposed_ns
    assert TIMING.next_window_ns(0, loaded) == window_ns
    assert TIMING.first_window_ns() == 37, "head and attention"


def test_pieces_and_asking_cost_their_own_time() -> None:
    """Two experts in two pieces each; one of them lacks half: asked for unless both are whole, by 9 of 16."""
    costly = replace(TIMING, span_ns=(10, 0), ask_ns=(16, 0))
    loaded, is_split = np.array([2.0, 2.0, 1.5]), np.array([False, True, True])
    assert costly.pieces_ns(0, loaded, is_split).tolist() == [0, 20, 20 + 7]


LOAD_NS = 100_000


def loaded_by_definition(rates: LayerRates, top_k: int, experts: int, theta: float, window: float) -> float:
    """m of equations 9 to 11, prefetch after prefetch; `window` in loads of an expert."""
    cached = top_k * rates.hits[experts] * theta
    taken = brought = 0.0
    for y in range(len(rates.accuracy)):
        missing = 1 - rates.predicted_hits[y, experts] * theta
        taken += missing
        if taken > min(window, top_k) + 1e-9:
            break
        brought += missing * rates.accuracy[y]
    return min(top_k, cached + brought)


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("seed", seeds(3, 6))
def test_every_budget_gets_the_best_of_all_splits(seed: int, pieces: bool) -> None:
    """The most m; with `pieces` the least of equation 6 and what they cost."""
    dice = np.random.default_rng(seed)
    num, segments, top_k = int(dice.integers(2, 9)), int(dice.choice([1, 2, 4, 8])), int(dice.integers(1, 3))
    rates = gathered(seed, num, top_k)
    times = (int(dice.integers(10_000, 200_000)), int(dice.integers(1, 40_000)), int(dice.integers(0, 20_000)))
    moe_ns, span_ns, ask_ns = times
    timing = Timing((top_k,), (0,), (moe_ns,), (LOAD_NS,), 0, (span_ns,), (ask_ns,))
    problem = LayerProblem(rates, 0, timing, segments, pieces=pieces)

    def cost(loaded: float, theta: float) -> float:
        exposed = max(0.0, (top_k - loaded) * LOAD_NS - loaded * moe_ns / top_k)
        return exposed + top_k * span_ns * (0 < theta < 1) + ask_ns * (1 - (loaded / top_k) ** top_k)

    for window in (0.0, float(dice.uniform(0, 1)), float(dice.uniform(1, 3)), 100.0):
        for budget in range(num * segments + 1):
            thetas = [(c, min(segments, budget // c) / segments) for c in range(1, num + 1)]
            loaded = {pair: loaded_by_definition(rates, top_k, *pair, window) for pair in [(0, 0.0), *thetas]}
            costs = {pair: cost(m, pair[1]) if pieces else -m for pair, m in loaded.items()}
            best = problem.best(budget, window * LOAD_NS)
            assert best.kept_experts * best.top <= budget
            chosen = best.kept_experts, best.top / segments
            assert best.loaded == pytest.approx(loaded[chosen])
            assert costs[chosen] == pytest.approx(min(costs.values()), abs=1e-6 if not pieces else 1e-3)
            if pieces:
                assert best.exposed_ns == pytest.approx(costs[chosen], abs=1e-3)


def test_of_equal_splits_the_one_that_keeps_most_of_what_is_needed() -> None:
    """A window without end brings all that is needed: the tops that are kept are those that are used."""
    rates = LayerRates(np.array([0, 0.9, 1.0]), np.array([1.0, 0.0]), np.array([[0, 0.9, 1.0], [0, 0.1, 1.0]]))
    timing = Timing((1,), (0,), (10,), (10,), 0, (0,), (0,))
    best = LayerProblem(rates, 0, timing, 2, pieces=False).best(2, 1e9)
    assert (best.kept_experts, best.top, best.loaded) == (1, 2, 1.0)
