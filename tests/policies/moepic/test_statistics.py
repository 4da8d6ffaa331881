"""H, P and PH against their definitions, token by token."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest

from expertly.policies.allocation.moepic import LayerRates, LayerStatistics
from tests.policies.moepic.builders import learn, routing

RHO, OMEGA = 0.25, 128.0
Pass = tuple[np.ndarray, np.ndarray]


def defined(passes: list[Pass], experts: int, half_life: float | None) -> LayerRates:
    """Straight from section 3.4.2: priorities by equation 4 for each token, all counted with their final weight. A row
    of NaN: nothing was predicted.
    """
    count, last, now = [0] * experts, [0] * experts, 0
    num_tokens = sum(len(needed) for needed, _ in passes)
    hits, accuracy, joint = np.zeros(experts + 1), np.zeros(experts), np.zeros((experts, experts + 1))
    needed_weight = predicted_weight = 0.0
    for needed, predicted in passes:
        priority = [count[e] * RHO ** ((now - last[e]) / OMEGA) for e in range(experts)]
        ranked = sorted(range(experts), key=lambda e: (-priority[e], e))
        rank = {expert: place for place, expert in enumerate(ranked)}
        weight = 1.0 if half_life is None else 0.5 ** ((num_tokens - now) / half_life)
        for row, scores in zip(needed, predicted, strict=True):
            for expert in row:
                hits[rank[expert] + 1 :] += weight  # a cache of more experts than its rank holds it
            needed_weight += weight * len(row)
            if np.isnan(scores).all():
                continue
            predicted_weight += weight
            for y, expert in enumerate(sorted(range(experts), key=lambda e: (-scores[e], e))):
                accuracy[y] += weight * (expert in row)
                joint[y, rank[expert] + 1 :] += weight
        now += len(needed)
        for expert in needed.reshape(-1):
            count[expert] += 1
            last[expert] = now
    return LayerRates(hits / needed_weight, accuracy / (predicted_weight or 1), joint / (predicted_weight or 1))


def assert_equal(got: LayerRates, expected: LayerRates) -> None:
    np.testing.assert_allclose(got.hits, expected.hits, atol=1e-12)
    np.testing.assert_allclose(got.accuracy, expected.accuracy, atol=1e-12)
    np.testing.assert_allclose(got.predicted_hits, expected.predicted_hits, atol=1e-12)


@pytest.mark.parametrize("half_life", [None, 40.0])
@pytest.mark.parametrize(
    ("experts", "top_k", "rows"),
    [
        (5, 1, [1] * 140),
        (16, 4, [1] * 140),
        (300, 4, [1] * 70),  # ids that are no bytes
        (9, 3, [1, 4, 7, 1, 16] * 5),  # rows of a pass count each and find the ranks before it
    ],
)
def test_rates_are_as_defined(experts: int, top_k: int, rows: list[int], half_life: float | None) -> None:
    """Also where some tokens had no prediction, and rates are read in between."""
    needed, predicted = routing(experts, sum(rows), experts, top_k, noise=1.0)
    predicted[np.arange(len(predicted)) % 5 == 3] = np.nan
    layer, passes = LayerStatistics(experts, half_life), []
    for number, (begin, end) in enumerate(pairwise(accumulate([0, *rows]))):
        passes.append((needed[begin:end], predicted[begin:end]))
        layer.observe(*passes[-1], ~np.isnan(predicted[begin:end, 0]))
        if number in (7, 66):
            layer.rates()
    assert_equal(layer.rates(), defined(passes, experts, half_life))
    assert_equal(layer.rates(), layer.rates())
    assert layer.num_tokens == sum(rows)


def test_nothing_observed_is_all_0_and_rates_do_not_change_afterwards() -> None:
    layer = LayerStatistics(4)
    before = layer.rates()
    layer.observe(np.array([[1, 2]]), np.array([[0.1, 0.4, 0.3, 0.2]], np.float32))
    assert not before.hits.any() and not before.accuracy.any() and not before.predicted_hits.any()
    assert layer.rates().hits[-1] == 1


def test_ids_outside_the_layer_do_not_count() -> None:
    """Two needed where others need three: stored ids say so with -1, or the highest number of their type."""
    scores = np.array([[0.1, 0.2, 0.3, 0.35, 0.05]], np.float32)
    clean = LayerStatistics(5)
    clean.observe(np.array([[0, 3]]), scores)
    for ids in (np.array([[0, -1, 3]]), np.array([[0, 0xFFFF, 3]], np.uint16)):
        layer = LayerStatistics(5)
        layer.observe(ids, scores)
        assert_equal(layer.rates(), clean.rates())


def test_a_short_memory_stays_exact_for_ever() -> None:
    """The weights of 1500 tokens with a half-life of 5 span 2^300. At the end only the last few hundred tokens weigh:
    the rest is below what a float64 holds beside them.
    """
    needed, predicted = routing(2, 1500, 6, 2, noise=1.0)
    layer = LayerStatistics(6, half_life=5.0)
    learn(layer, needed, predicted)
    passes = [(needed[t : t + 1], predicted[t : t + 1]) for t in range(1500)]
    assert_equal(layer.rates(), defined(passes, 6, 5.0))
