"""Predictors from the demands to come, and those of other authors; what each of them promises."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from expertly.core.messages import RouterRan
from expertly.core.observation import Began, Routed
from expertly.policies.known import Known
from expertly.policies.registry import EVICTIONS, PREDICTORS
from expertly.testing import check_eviction, check_predictor
from expertly.testing.made_up import SHAPE, Demands, some_demands, watched
from expertly_lab.baselines.modelled import ModelledLookahead, accuracy_at
from expertly_lab.baselines.oracle import Perfect
from lab.tests.baselines.futures import AnyFuture, ListFuture, known
from tests.scheduler.drive import geometry


@pytest.mark.parametrize("name", sorted(PREDICTORS.keys() - PREDICTORS.built_in.keys()))
def test_predictors_keep_their_promises(name: str) -> None:
    check_predictor(PREDICTORS[name], known, distances=(2, 1 << 30))


@pytest.mark.parametrize("name", sorted(EVICTIONS.keys() - EVICTIONS.built_in.keys()))
def test_evictions_keep_their_promises(name: str) -> None:
    check_eviction(EVICTIONS[name], Known(future=AnyFuture()))


@pytest.mark.parametrize(("distance", "reach"), [(1, 1), (3, 3), (5, 5), (6, 5), (1 << 30, 5)])
def test_perfect_names_every_demand_in_reach_once_as_soon_as_it_is(distance: int, reach: int) -> None:
    demands, made = watched(Perfect, distance, known=known, iterations=4)
    targets = [step + prediction.distance for step, prediction in made]
    assert targets == list(range(1, len(demands.steps))), "all but the first, in order"
    for step, prediction in made:
        target = step + prediction.distance
        assert prediction.experts == demands.steps[target][1]
        assert step == max(0, target - reach)


def test_perfect_says_again_what_it_had_not_said_when_steps_are_skipped() -> None:
    """An iteration that failed half-way: the next steps in reach are named, the past ones are not."""
    demands = some_demands(SHAPE, 3)
    predictor = Perfect.make(SHAPE, known(SHAPE, demands), 2)
    router = RouterRan(0, [0], [1], [True], 1)
    assert [p.distance for p in predictor.router_ran(Routed(router))] == [1, 2]
    demands.step = 7
    assert [(p.layer, p.distance) for p in predictor.router_ran(Routed(router))] == [(2, 1), (3, 2)]


@pytest.mark.parametrize(("distance", "options"), [(2, {}), (5, {}), (2, {"accuracy": "0.6"})])
def test_the_modelled_lookahead_is_as_right_as_it_says_and_wrong_in_any_way(
    distance: int, options: dict[str, str]
) -> None:
    """Within five standard errors, at every distance; after the first layer it fills the layers up to its own. Wrong
    ones are spread over all others.
    """
    demands = some_demands(SHAPE, 1500)
    predictor = ModelledLookahead.make(SHAPE, known(SHAPE, demands), distance, options)
    right, total, wrong = defaultdict(int), defaultdict(int), defaultdict(int)
    for step, (running, experts) in enumerate(demands.steps):
        demands.step = step
        for prediction in predictor.router_ran(Routed(RouterRan(running, experts, [1] * 3, [True] * 3, 1))):
            layer, needed = demands.steps[step + prediction.distance]
            assert prediction.layer == layer > running, "within the iteration"
            assert prediction.distance == distance or running == 0
            total[prediction.distance] += len(prediction.experts)
            right[prediction.distance] += len(set(needed) & set(prediction.experts))
            for expert in set(prediction.experts) - set(needed):
                wrong[expert] += 1
    assert sorted(total) == list(range(1, distance + 1))
    for d, num in total.items():
        expected = float(options.get("accuracy", accuracy_at(d)))
        assert abs(right[d] / num - expected) < 5 * (expected * (1 - expected) / num) ** 0.5
    assert len(wrong) == 12 and max(wrong.values()) < 1.3 * min(wrong.values())


def test_a_layer_that_needs_everything_cannot_be_predicted_wrong() -> None:
    future = ListFuture(geometry(2, 3, 3), Demands([(0, [0, 1, 2]), (1, [2, 0, 1])]))
    predictor = ModelledLookahead.make(geometry(layers=2, experts=3, top_k=1), Known(future=future), 1)
    (prediction,) = predictor.router_ran(Routed(RouterRan(0, [0], [1], [True], 1)))
    assert prediction.experts == [2, 0, 1]


@pytest.mark.parametrize(
    ("num_layers", "distance", "at_begin", "after"),
    [(6, 3, [0, 1, 2], {0: 3, 1: 4, 2: 5}), (4, 1 << 30, [0, 1, 2], {0: 3}), (1, 2, [0], {})],
)
def test_layers_are_predicted_so_far_ahead_and_the_first_when_a_pass_begins(
    num_layers: int, distance: int, at_begin: list[int], after: dict[int, int]
) -> None:
    index = PREDICTORS["index"].make(geometry(layers=num_layers), Known(), distance)
    began = Began(np.zeros(1, np.int64), np.zeros(1, np.bool_))
    assert [each.layer for each in index.begin_iteration(began)] == at_begin
    routers = [Routed(RouterRan(layer, [0], [1], [True], 1)) for layer in range(num_layers)]
    assert {routed.layer: each.layer for routed in routers for each in index.router_ran(routed)} == after
