"""Predictors that go by what they are shown."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Began, History, Routed
from expertly.policies.known import Known
from expertly.policies.predictor import PREDICTORS
from expertly.policies.predictor.base import Predictor
from tests.scheduler.drive import geometry

SHAPE = geometry(layers=4, experts=6, top_k=2)


def predictor(name: str, distance: int = 1, known: Known | None = None, **options: str) -> Predictor:
    return PREDICTORS[name].make(SHAPE, known or Known(), distance, options)


def began(*requests: int) -> Began:
    return Began(np.array(requests, np.int64), np.zeros(len(requests), np.bool_))


def chose(layer: int, *rows: list[int]) -> Routed:
    experts = np.array(rows, np.int16)
    union = list(dict.fromkeys(e for row in rows for e in row))
    return Routed(RouterRan(layer, union, [1] * len(union), [True] * len(union), len(rows)), experts)


def said(predictions: Iterable[Prediction]) -> dict[tuple[int, int], list[int]]:
    """(layer, distance) -> experts."""
    return {(p.layer, p.distance): p.experts for p in predictions}


# -- lookahead -------------------------------------------------------------------------------------------------


def looks(layer: int, *rows: list[list[float]]) -> Routed:
    return Routed(RouterRan(layer, [0], [1], [True], len(rows)), lookahead=np.array(rows, np.float32))


NEXT, SECOND, THIRD = [0.1, 0.5, 0.4, 0, 0, 0], [0.6, 0, 0, 0.4, 0, 0], [0, 0, 0, 0, 0.3, 0.7]


def test_lookahead_looks_as_far_as_it_is_shown() -> None:
    ahead = predictor("lookahead", distance=3)
    assert said(ahead.router_ran(looks(0, [NEXT]))) == {(1, 1): [1, 2]}
    assert said(ahead.router_ran(looks(1, [NEXT]))) == {(2, 1): [1, 2]}
    assert ahead.work.num_calls == 2 and ahead.work.read_nbytes == 2 * 6 * 4


def test_a_request_goes_on_from_its_last_row() -> None:
    """A prompt of three tokens and two requests that decode: what the prompt's first tokens say is over."""
    ahead = predictor("lookahead", next_token="yes")
    rows = [[NEXT], [THIRD], [[0, 0, 0, 1.0, 0, 0]], [SECOND], [NEXT]]
    list(ahead.begin_iteration(began(7, 7, 4, 7, 4)))
    (inside,) = ahead.router_ran(looks(2, *rows))
    assert (inside.layer, inside.experts) == (3, [3, 5, 0, 1, 2, 4][: len(inside.experts)]), "of all rows"
    (after,) = ahead.router_ran(looks(3, *rows))
    assert (after.layer, after.distance, after.experts) == (0, 1, [0, 1, 2, 3]), "SECOND and NEXT"
    assert after.probabilities == pytest.approx([0.6, 0.5, 0.4, 0.4, 0, 0])
    assert said(ahead.router_ran(looks(3, *rows[:2]))) == {}, "of rows that nobody announced"
    assert said(ahead.router_ran(looks(3, [THIRD]))) == {(0, 1): [5, 4]}, "a single one is the last"


def test_lookahead_goes_round_the_stack_that_runs() -> None:
    """Layers 2 and 3 are a decoder: its last layer leads to its first. An encoder shows nothing past its last."""
    ahead = predictor("lookahead", distance=3, next_token="yes")
    decoder = Began(np.zeros(1, np.int64), np.zeros(1, np.bool_), layers=range(2, 4))
    list(ahead.begin_iteration(decoder))
    assert said(ahead.router_ran(looks(2, [NEXT, [0] * 6, [0] * 6]))) == {(3, 1): [1, 2]}
    assert said(ahead.router_ran(looks(3, [THIRD, [0] * 6, [0] * 6]))) == {(2, 1): [5, 4]}
    assert said(ahead.router_ran(looks(1, [NEXT]))) == {}, "no part of it"


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
    one = predictor(name, distance=3)
    one.learn(history)
    assert said(one.begin_iteration(began(7))) == {(0, 1): [0, 1], (1, 2): [2, 1], (2, 3): [5, 3]}
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
