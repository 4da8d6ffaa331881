"""Budgets are possible, never worse than equal ones, near the best, and where planted behaviour wants them."""

from __future__ import annotations

import statistics
from itertools import pairwise

import numpy as np
import pytest

from expertly.core.errors import BudgetError, ConfigError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.policies.allocation.moepic import (
    Configuration,
    LayerRates,
    SplitPlan,
    Timing,
    configure,
    uniform_plan,
)
from expertly.policies.allocation.moepic.configurator import Forecaster
from expertly.policies.allocation.uniform import equal_quotas
from tests.policies.moepic.builders import allocations, gathered, random_model, shape_of

TIMES = {"attention_ns": 40_000, "moe_ns": 40_000, "load_ns": 100_000, "head_ns": 40_000}


def exposed(forecaster: Forecaster, plan: SplitPlan) -> tuple[float, ...]:
    return tuple(one.exposed_ns for one in forecaster.outcomes(plan.layers))


def budgets_of(found: Configuration) -> list[int]:
    return [one.budget_segments for one in found.plan.layers]


@pytest.mark.parametrize("zeta", [1e-6, 0.01, 0.2, 0.99])
@pytest.mark.parametrize("span_ns", [0, 15_000])
def test_budgets_are_possible_and_no_worse_than_equal_ones(span_ns: int, zeta: float) -> None:
    for seed in range(6):
        shape, kept, rates, timing = random_model(seed, span_ns)
        found = configure(shape, [kept], rates, timing, zeta)
        most = shape.layers[0].num_experts * shape.segments_per_expert
        assert sum(budgets_of(found)) == kept
        assert all(1 <= budget <= most for budget in budgets_of(found))
        assert sum(found.exposed_ns) <= min(sum(found.uniform_exposed_ns), sum(found.start_exposed_ns))
        assert found == configure(shape, [kept], rates, timing, zeta)


def test_the_forecast_is_that_of_the_plan() -> None:
    for seed in range(6):
        shape, kept, rates, timing = random_model(seed)
        found, forecaster = configure(shape, [kept], rates, timing), Forecaster(shape, rates, timing)
        assert found.exposed_ns == pytest.approx(exposed(forecaster, found.plan))
        assert found.outcomes[0].window_ns == timing.first_window_ns()
        for layer, (one, following) in enumerate(pairwise(found.outcomes)):
            assert following.window_ns == timing.next_window_ns(layer, np.array(one.loaded))
            assert 0 <= one.loaded <= timing.top_k[layer]
            assert one.exposed_ns == timing.exposed_ns(layer, np.array(one.loaded))
        assert found.uniform_exposed_ns == forecaster.forecast(equal_quotas(shape, [kept])).exposed_ns
        assert found.start_exposed_ns == exposed(forecaster, uniform_plan(shape, [kept]))


@pytest.mark.parametrize("span_ns", [0, 15_000])
def test_the_gap_to_the_best_of_all_budgets(span_ns: int) -> None:
    gaps = []
    for seed in range(18):
        shape, kept, rates, timing = random_model(seed, span_ns)
        forecaster, near, least = Forecaster(shape, rates, timing), None, float("inf")
        for budgets in allocations(3, kept, shape.layers[0].num_experts * shape.segments_per_expert):
            near = forecaster.forecast(budgets, near)
            least = min(least, near.total_ns)
        total = sum(configure(shape, [kept], rates, timing).exposed_ns)
        assert total >= least * (1 - 1e-9)
        if least > 0:
            gaps.append(total / least - 1)
    assert len(gaps) >= 10
    assert statistics.median(gaps) <= 0.05


@pytest.mark.parametrize("span_ns", [0, 15_000])
@pytest.mark.parametrize("seed", range(3))
def test_a_forecast_near_another_is_as_one_from_nothing(seed: int, span_ns: int) -> None:
    shape, _, rates, timing = random_model(seed, span_ns)
    forecaster, dice, near = Forecaster(shape, rates, timing), np.random.default_rng(seed), None
    most = shape.layers[0].num_experts * shape.segments_per_expert
    for _ in range(20):
        near = forecaster.forecast(dice.integers(0, most + 1, size=3).tolist(), near)
        alone = forecaster.forecast(near.budgets)
        assert (near.windows_ns, near.exposed_ns, near.splits()) == (alone.windows_ns, alone.exposed_ns, alone.splits())


def test_nothing_to_keep_and_everything_to_keep() -> None:
    shape, _, rates, timing = random_model(3)
    nothing = configure(shape, [0], rates, timing)
    assert budgets_of(nothing) == [0, 0, 0] == [one.kept_experts for one in nothing.plan.layers]
    few = configure(shape, [2], rates, timing)  # fewer than layers: not each has one
    assert sum(budgets_of(few)) == 2
    experts, segments = shape.layers[0].num_experts, shape.segments_per_expert
    everything = configure(shape, [10**6], rates, timing)
    assert sum(everything.exposed_ns) == 0
    assert all((one.kept_experts, one.kept_segments) == (experts, segments) for one in everything.plan.layers)


def test_memory_stays_in_its_size_class() -> None:
    """Two layers of narrow experts, two of wide ones; of one of each nothing is predicted."""
    layers = tuple(LayerGeometry(8, 2, 4, width, 3, 2) for width in (16, 16, 32, 32))
    shape = Geometry(layers, 4)
    timing = Timing.of(shape, **(TIMES | {"attention_ns": 250_000, "head_ns": 0}))
    found = configure(shape, [20, 12], [gathered(0, 8), LayerRates.alike(8)] * 2, timing)
    budgets = budgets_of(found)
    assert (sum(budgets[:2]), sum(budgets[2:])) == (20, 12)
    assert budgets[1] > budgets[0] and budgets[3] > budgets[2]


def test_parts_that_do_not_fit_together_are_refused() -> None:
    shape, kept, rates, timing = random_model(0)
    with pytest.raises(ConfigError, match=r"zeta=1\.0: must be above 0 and below 1"):
        configure(shape, [kept], rates, timing, zeta=1.0)
    with pytest.raises(ConfigError, match="rates of 2 and times of 3 layers: must be of all 3"):
        configure(shape, [kept], rates[:2], timing)
    with pytest.raises(ConfigError, match="layer 1: rates and times of 9 experts, top_k="):
        configure(shape, [kept], [rates[0], gathered(0, experts=9), rates[2]], timing)
    with pytest.raises(BudgetError, match=r"kept_segments=\[3, 4\]: must be"):
        configure(shape, [3, 4], rates, timing)


@pytest.mark.parametrize(
    "budget, segments, kept",
    [
        (0, 4, (0, 0)),
        (1, 4, (1, 1)),  # less than half of one
        (2, 4, (1, 2)),
        (11, 4, (5, 2)),
        (16, 4, (8, 2)),
        (23, 4, (8, 2)),
        (24, 4, (8, 3)),  # half of all eight is 16: more of each
        (32, 4, (8, 4)),
        (5, 1, (5, 1)),  # there are no halves
        (9, 3, (8, 1)),  # a third is the nearest below
    ],
)
def test_half_of_each_expert(budget: int, segments: int, kept: tuple[int, int]) -> None:
    (split,) = uniform_plan(shape_of(1, experts=8, segments=segments, width=12), [budget]).layers
    assert (split.kept_experts, split.kept_segments, split.budget_segments) == (*kept, budget)


def test_moves_as_printed_are_algorithm_1() -> None:
    """Line by line. Ours goes on where that ends, and never ends with more."""
    differs = 0
    for seed in range(12):
        shape, kept, rates, timing = random_model(seed)
        forecaster, step = Forecaster(shape, rates, timing), max(1, round(0.02 * kept))
        most = [layer.num_experts * shape.segments_per_expert for layer in shape.layers]
        layers = range(shape.num_layers)
        now = list(equal_quotas(shape, [kept]))
        while True:
            first = forecaster.forecast(now).exposed_ns
            more = forecaster.forecast([min(now[i] + step, most[i]) for i in layers]).exposed_ns
            less = forecaster.forecast([max(now[i] - step, 0) for i in layers]).exposed_ns
            takers = [(more[i] - first[i], i) for i in layers if now[i] + step <= most[i]]
            givers = [(less[i] - first[i], i) for i in layers if now[i] - step >= min(1, now[i])]
            givers = [one for one in givers if takers and one[1] != min(takers)[1]]
            if not givers:
                break
            then = list(now)
            then[min(takers)[1]] += step
            then[min(givers)[1]] -= step
            if sum(forecaster.forecast(then).exposed_ns) >= sum(first):
                break
            now = then
        printed, ours = (configure(shape, [kept], rates, timing, 0.02, as_printed=one) for one in (True, False))
        assert budgets_of(printed) == now
        assert sum(ours.exposed_ns) <= sum(printed.exposed_ns) + 1e-6
        differs += budgets_of(ours) != now
    assert differs
