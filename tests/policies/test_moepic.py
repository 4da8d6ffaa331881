"""Shares of whole tops, and what MoEpic's allocation makes of what it is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from expertly.core.messages import Prediction, RouterRan
from expertly.policies.moepic import (
    LayerProblem,
    LayerStatistics,
    MoEpic,
    MoEpicOptions,
    SplitExperts,
    SplitOptions,
    Timing,
)
from expertly.scheduler.budget import split_budget
from expertly.scheduler.systems import get_system
from tests.scheduler.drive import geometry, one_token, run_layer

SHAPE = geometry(layers=3, experts=8, top_k=2, segments=4)
TIMES = Timing([2] * 3, [40] * 3, [40] * 3, [100] * 3, 40)


# -- split ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theta", "segments", "top"),
    [
        *((0.5, 4, 2), (0.25, 4, 1), (0.6, 4, 2), (0.7, 4, 3), (0.01, 4, 1), (0.99, 4, 4), (0.5, 3, 1), (0.5, 1, 1)),
        *((0.4, 5, 2), (0.4, 8, 3)),  # the paper's best
    ],
)
def test_theta_is_the_nearest_number_of_segments(theta: float, segments: int, top: int) -> None:
    shape = geometry(layers=2, experts=8, segments=segments, width=120)
    tops = SplitExperts(shape, SplitOptions(theta)).tops([top, top])
    assert tops == (None if top == segments else [top, top])


def test_shares_are_whole_tops_and_the_rest_goes_to_the_lowest_layer() -> None:
    """Of 3 segments each: 20 are six tops, two a layer, and two segments over; 25 are eight and one over."""
    split = SplitExperts(SHAPE, SplitOptions(0.75))
    assert split.quotas([20]) == [8, 6, 6]
    assert split.quotas([25]) == [10, 9, 6]
    assert split.tops([10, 9, 6]) == [3, 3, 3]


# -- moepic --------------------------------------------------------------------------------------------------------


def begun(tau: int = 3, kept: int = 49, **options: Any) -> MoEpic:
    allocation = MoEpic(SHAPE, MoEpicOptions(tau=tau, **options))
    allocation.begin(allocation.quotas([kept]))
    return allocation


def tell(allocation: MoEpic, token: int) -> list[int] | None:
    """A token; the quotas to take from now on, which come with its last layer."""
    quotas = None
    for layer in range(3):
        assert quotas is None, "only between passes"
        experts = [token % 8, (token + layer + 1) % 8]
        if layer:
            allocation.predicted(Prediction(layer, experts[::-1], [0.9, 0.1], 1))
        quotas = allocation.ran(one_token(layer, experts), lambda layer: 0.0)
    return quotas


def taken(allocation: MoEpic) -> tuple[int, list[int]]:
    """After how many tokens what is due is worked out, and its quotas."""
    assert allocation.is_due
    allocation.configure(TIMES)
    for token in range(200):
        assert not allocation.is_due
        if (quotas := tell(allocation, token)) is not None:
            return token + 1, quotas
    raise AssertionError("it never ends")


def test_it_is_due_after_every_tau_tokens() -> None:
    allocation = begun(tau=5)
    assert allocation.tops(allocation.quotas([49])) == [2, 2, 2], "it begins with halves"
    for token in range(5):
        assert not allocation.is_due and tell(allocation, token) is None
    num_tokens, quotas = taken(allocation)
    assert sum(quotas) <= 49 and allocation.tops(quotas) == allocation._tops
    for token in range(5 - num_tokens):
        assert not allocation.is_due and tell(allocation, token) is None
    assert allocation.is_due
    assert allocation.facts() == {"learned": "online, from 10 decoded tokens", "configurations": 1}


def test_configuring_is_spread_over_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer splits all layers more than twice; 24 layers of 32 experts are worked out within 40 tokens."""
    shape = geometry(layers=24, experts=32, top_k=4, segments=4)
    allocation = MoEpic(shape, MoEpicOptions(tau=20))
    allocation.begin(allocation.quotas([24 * 32]))
    dice, times, quotas, num_tokens = (
        np.random.default_rng(0),
        Timing([4] * 24, [40] * 24, [40] * 24, [30] * 24, 40),
        None,
        0,
    )
    best, calls, most = LayerProblem.best, list[int](), 0
    monkeypatch.setattr(LayerProblem, "best", lambda *args: (calls.append(1), best(*args))[1])
    while quotas is None:
        if allocation.is_due:
            allocation.configure(times)
        for layer in range(24):
            experts = np.argsort(dice.gumbel(size=32) - 0.1 * np.arange(32) * (layer % 5))[-4:].tolist()
            allocation.predicted(Prediction(layer, experts[::-1], [0.4, 0.3, 0.2, 0.1], 1))
            calls.clear()
            quotas = allocation.ran(one_token(layer, experts), lambda layer: 0.0)
            most = max(most, len(calls))
        num_tokens += 1
    assert 24 <= most <= 48 and 20 < num_tokens <= 60


def test_new_quotas_load_the_best_of_a_layer_that_grows() -> None:
    """Layer 0 has room for two more tops: the experts of highest cache priority that it does not keep come, each when
    nothing else is in flight, and stay.
    """
    system = get_system("moepic:tau=9")
    control = system.scheduler(SHAPE, split_budget(SHAPE, SHAPE.nbytes // 2, 8))
    for token in range(8):
        run_layer(control, 0, [token, (token + 1) % 8])
    assert isinstance(control.allocation, MoEpic)
    best = control.allocation.best_of(0)
    kept = control.cache.kept_of
    lacking = [expert for expert in best if not kept(expert)][:2]
    top = control.cache.tops[0]
    quotas = list(control.cache.quotas)
    quotas[1] -= 2 * top
    quotas[0] += 2 * top
    control.cache.resize(quotas, [top] * 3)
    control.fill_quotas()
    assert control.prefetch() == [], "not before it has the room"
    control.cache.rearrange(set())
    for expert in lacking:
        spans = control.prefetch()
        assert {(span.layer, span.expert) for span in spans} == {(0, expert)} and len(spans) == top
        for span in spans:
            assert control.prefetch() == [] and not control.loaded(span)
        assert list(kept(expert)) == list(control.cache.units(expert)[:top])
        control.check()
    assert control.prefetch() == [], "it is full"


def test_what_is_seen_are_tokens_with_what_was_predicted_of_them_in_time() -> None:
    """The rates are those of statistics that are told the same: a layer without a prediction, one with, a prompt (left
    out), a batch (one row with all that it needs), a part of a layer that needs nothing.
    """
    allocation, expected = begun(tau=9), LayerStatistics(8)
    for demand, prediction in (
        (one_token(1, [3, 5]), None),
        (one_token(1, [3, 4]), Prediction(1, [3, 5], [0.1, 0.05], 1)),
        (RouterRan(1, [6, 7], [2, 1], [False, False], 2), Prediction(1, [6], [0.5], 1)),
        (one_token(1, [1, 2]), None),
        (RouterRan(1, [1, 2, 4], [1, 2, 0], [True, True, True], 2), None),
        (RouterRan(1, [], [], [], 1, True), None),
    ):
        if prediction is not None:
            allocation.predicted(prediction)
        allocation.ran(demand, lambda layer: 0.0)
        if demand.serves_decode:
            needed = [e for e, num in zip(demand.experts, demand.num_tokens, strict=True) if num]
            expected.note(needed, prediction and prediction.experts)
    rates = allocation._seen[1].rates()
    for mine, theirs in zip(rates, expected.rates(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert rates.accuracy[0] == 1.0 and rates.accuracy[1] == 0.0
