"""The configurator of MoEpic (section 3.4): H, P and PH against their definitions, equations 5 to 7 worked out by hand,
the best split of a layer against trying all, and algorithm 1, line by line.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.policies.allocation import equal_quotas
from expertly.policies.moepic import (
    Configuration,
    LayerProblem,
    LayerRates,
    LayerStatistics,
    Timing,
    configure,
    expert_split,
)
from tests.scheduler.drive import geometry
from tests.tables import seeds

LOAD_NS = 100_000
TIMING = Timing([2, 2], attention_ns=[30, 50], moe_ns=[100, 120], load_ns=[80, 90], head_ns=7)


def routing(seed: int, tokens: int, experts: int, top_k: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Needed experts [T, K], Zipf and in part those of the token before, and predicted scores [T, E] with noise."""
    dice = np.random.default_rng(seed)
    popularity = -dice.uniform(0.3, 1.5) * np.log(1.0 + dice.permutation(experts))
    mine, needed, predicted = dice.gumbel(size=experts), [], []
    for _ in range(tokens):
        mine = np.where(dice.random(experts) < 0.3, dice.gumbel(size=experts), mine)
        logits = popularity + mine
        needed.append(np.argsort(-logits, kind="stable")[:top_k])
        scores = np.exp(logits + noise * dice.standard_normal(experts))
        predicted.append((scores / scores.sum()).astype(np.float32))
    return np.array(needed), np.array(predicted)


def learn(layer: LayerStatistics, needed: np.ndarray, predicted: np.ndarray) -> None:
    """Tokens that came one after another; of rows of NaN nothing was predicted, of scores of 0 no expert."""
    for experts, scores in zip(needed.tolist(), predicted, strict=True):
        named = np.argsort(-scores, kind="stable")[: np.count_nonzero(scores)].tolist()
        layer.note(experts, None if np.isnan(scores).all() else named)


@cache
def gathered(seed: int, experts: int = 6, top_k: int = 2, tokens: int = 150) -> LayerRates:
    layer = LayerStatistics(experts)
    learn(layer, *routing(seed, tokens, experts, top_k, [0.0, 0.3, 1.0, 2.0, 5.0][seed % 5]))
    return layer.rates()


def random_model(seed: int) -> tuple[Geometry, int, list[LayerProblem], Timing]:
    """Three small layers, the segments to keep, the problems of splitting and the times; an expert loads in 100 us."""
    dice = np.random.default_rng(seed)
    experts, segments, top_k = int(dice.integers(4, 7)), int(dice.choice([1, 2, 4])), int(dice.integers(1, 3))
    shape = geometry(3, experts, top_k, segments)
    rates = [gathered(100 * seed + int(dice.integers(100)), experts, top_k) for _ in range(3)]
    attention_ns, moe_ns, head_ns = (int(100_000 * dice.uniform(0.1, 1.0)) for _ in range(3))
    kept = int(dice.integers(3, 3 * experts * segments // 2 + 1))
    timing = Timing([top_k] * 3, [attention_ns] * 3, [moe_ns] * 3, [LOAD_NS] * 3, head_ns)
    return shape, kept, problems_of(shape, rates, timing), timing


def problems_of(shape: Geometry, rates: Sequence[LayerRates], timing: Timing) -> list[LayerProblem]:
    return [LayerProblem(rate, layer, timing, shape.segments_per_expert) for layer, rate in enumerate(rates)]


# -- how well experts could be cached, and how well they are predicted ---------------------------------------------

RHO, OMEGA = 0.25, 128.0


def defined(needed: np.ndarray, predicted: np.ndarray) -> LayerRates:
    """Straight from section 3.4.2: priorities by equation 4 for each token. A row of NaN: nothing was predicted."""
    experts = predicted.shape[1]
    count, last = [0] * experts, [0] * experts
    hits, accuracy, joint = np.zeros(experts + 1), np.zeros(experts), np.zeros((experts, experts + 1))
    num_predicted = 0
    for now, (row, scores) in enumerate(zip(needed, predicted, strict=True)):
        priority = [count[e] * RHO ** ((now - last[e]) / OMEGA) for e in range(experts)]
        ranked = sorted(range(experts), key=lambda e: (-priority[e], e))
        rank = {expert: place for place, expert in enumerate(ranked)}
        for expert in row:
            hits[rank[expert] + 1 :] += 1  # a cache of more experts than its rank holds it
        if not np.isnan(scores).all():
            num_predicted += 1
            for y, expert in enumerate(sorted(range(experts), key=lambda e: (-scores[e], e))):
                accuracy[y] += expert in row
                joint[y, rank[expert] + 1 :] += 1
        for expert in row:
            count[expert] += 1
            last[expert] = now + 1
    return LayerRates(hits / needed.size, accuracy / (num_predicted or 1), joint / (num_predicted or 1))


def assert_equal(got: LayerRates, expected: LayerRates) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-12)


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(5, 1, 140), (16, 4, 140), (300, 4, 70)])
def test_rates_are_as_defined(experts: int, top_k: int, tokens: int) -> None:
    """Also where some tokens had no prediction, others one of few experts, and rates are read in between."""
    needed, predicted = routing(experts, tokens, experts, top_k, noise=1.0)
    predicted[1::7, experts // 2 :] = 0
    predicted[np.arange(tokens) % 5 == 3] = np.nan
    layer = LayerStatistics(experts)
    learn(layer, needed[:66], predicted[:66])
    layer.rates()
    learn(layer, needed[66:], predicted[66:])
    assert_equal(layer.rates(), defined(needed, predicted))


def test_before_any_token_experts_are_alike_and_rates_do_not_change_afterwards() -> None:
    layer = LayerStatistics(4)
    before = layer.rates()
    layer.note([1, 2], [1, 2, 3, 0])
    assert before.hits.tolist() == [0, 0.25, 0.5, 0.75, 1] and not before.accuracy.any()
    assert layer.rates().accuracy.tolist() == [1, 1, 0, 0] and layer.ranked == [1, 2]


# -- how a layer splits its budget ---------------------------------------------------------------------------------


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
    assert TIMING.exposed_ns(0, loaded) == exposed_ns
    assert TIMING.next_window_ns(0, loaded) == window_ns
    assert TIMING.first_window_ns() == 37, "head and attention"


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


@pytest.mark.parametrize("seed", seeds(3, 6))
def test_every_budget_gets_the_split_with_the_most_m(seed: int) -> None:
    dice = np.random.default_rng(seed)
    num, segments, top_k = int(dice.integers(2, 9)), int(dice.choice([1, 2, 4, 8])), int(dice.integers(1, 3))
    rates = gathered(seed, num, top_k)
    moe_ns = int(dice.integers(10_000, 200_000))
    problem = LayerProblem(rates, 0, Timing((top_k,), (0,), (moe_ns,), (LOAD_NS,), 0), segments)
    for window in (0.0, float(dice.uniform(0, 1)), float(dice.uniform(1, 3)), 100.0):
        for budget in range(num * segments + 1):
            thetas = [(c, min(segments, budget // c) / segments) for c in range(1, num + 1)]
            loaded = {pair: loaded_by_definition(rates, top_k, *pair, window) for pair in [(0, 0.0), *thetas]}
            best = problem.best(budget, window * LOAD_NS)
            assert best.kept_experts * best.top <= budget
            chosen = best.kept_experts, best.top / segments
            assert best.loaded == pytest.approx(loaded[chosen])
            assert best.loaded == pytest.approx(max(loaded.values()))
            exposed = max(0.0, (top_k - best.loaded) * LOAD_NS - best.loaded * moe_ns / top_k)
            assert best.exposed_ns == pytest.approx(exposed, abs=1e-3)


def test_of_equal_splits_the_one_that_keeps_most_of_what_is_needed() -> None:
    """A window without end brings all that is needed: the tops that are kept are those that are used."""
    rates = LayerRates(np.array([0, 0.9, 1.0]), np.array([1.0, 0.0]), np.array([[0, 0.9, 1.0], [0, 0.1, 1.0]]))
    best = LayerProblem(rates, 0, Timing((1,), (0,), (10,), (10,), 0), 2).best(2, 1e9)
    assert (best.kept_experts, best.top, best.loaded) == (1, 2, 1.0)


# -- the budgets of layers -----------------------------------------------------------------------------------------


def configured(
    shape: Geometry, kept: Sequence[int], problems: Sequence[LayerProblem], timing: Timing, zeta: float = 0.01
) -> Configuration:
    return next(filter(None, configure(shape, kept, problems, timing, zeta)))


def test_a_layers_window_follows_from_the_layer_before() -> None:
    shape, kept, problems, timing = random_model(1)
    budgets, window = equal_quotas(shape, [kept]), timing.first_window_ns()
    for layer, split in enumerate(expert_split(problems, budgets, timing).splits):
        assert split == problems[layer].best(budgets[layer], window)
        window = timing.next_window_ns(layer, split.loaded)


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
    timing = Timing([2] * 4, [250_000] * 4, [40_000] * 4, [100_000] * 4, 0)
    problems = problems_of(shape, [gathered(0, 8), LayerStatistics(8).rates()] * 2, timing)
    budgets = configured(shape, [20, 12], problems, timing, 0.2).budgets
    assert (sum(budgets[:2]), sum(budgets[2:])) == (20, 12)
    assert budgets[1] > budgets[0] and budgets[3] > budgets[2]


def test_moves_are_those_of_algorithm_1() -> None:
    """Line by line."""
    num_moves = 0
    for seed, zeta in ((number, 0.2 if number % 4 == 3 else 0.02) for number in range(12)):
        shape, kept, problems, timing = random_model(seed)
        step = max(1, round(zeta * kept))
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
        assert list(configured(shape, [kept], problems, timing, zeta).budgets) == now
    assert num_moves >= 5
