"""H, P and PH against their definitions, token by token."""

from __future__ import annotations

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.policies.allocation.moepic import LayerRates, LayerStatistics
from expertly.policies.eviction.lcp import LCP
from tests.policies.moepic.builders import learn, routing

RHO, OMEGA = 0.25, 128.0


def defined(
    passes: list[tuple[np.ndarray, np.ndarray | None]], experts: int, half_life: float | None = None
) -> LayerRates:
    """Straight from section 3.4.2: priorities by equation 4 for each token, all counted with their final weight."""
    count, last, now = [0] * experts, [0] * experts, 0
    total_tokens = sum(len(needed) for needed, _ in passes)
    hits, accuracy, joint = np.zeros(experts + 1), np.zeros(experts), np.zeros((experts, experts + 1))
    needed_weight = predicted_weight = 0.0
    for needed, predicted in passes:
        priority = [count[e] * RHO ** ((now - last[e]) / OMEGA) for e in range(experts)]
        ranked = sorted(range(experts), key=lambda e: (-priority[e], e))
        weight = 1.0 if half_life is None else 0.5 ** ((total_tokens - now) / half_life)
        for row in range(len(needed)):
            for size in range(experts + 1):
                hits[size] += weight * len(set(ranked[:size]) & set(needed[row]))
            needed_weight += weight * len(needed[row])
            if predicted is None or np.isnan(predicted[row]).all():
                continue
            predicted_weight += weight
            for y, expert in enumerate(sorted(range(experts), key=lambda e: (-predicted[row][e], e))):
                accuracy[y] += weight * (expert in needed[row])
                for size in range(experts + 1):
                    joint[y, size] += weight * (expert in ranked[:size])
        now += len(needed)
        for row in needed:
            for expert in row:
                count[expert] += 1
                last[expert] = now
    return LayerRates(hits / needed_weight, accuracy / (predicted_weight or 1), joint / (predicted_weight or 1))


def assert_equal(got: LayerRates, expected: LayerRates) -> None:
    np.testing.assert_allclose(got.hits, expected.hits, atol=1e-12)
    np.testing.assert_allclose(got.accuracy, expected.accuracy, atol=1e-12)
    np.testing.assert_allclose(got.predicted_hits, expected.predicted_hits, atol=1e-12)


@pytest.mark.parametrize("half_life", [None, 40.0])
@pytest.mark.parametrize("seed", range(4))
def test_rates_are_as_defined(seed: int, half_life: float | None) -> None:
    experts, top_k = [5, 8, 12, 16][seed], [1, 2, 3, 4][seed]
    needed, predicted = routing(seed, 120, experts, top_k, noise=1.0)
    layer = LayerStatistics(experts, half_life)
    learn(layer, needed, predicted)
    passes = [(needed[t : t + 1], predicted[t : t + 1]) for t in range(len(needed))]
    assert_equal(layer.rates(), defined(passes, experts, half_life))
    assert layer.num_tokens == 120


@pytest.mark.parametrize("half_life", [None, 40.0])
def test_rows_of_a_pass_count_each_and_find_the_ranks_before_it(half_life: float | None) -> None:
    needed, predicted = routing(7, 120, 9, 3, noise=1.0)
    layer, passes, begin = LayerStatistics(9, half_life), [], 0
    for rows in [1, 4, 7, 1, 16] * 4:
        this = slice(begin, begin + rows)
        layer.observe(needed[this], predicted[this])
        passes.append((needed[this], predicted[this]))
        begin += rows
    assert_equal(layer.rates(), defined(passes, 9, half_life))


def test_tokens_without_a_prediction_count_for_the_cache_alone() -> None:
    needed, predicted = routing(3, 80, 8, 2, noise=1.0)
    is_predicted = np.arange(80) % 3 != 0
    blank = np.where(is_predicted[:, None], predicted, np.nan)
    one_by_one, in_passes, never = LayerStatistics(8, None), LayerStatistics(8, None), LayerStatistics(8, None)
    learn(one_by_one, needed, predicted, is_predicted)
    learn(never, needed)
    for begin in range(0, 80, 4):
        this = slice(begin, begin + 4)
        in_passes.observe(needed[this], predicted[this], is_predicted[this])
    assert_equal(one_by_one.rates(), defined([(needed[t : t + 1], blank[t : t + 1]) for t in range(80)], 8))
    assert_equal(in_passes.rates(), defined([(needed[t : t + 4], blank[t : t + 4]) for t in range(0, 80, 4)], 8))
    assert (never.rates().hits == one_by_one.rates().hits).all()
    assert not never.rates().accuracy.any() and not never.rates().predicted_hits.any()


def test_nothing_observed_is_all_0_and_rates_do_not_change_afterwards() -> None:
    layer = LayerStatistics(4)
    before = layer.rates()
    assert not before.hits.any() and not before.accuracy.any() and not before.predicted_hits.any()
    layer.observe(np.array([[1, 2]]), np.array([[0.1, 0.4, 0.3, 0.2]], np.float32))
    assert not before.hits.any()
    assert layer.rates().hits[-1] == 1


def test_reading_rates_changes_nothing() -> None:
    needed, predicted = routing(4, 100, 8, 2, noise=1.0)
    read, unread = LayerStatistics(8), LayerStatistics(8)
    learn(unread, needed, predicted)
    for token in range(100):
        read.observe(needed[token : token + 1], predicted[token : token + 1])
        if token % 7 == 0:
            read.rates()
    assert_equal(read.rates(), unread.rates())
    assert_equal(read.rates(), unread.rates())


def test_what_is_no_expert_is_not_counted() -> None:
    """Two needed where others need three: stored ids say so with -1, or the highest number of their type."""
    for ids in (np.array([[0, -1, 3]]), np.array([[0, 0xFFFF, 3]], np.uint16)):
        layer, clean = LayerStatistics(5), LayerStatistics(5)
        scores = np.array([[0.1, 0.2, 0.3, 0.35, 0.05]], np.float32)
        layer.observe(ids, scores)
        clean.observe(np.array([[0, 3]]), scores)
        assert_equal(layer.rates(), clean.rates())
        assert layer.ranked() == clean.ranked() == [0, 3, 1, 2, 4]


def test_ranks_order_as_lcp_does() -> None:
    needed, _ = routing(5, 500, 24, 3, noise=0.0)
    layer, policy = LayerStatistics(24), LCP()
    for expert in range(24):
        policy.admitted(expert)
    for row in needed:
        layer.observe(row[None])
        policy.used(row.tolist(), [1] * len(row), 1)
    priorities = [policy.score(expert) for expert in layer.ranked()]
    assert priorities == [policy.score(expert) for expert in policy.victims(())][::-1]
    assert sorted(layer.ranked()) == list(range(24))


def test_what_was_long_ago_is_forgotten() -> None:
    """First experts 0 and 1 alone, then all eight in turn: two cached ones first hold all, then a quarter."""
    early = np.array([[0, 1]] * 4000)
    late = np.array([[2 * t % 8, (2 * t + 1) % 8] for t in range(4000)])
    rates = {}
    for half_life in (None, 200.0):
        layer = LayerStatistics(8, half_life)
        learn(layer, early)
        assert layer.rates().hits[2] > 0.99
        learn(layer, late)
        rates[half_life] = float(layer.rates().hits[2])
    assert rates[None] > 0.6
    assert rates[200.0] < 0.3


def test_a_short_memory_stays_exact_for_ever() -> None:
    """The weights of 2000 tokens with a half-life of 5 span 2^400."""
    needed, predicted = routing(2, 2000, 6, 2, noise=1.0)
    layer = LayerStatistics(6, half_life=5.0)
    learn(layer, needed, predicted)
    # At the end only the last few hundred tokens weigh: the rest is below what a float64 holds beside them.
    passes = [(needed[t : t + 1], predicted[t : t + 1]) for t in range(2000)]
    assert_equal(layer.rates(), defined(passes, 6, 5.0))


@pytest.mark.parametrize("half_life", [0, -1.0, float("nan")])
def test_a_half_life_must_be_above_0(half_life: float) -> None:
    with pytest.raises(ConfigError, match=r"half_life=.*: must be above 0 tokens"):
        LayerStatistics(4, half_life)
