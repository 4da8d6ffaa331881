"""What every predictor promises, what each of them means, and how scores become a prediction."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import product
from typing import Any

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Began, Routed
from expertly.policies.known import Known
from expertly.policies.predictor import PREDICTORS
from expertly.policies.predictor.base import best_of_rows
from expertly.policies.predictor.oracle import ModelledLookahead, Perfect, accuracy_at
from expertly.testing import PREDICTOR_CHECKS, made_up
from expertly.testing.made_up import SHAPE, ListFuture, some_future
from expertly.testing.predictor import DISTANCES
from tests.scheduler.drive import geometry
from tests.tables import crossed
from tests.weights import random_weights


def known(shape: Geometry, future: ListFuture, seed: int = 0) -> Known:
    """All that a predictor may ask for."""
    return Known(future=future, seed=seed, given=(random_weights(shape.layers, seed=seed),))


def watched(name: str, distance: int, **settings: Any) -> tuple[ListFuture, list[tuple[int, Prediction]]]:
    """The future, and every prediction with the step at which it was made (-1: before the first)."""
    return made_up.watched(PREDICTORS[name], distance, known=known, **settings)


CHECKED = list(product(PREDICTORS, PREDICTOR_CHECKS))


@pytest.mark.parametrize(
    ("name", "check", "distance"),
    dict.fromkeys(
        (*one, distance)
        for start in (0, 2)
        for one, distance in crossed(CHECKED, [*DISTANCES[start:], *DISTANCES[:start]])
    ),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_conformance(name: str, check: Any, distance: int) -> None:
    """A new predictor inherits these by being in PREDICTORS; each at two of the distances in turn."""
    check(PREDICTORS[name], distance, known)


@pytest.mark.parametrize("name", [name for name, one in PREDICTORS.items() if one.gives_probabilities])
def test_of_one_row_scores_are_probabilities(name: str) -> None:
    if name != "eam":  # which weighs them by the layers to go
        for _, prediction in watched(name, 2)[1]:
            assert prediction.probabilities is not None
            assert prediction.scores == [prediction.probabilities[expert] for expert in prediction.experts]


@pytest.mark.parametrize("name", PREDICTORS)
def test_its_arrays_are_checked(name: str) -> None:
    one = PREDICTORS[name]
    with pytest.raises(ConfigError, match=f"prediction='{name}': option 'colour': unknown"):
        one.make(SHAPE, Known(future=some_future(SHAPE, 1)), 1, {"colour": "red"})
    if "future" in one.needs:
        with pytest.raises(ConfigError, match=f"prediction '{name}'.*only a simulation"):
            one.make(SHAPE, Known(), 1)
        return
    with pytest.raises(ConfigError, match="distance=0: must be at least 1"):
        one.make(SHAPE, Known(), 0)
    if one.weights:
        with pytest.raises(ConfigError, match=r"no weights.*expertly lab train"):
            one.make(SHAPE, Known(), 1)
    else:
        one.make(SHAPE, Known(), 1)


@pytest.mark.parametrize(("distance", "reach"), [(1, 1), (3, 3), (5, 5), (6, 5), (1 << 30, 5)])
def test_perfect_names_every_demand_in_reach_once_as_soon_as_it_is(distance: int, reach: int) -> None:
    future, made = watched("perfect", distance, iterations=4)
    targets = [step + prediction.distance for step, prediction in made]
    assert targets == list(range(1, len(future.demands))), "all but the first, in order"
    for step, prediction in made:
        target = step + prediction.distance
        assert prediction.experts == future.demands[target][1]
        assert step == max(0, target - reach)


def test_perfect_says_again_what_it_had_not_said_when_steps_are_skipped() -> None:
    """An iteration that failed half-way: the next steps in reach are named, the past ones are not."""
    future = some_future(SHAPE, 3)
    predictor = Perfect.make(SHAPE, Known(future=future), 2)
    router = RouterRan(0, [0], [1], [True], 1)
    assert [p.distance for p in predictor.router_ran(Routed(router))] == [1, 2]
    future.step = 7
    assert [(p.layer, p.distance) for p in predictor.router_ran(Routed(router))] == [(2, 1), (3, 2)]


@pytest.mark.parametrize(("distance", "options"), [(2, {}), (5, {}), (2, {"accuracy": "0.6"})])
def test_the_modelled_lookahead_is_as_right_as_it_says_and_wrong_in_any_way(
    distance: int, options: dict[str, str]
) -> None:
    """Within five standard errors, at every distance; after the first layer it fills the layers up to its own. Wrong
    ones are spread over all others.
    """
    future = some_future(SHAPE, 1500)
    predictor = ModelledLookahead.make(SHAPE, Known(future=future), distance, options)
    right, total, wrong = defaultdict(int), defaultdict(int), defaultdict(int)
    for step, (running, experts) in enumerate(future.demands):
        future.step = step
        for prediction in predictor.router_ran(Routed(RouterRan(running, experts, [1] * 3, [True] * 3, 1))):
            layer, needed = future.demands[step + prediction.distance]
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
    future = ListFuture(geometry(2, 3, 3), [(0, [0, 1, 2]), (1, [2, 0, 1])])
    predictor = ModelledLookahead.make(geometry(layers=2, experts=3, top_k=1), Known(future=future), 1)
    (prediction,) = predictor.router_ran(Routed(RouterRan(0, [0], [1], [True], 1)))
    assert prediction.experts == [2, 0, 1]


def naively(scores: np.ndarray, width: int) -> list[tuple[int, float]]:
    """(expert, score), in words: of each row the best, ties to the lowest id, none of 0; the highest of each expert."""
    best: dict[int, float] = {}
    for row in scores.tolist():
        for expert in sorted(range(len(row)), key=lambda e: (-row[e], e))[:width]:
            if row[expert] > 0:
                best[expert] = max(best.get(expert, 0.0), row[expert])
    return sorted(best.items(), key=lambda one: (-one[1], one[0]))


@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (1, 3), (1, 99), (2, 3), (9, 1), (9, 8), (9, 99)])
def test_it_is_the_union_of_every_rows_best(num_rows: int, width: int) -> None:
    dice = random.Random(f"{num_rows} {width}")
    for _ in range(100):
        values = dice.choice([[0.0, 0.25, 0.5], [dice.random() for _ in range(20)]])  # many ties, or few
        scores = np.array([[dice.choice(values) for _ in range(8)] for _ in range(num_rows)], np.float32)
        expected = naively(scores, width)
        prediction = best_of_rows(2, 3, scores, width)
        if not expected:
            assert prediction is None
            continue
        assert prediction is not None and (prediction.layer, prediction.distance) == (2, 3)
        assert list(zip(prediction.experts, prediction.scores, strict=True)) == expected
        assert prediction.probabilities == scores.max(axis=0).tolist()


@pytest.mark.parametrize(
    ("num_layers", "distance", "at_begin", "after"),
    [(6, 3, [0, 1, 2], {0: 3, 1: 4, 2: 5}), (4, 1 << 30, [0, 1, 2], {0: 3}), (1, 2, [0], {})],
)
def test_layers_are_predicted_so_far_ahead_and_the_first_when_a_pass_begins(
    num_layers: int, distance: int, at_begin: list[int], after: dict[int, int]
) -> None:
    index = PREDICTORS["index"].make(geometry(layers=num_layers), Known(), distance)
    began = Began(np.zeros(1, np.int64), np.zeros(1, np.bool_))
    assert [one.layer for one in index.begin_iteration(began)] == at_begin
    routers = [Routed(RouterRan(layer, [0], [1], [True], 1)) for layer in range(num_layers)]
    assert {routed.layer: one.layer for routed in routers for one in index.router_ran(routed)} == after
