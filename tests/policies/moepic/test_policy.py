"""Shares of whole tops, and what MoEpic's allocation makes of what it is told."""

from __future__ import annotations

import numpy as np
import pytest

from expertly.core.messages import Prediction, RouterRan
from expertly.policies.allocation.moepic import (
    LayerStatistics,
    MoEpic,
    MoEpicOptions,
    SplitExperts,
    SplitOptions,
    Timing,
)
from expertly.scheduler.budget import split_budget
from tests.scheduler.drive import geometry, one_token

SHAPE = geometry(layers=3, experts=8, top_k=2, segments=4)
TIMES = Timing.of(SHAPE, 40, 40, 100, 40)


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


def begun(tau: int = 3, share: float = 0.6) -> MoEpic:
    allocation = MoEpic(SHAPE, MoEpicOptions(tau=tau, start="half"))
    allocation.begin(allocation.quotas(split_budget(SHAPE, int(SHAPE.nbytes * share)).kept_slots))
    return allocation


def tell(allocation: MoEpic, token: int) -> None:
    for layer in range(3):
        experts = [token % 8, (token + layer + 1) % 8]
        if layer:
            allocation.predicted(Prediction(layer, experts[::-1], [0.9, 0.1], 1))
        assert allocation.ran(one_token(layer, experts), lambda layer: 0.0) is None


def test_it_is_due_after_tau_tokens_once_and_then_after_as_many_more() -> None:
    allocation = begun()
    assert allocation.tops(allocation.quotas([49])) == [2, 2, 2], "it begins with halves"
    for token in range(3):
        assert allocation.due() is None
        tell(allocation, token)
    job = allocation.due()
    assert job is not None and allocation.due() is None, "it is being worked out"
    for token in range(9):
        tell(allocation, token)
        assert allocation.due() is None
    plan = job(TIMES).plan
    assert sum(layer.budget_segments for layer in plan.layers) == 49, "all that there is to keep"
    allocation.configured(plan)
    for token in range(3):
        assert allocation.due() is None
        tell(allocation, token)
    assert allocation.due() is not None
    assert allocation.facts() == {"learned": "online, from 15 decoded tokens", "configurations": 1}


@pytest.mark.parametrize(("tau", "due_at"), [(700, [0, 64, 256, 956]), (100, [0, 64, 164]), (64, [0, 64, 128])])
def test_the_first_configurations_come_early(tau: int, due_at: list[int]) -> None:
    """By times alone before anything has run, then after 64 and 256 tokens, then after every tau."""
    allocation, found = MoEpic(SHAPE, MoEpicOptions(tau=tau)), []
    allocation.begin(allocation.quotas([49]))
    for token in range(due_at[-1] + 1):
        if (job := allocation.due()) is not None:
            found.append(token)
            allocation.configured(job(TIMES).plan)
        tell(allocation, token)
    assert found == due_at


def test_before_anything_is_known_whole_experts_are_kept_where_spans_cost_much() -> None:
    """And the paper's halves where they cost nothing, or nobody is to count that."""
    kept = {}
    for name, options, timing in (
        ("free", MoEpicOptions(), TIMES),
        ("dear", MoEpicOptions(), Timing.of(SHAPE, 40, 40, 100, 40, span_ns=1000)),
        ("not counted", MoEpicOptions(pieces=False), Timing.of(SHAPE, 40, 40, 100, 40, span_ns=1000)),
    ):
        allocation = MoEpic(SHAPE, options)
        allocation.begin(allocation.quotas([49]))
        job = allocation.due()
        assert job is not None
        plan = job(timing).plan
        kept[name] = [(layer.kept_experts, layer.kept_segments) for layer in plan.layers]
        assert sum(layer.budget_segments for layer in plan.layers) == 49
        plan.check_fits(SHAPE)
    assert kept == {"free": [(8, 2)] * 3, "dear": [(4, 4)] * 3, "not counted": [(8, 2)] * 3}


def test_what_is_seen_are_tokens_with_what_was_predicted_of_them_in_time() -> None:
    """The rates are those of statistics that are told the same: a layer without a prediction, one with, a prompt (left
    out), a batch (one row with all that it needs), a part of a layer that needs nothing.
    """
    allocation, expected = begun(tau=9), LayerStatistics(8, 9)
    first = np.array([[0, 0, 0, 2, 0, 1, 0, 0]], np.float32)
    for demand, prediction, scores in (
        (one_token(1, [3, 5]), None, None),
        (one_token(1, [3, 4]), Prediction(1, [3, 5], [0.1, 0.05], 1), first),
        (RouterRan(1, [6, 7], [2, 1], [False, False], 2), Prediction(1, [6], [0.5], 1), None),
        (one_token(1, [1, 2]), None, None),
        (RouterRan(1, [1, 2, 4], [1, 2, 0], [True, True, True], 2), None, None),
        (RouterRan(1, [], [], [], 1, True), None, None),
    ):
        if prediction is not None:
            allocation.predicted(prediction)
        allocation.ran(demand, lambda layer: 0.0)
        if demand.serves_decode:
            needed = [e for e, num in zip(demand.experts, demand.num_tokens, strict=True) if num]
            expected.observe(np.array([needed or [-1]]), scores)
    mine, theirs = allocation._seen[1].rates(), expected.rates()
    np.testing.assert_array_equal(mine.hits, theirs.hits)
    np.testing.assert_array_equal(mine.accuracy, theirs.accuracy)
    np.testing.assert_array_equal(mine.predicted_hits, theirs.predicted_hits)
    assert theirs.accuracy[0] == 1.0 and theirs.accuracy[1] == 0.0
