"""Algorithm 1, line by line; its budgets are possible, near the best, and where planted behaviour wants them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.policies.allocation import equal_quotas
from expertly.policies.moepic import Configuration, LayerProblem, LayerRates, Timing, configure, expert_split
from tests.policies.moepic.builders import allocations, finished, gathered, problems_of, random_model


def configured(
    shape: Geometry, kept: Sequence[int], problems: Sequence[LayerProblem], timing: Timing, zeta: float = 0.01
) -> Configuration:
    return finished(configure(shape, kept, problems, timing, zeta))


@pytest.mark.parametrize("zeta", [1e-6, 0.01, 0.2, 0.99])
def test_budgets_are_possible_and_no_worse_than_equal_ones(zeta: float) -> None:
    for seed in range(6):
        shape, kept, problems, timing = random_model(seed)
        result = configured(shape, [kept], problems, timing, zeta)
        most = shape.layers[0].num_experts * shape.segments_per_expert
        assert sum(result.budgets) == kept and all(1 <= budget <= most for budget in result.budgets)
        for split, budget in zip(result.splits, result.budgets, strict=True):
            assert split.kept_experts * split.top <= budget
        assert result.exposed_ns <= expert_split(problems, equal_quotas(shape, [kept]), timing).exposed_ns
        assert result == configured(shape, [kept], problems, timing, zeta)


def test_a_layers_window_follows_from_the_layer_before() -> None:
    shape, kept, problems, timing = random_model(1)
    budgets = equal_quotas(shape, [kept])
    window = timing.first_window_ns()
    for layer, split in enumerate(expert_split(problems, budgets, timing).splits):
        assert split == problems[layer].best(budgets[layer], window)
        window = timing.next_window_ns(layer, split.loaded)


def test_the_gap_to_the_best_of_all_budgets() -> None:
    gaps = []
    for seed in range(18):
        shape, kept, problems, timing = random_model(seed)
        every = allocations(3, kept, shape.layers[0].num_experts * shape.segments_per_expert)
        least = min(expert_split(problems, budgets, timing).exposed_ns for budgets in every)
        total = configured(shape, [kept], problems, timing).exposed_ns
        assert total >= least * (1 - 1e-9)
        if least > 0:
            gaps.append(total / least - 1)
    assert len(gaps) >= 10 and statistics.median(gaps) <= 0.05


def test_nothing_to_keep_and_everything_to_keep() -> None:
    shape, _, problems, timing = random_model(3)
    nothing = configured(shape, [0], problems, timing)
    assert nothing.budgets == (0, 0, 0) and not any(split.kept_experts for split in nothing.splits)
    assert sum(configured(shape, [2], problems, timing).budgets) == 2, "fewer than layers: not each has one"
    experts, segments = shape.layers[0].num_experts, shape.segments_per_expert
    everything = configured(shape, [shape.num_layers * experts * segments], problems, timing)
    assert everything.exposed_ns == 0
    assert all((split.kept_experts, split.top) == (experts, segments) for split in everything.splits)


def test_memory_stays_in_its_size_class_and_goes_where_nothing_is_predicted() -> None:
    """Two layers of narrow experts, two of wide ones; of one of each nothing is predicted."""
    layers = tuple(LayerGeometry(8, 2, 4, width, 3, 2) for width in (16, 16, 32, 32))
    shape = Geometry(layers, 4)
    timing = Timing.of(shape, attention_ns=250_000, moe_ns=40_000, load_ns=100_000, head_ns=0)
    problems = problems_of(shape, [gathered(0, 8), LayerRates.alike(8)] * 2, timing)
    budgets = configured(shape, [20, 12], problems, timing, 0.2).budgets
    assert (sum(budgets[:2]), sum(budgets[2:])) == (20, 12)
    assert budgets[1] > budgets[0] and budgets[3] > budgets[2]


def test_moves_are_those_of_algorithm_1() -> None:
    """Line by line."""
    num_moves = 0
    for seed in range(12):
        shape, kept, problems, timing = random_model(seed)
        step = max(1, round(0.02 * kept))
        most = [layer.num_experts * shape.segments_per_expert for layer in shape.layers]
        layers = range(shape.num_layers)

        def exposed(budgets: Sequence[int], problems: Sequence[LayerProblem] = problems, timing: Timing = timing):
            return [split.exposed_ns for split in expert_split(problems, budgets, timing).splits]

        now = list(equal_quotas(shape, [kept]))
        while True:
            first = exposed(now)
            more = exposed([min(now[i] + step, most[i]) for i in layers])
            less = exposed([max(now[i] - step, 0) for i in layers])
            takers = [(more[i] - first[i], i) for i in layers if now[i] + step <= most[i]]
            givers = [(less[i] - first[i], i) for i in layers if now[i] - step >= min(1, now[i])]
            givers = [pair for pair in givers if takers and pair[1] != min(takers)[1]]
            if not givers:
                break
            then = list(now)
            then[min(takers)[1]] += step
            then[min(givers)[1]] -= step
            if sum(exposed(then)) >= sum(first):
                break
            now = then
            num_moves += 1
        assert list(configured(shape, [kept], problems, timing, 0.02).budgets) == now
    assert num_moves >= 5
