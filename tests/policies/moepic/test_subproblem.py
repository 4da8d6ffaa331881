"""Equations 5 to 7 worked out by hand; the best split of a layer: equal to trying all, and what planted behaviour asks
for.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import comb

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.policies.allocation.moepic import LayerRates, Timing
from expertly.policies.allocation.moepic.subproblem import Curve, LayerProblem, Splits
from expertly.policies.allocation.moepic.timing import Parts
from tests.policies.moepic.builders import gathered, shape_of
from tests.tables import seeds

TIMING = Timing.of(shape_of(2, top_k=2), attention_ns=[30, 50], moe_ns=[100, 120], load_ns=[80, 90], head_ns=7)


def m(loaded: float) -> np.ndarray:
    return np.array([loaded])


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
    assert TIMING.exposed_ns(0, m(loaded)) == exposed_ns
    assert TIMING.next_window_ns(0, m(loaded)) == window_ns
    assert TIMING.first_window_ns() == 37, "head and attention"


COSTLY = replace(TIMING, span_ns=(10, 0), ask_ns=(4, 0))


def parts(further: float = 0, early: float = 0, lacking: float = 0) -> Parts:
    return Parts(*(np.array([one], float) for one in (further, early, lacking)))


def test_spans_and_asking_cost_their_own_time() -> None:
    """All there in halves: two spans more. One of two always missing: asked for in 3 tokens of 4, as either may be."""
    assert COSTLY.exposed_ns(0, m(2.0), parts(further=2)) == 20
    assert COSTLY.next_window_ns(0, m(2.0), parts(further=2)) == 100 + 20 + 50
    without_load = replace(COSTLY, load_ns=(0, 0))
    assert without_load.exposed_ns(0, m(1.0), parts(lacking=1)) == pytest.approx(0.75 * 4)
    assert COSTLY.counts_parts(0) and not COSTLY.counts_parts(1)


def test_what_is_exposed_is_the_mean_over_tokens() -> None:
    """Either of two experts is missing half the time: none, one (80 of loading behind 50) or both (160), by 1, 2, 1."""
    free_asking = replace(COSTLY, ask_ns=(0, 0))
    assert free_asking.exposed_ns(0, m(1.0), parts(lacking=1)) == pytest.approx((2 * 30 + 160) / 4)
    assert TIMING.exposed_ns(0, m(1.0)) == 30, "the paper's mean token"


def test_tops_are_computed_while_their_rest_loads() -> None:
    """Both tops are there, half of each: 80 load behind 50 and the 10 that half a span each costs more."""
    free_asking = replace(COSTLY, ask_ns=(0, 0))
    exposed = free_asking.exposed_ns(0, m(1.0), parts(further=2, early=1, lacking=2))
    assert exposed == pytest.approx(80 - 50 - 10 + 20)
    assert free_asking.next_window_ns(0, m(1.0), parts(further=2, early=1, lacking=2)) == 100 + 20 - 60 + 50


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attention_ns": [1]}, r"attention_ns: 1 values; must be one for each of 2 layers"),
        ({"moe_ns": [1, -2]}, r"moe_ns\[1\]=-2: must be at least 0"),
        ({"span_ns": [1]}, r"span_ns: 1 values; must be one for each of 2 layers"),
        ({"ask_ns": -1}, r"ask_ns\[0\]=-1: must be at least 0"),
        ({"load_ns": -1}, r"load_ns\[0\]=-1: must be at least 0"),
        ({"head_ns": -3}, r"head_ns=-3: must be at least 0"),
    ],
)
def test_errors_name_the_field(changes: dict, message: str) -> None:
    times = {"attention_ns": 1, "moe_ns": 1, "load_ns": 1, "head_ns": 1} | changes
    with pytest.raises(ConfigError, match=f"timing field {message}"):
        Timing.of(shape_of(2), **times)


# -- the best split ---------------------------------------------------------------------------------------------

LOAD_NS = 100_000


def problem_of(
    rates: LayerRates,
    top_k: int,
    segments: int,
    load_ns: int = LOAD_NS,
    moe_ns: int = 40_000,
    span_ns: int = 0,
    ask_ns: int = 0,
) -> LayerProblem:
    timing = Timing((top_k,), (0,), (moe_ns,), (load_ns,), 0, (span_ns,), (ask_ns,))
    return LayerProblem(rates, 0, timing, Splits(rates.num_experts, segments))


def loaded_with(problem: LayerProblem, experts: int, segments: int, window_ns: float) -> float:
    return float(problem.outcomes(window_ns).loaded[problem.splits.number[experts, segments]])


def kept(curve: Curve, budget: int) -> tuple[int, int]:
    best = curve.best(budget)
    return best.kept_experts, best.kept_segments


def all_splits(num_experts: int, segments: int) -> list[tuple[int, int]]:
    return [(0, 0), *product(range(1, num_experts + 1), range(1, segments + 1))]


def loaded_by_definition(rates: LayerRates, top_k: int, experts: int, theta: float, window: float) -> float:
    """m of equations 9 to 11, prefetch after prefetch; `window` in loads of an expert."""
    cached = top_k * rates.hits[experts] * theta
    taken = brought = 0.0
    for y in range(rates.num_experts):
        missing = 1 - rates.predicted_hits[y, experts] * theta
        taken += missing
        if taken > min(window, top_k) + 1e-9:
            break
        brought += missing * rates.accuracy[y]
    return min(top_k, cached + brought)


@pytest.mark.parametrize("seed", seeds(3, 6))
def test_every_budget_gets_the_best_of_all_splits(seed: int) -> None:
    dice = np.random.default_rng(seed)
    num, segments, top_k = int(dice.integers(2, 9)), int(dice.choice([1, 2, 4, 8])), int(dice.integers(1, 3))
    rates = gathered(seed, num, top_k)
    problem = problem_of(rates, top_k, segments)
    for window in (0.0, float(dice.uniform(0, 1)), float(dice.uniform(1, 3)), 100.0):
        of = {(c, s): loaded_by_definition(rates, top_k, c, s / segments, window) for c, s in all_splits(num, segments)}
        curve = problem.curve(window * LOAD_NS)
        assert len(curve.loaded) == num * segments + 1
        for budget in range(num * segments + 1):
            chosen = kept(curve, budget)
            assert chosen[0] * chosen[1] <= budget
            assert curve.loaded[budget] == pytest.approx(of[chosen])
            assert of[chosen] == pytest.approx(max(m for (c, s), m in of.items() if c * s <= budget))
        for (c, s), loaded in of.items():
            assert loaded_with(problem, c, s, window * LOAD_NS) == pytest.approx(loaded)


def met_by_definition(rates: LayerRates, top_k: int, experts: int, theta: float, window: float) -> tuple[float, ...]:
    """Further spans, what of them is early, and experts that lack something."""
    taken = needed = foretold = 0.0
    for y in range(rates.num_experts):
        taken += 1 - rates.predicted_hits[y, experts] * theta
        if taken > min(window, top_k) + 1e-9:
            break
        needed += rates.accuracy[y]
        foretold += rates.accuracy[y] * rates.predicted_hits[y, experts]
    tops_alone = max(0.0, top_k * rates.hits[experts] - foretold)
    if experts and theta < 1:
        return top_k, tops_alone * (1 - theta), top_k - needed
    return 0, 0.0, top_k - needed - tops_alone


@pytest.mark.parametrize("seed", seeds(3, 6))
def test_with_spans_that_cost_something_every_budget_gets_the_best_of_all_splits(seed: int) -> None:
    """Equation 6 and what spans add, over every number of missing experts, against trying all splits."""
    dice = np.random.default_rng(seed)
    num, segments, top_k = int(dice.integers(2, 9)), int(dice.choice([2, 4, 8])), int(dice.integers(1, 3))
    rates, moe_ns = gathered(seed, num, top_k), int(dice.integers(10_000, 200_000))
    span_ns, ask_ns = int(dice.integers(1, 40_000)), int(dice.integers(0, 20_000))
    problem = problem_of(rates, top_k, segments, moe_ns=moe_ns, span_ns=span_ns, ask_ns=ask_ns)

    def costs(experts: int, theta: float, window: float) -> float:
        loaded = loaded_by_definition(rates, top_k, experts, theta, window)
        further, early, lacking = met_by_definition(rates, top_k, experts, theta, window)
        lacking = min(max(lacking, top_k - loaded), top_k)
        expected = further * span_ns
        for missing in range(1, top_k + 1) if lacking > 1e-9 else ():
            chance = comb(top_k, missing) * (lacking / top_k) ** missing * (1 - lacking / top_k) ** (top_k - missing)
            here = top_k - missing * (top_k - loaded) / lacking
            hidden = here * moe_ns / top_k + missing / lacking * early * span_ns
            expected += chance * (ask_ns + max(0.0, (top_k - here) * LOAD_NS - hidden))
        return expected

    for window in (0.0, float(dice.uniform(0, 1)), float(dice.uniform(1, 3)), 100.0):
        of = {(c, s): costs(c, s / segments, window) for c, s in all_splits(num, segments)}
        curve = problem.curve(window * LOAD_NS)
        assert (np.diff(curve.exposed_ns) <= 0).all()
        for budget in range(num * segments + 1):
            chosen = kept(curve, budget)
            assert chosen[0] * chosen[1] <= budget
            assert curve.exposed_ns[budget] == pytest.approx(of[chosen], abs=1e-3)
            assert of[chosen] == pytest.approx(min(cost for (c, s), cost in of.items() if c * s <= budget), abs=1e-3)
