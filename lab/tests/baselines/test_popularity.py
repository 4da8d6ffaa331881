"""Predictors that count what was chosen."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Began, History, Routed
from expertly.policies.known import Known
from expertly.policies.prediction import Predictor
from expertly.policies.registry import PREDICTORS
from tests.scheduler.drive import geometry

SHAPE = geometry(layers=4, experts=6, top_k=2)


def predictor(name: str, distance: int = 1, known: Known | None = None, **options: str) -> Predictor:
    return PREDICTORS[name].make(SHAPE, known or Known(), distance, options)


def began(*requests: int) -> Began:
    return Began(np.array(requests, np.int64), np.zeros(len(requests), np.bool_))


def chose(layer: int, *rows: list[int]) -> Routed:
    union = list(dict.fromkeys(expert for row in rows for expert in row))
    router = RouterRan(layer, union, [1] * len(union), [True] * len(union), len(rows))
    return Routed(router, np.array(rows, np.int16))


def said(predictions: Iterable[Prediction]) -> dict[tuple[int, int], list[int]]:
    """(layer, distance) -> experts."""
    return {(prediction.layer, prediction.distance): prediction.experts for prediction in predictions}


# -- popularity ------------------------------------------------------------------------------------------------


def test_popularity_of_a_training_part_stays() -> None:
    """Experts by their id: layer 0 has 0 to 5, layer 1 has 6 to 11."""
    popular = predictor("popularity", distance=2, known=Known(popularity={2: 30, 5: 10, 7: 1, 8: 3}))
    assert said(popular.begin_iteration(began(0))) == {(0, 1): [2, 5], (1, 2): [2, 1]}
    for _ in range(50):
        list(popular.router_ran(chose(0, [0, 1])))
    (first, second) = popular.begin_iteration(began(1))
    assert first.experts == [2, 5] and first.scores == [0.75, 0.25]
    assert second.probabilities == [0, 0.25, 0.75, 0, 0, 0]


@pytest.mark.parametrize("name", ["popularity", "counts"])
def test_what_is_learned_is_a_training_part(name: str) -> None:
    chosen = np.array([[[0, 1], [2, 3], [4, 5], [0, 1]], [[0, 2], [2, 1], [5, 3], [1, 9]]], np.uint16)  # [T, L, K]
    scores = np.full((2, 4, 6), 1 / 6, np.float32)
    history = History(np.zeros(2, np.int64), np.zeros(2, np.bool_), chosen, scores)
    each = predictor(name, distance=3)
    each.learn(history)
    assert said(each.begin_iteration(began(7))) == {(0, 1): [0, 1], (1, 2): [2, 1], (2, 3): [5, 3]}
    known = predictor(name, distance=3, known=Known(popularity={3: 1}))
    known.learn(history)  # the same rows as the counts that it was given
    assert said(known.begin_iteration(began(7))) == {(0, 1): [3]}


# -- counts ----------------------------------------------------------------------------------------------------


def test_a_batch_is_all_of_its_requests_each_with_its_own() -> None:
    """Request 1 has two rows, a prompt; request 2 one row between them."""
    counts = predictor("counts")
    list(counts.begin_iteration(began(1, 2, 1)))
    list(counts.router_ran(chose(0, [3, 4], [0, 1], [3, 5])))
    (prediction,) = counts.begin_iteration(began(2, 1))
    assert prediction.experts == [0, 1, 3, 4]
    assert prediction.scores == pytest.approx([1 / 2, 1 / 2, 1 / 2, 1 / 4])
    assert prediction.probabilities == pytest.approx([1 / 2, 1 / 2, 0, 1 / 2, 1 / 4, 1 / 4])
    (alone,) = counts.begin_iteration(began(2))
    assert alone.experts == [0, 1]


def test_rows_of_which_it_is_not_known_whose_they_are_are_no_requests() -> None:
    counts = predictor("counts")
    list(counts.begin_iteration(began(1)))
    list(counts.router_ran(chose(0, [3, 4])))
    list(counts.router_ran(chose(0, [0, 1], [0, 2])))  # its pass began unseen
    assert said(counts.begin_iteration(began(1))) == {(0, 1): [3, 4]}
    assert said(counts.begin_iteration(began(2))) == {(0, 1): [0, 1]}, "but they are popular"
