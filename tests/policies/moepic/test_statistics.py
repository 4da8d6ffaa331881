"""H, P and PH against their definitions, token by token."""

from __future__ import annotations

import numpy as np
import pytest

from expertly.policies.moepic import LayerRates, LayerStatistics
from tests.policies.moepic.builders import learn, routing

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
    """Also where some tokens had no prediction, and rates are read in between."""
    needed, predicted = routing(experts, tokens, experts, top_k, noise=1.0)
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


def test_experts_that_a_prediction_does_not_name_come_last() -> None:
    short, long = LayerStatistics(5), LayerStatistics(5)
    for needed, named in (([0, 3], [3]), ([4], [4, 1])):
        short.note(needed, named)
        long.note(needed, [*named, *(expert for expert in range(5) if expert not in named)])
    assert_equal(short.rates(), long.rates())
