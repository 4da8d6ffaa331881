"""Lookahead, request counts and popularity, as stories: what was seen, what is said then."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Began, History, Routed
from expertly.policies.known import Known
from expertly.policies.predictor import PREDICTORS
from expertly.policies.predictor.base import Predictor
from tests.control.drive import geometry

SHAPE = geometry(layers=4, experts=6, top_k=2)


def predictor(name: str, distance: int = 1, known: Known | None = None, **options: str) -> Predictor:
    return PREDICTORS[name](SHAPE, known or Known(), distance, options)


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


def test_lookahead_says_what_the_later_routers_say() -> None:
    ahead = predictor("lookahead", distance=2)
    assert list(ahead.begin_iteration(began(0))) == []
    first = list(ahead.router_ran(looks(0, [NEXT, SECOND, THIRD])))
    assert said(first) == {(1, 1): [1, 2], (2, 2): [0, 3]}, "after the first layer, all up to the distance"
    assert first[0].scores == pytest.approx([0.5, 0.4]) and first[0].probabilities == pytest.approx(NEXT)
    assert said(ahead.router_ran(looks(1, [NEXT, SECOND, THIRD]))) == {(3, 2): [0, 3]}
    assert said(ahead.router_ran(looks(2, [NEXT, SECOND, THIRD]))) == {}, "nothing is past the last layer"


def test_lookahead_looks_as_far_as_it_is_shown() -> None:
    ahead = predictor("lookahead", distance=3)
    assert said(ahead.router_ran(looks(0, [NEXT]))) == {(1, 1): [1, 2]}
    assert said(ahead.router_ran(looks(1, [NEXT]))) == {(2, 1): [1, 2]}
    assert ahead.work.num_calls == 2 and ahead.work.read_nbytes == 2 * 6 * 4


def test_lookahead_of_many_rows_is_all_of_theirs() -> None:
    (prediction,) = predictor("lookahead").router_ran(looks(0, [NEXT], [[0, 0.3, 0, 0.7, 0, 0]]))
    assert prediction.experts == [3, 1, 2]
    assert prediction.scores == pytest.approx([0.7, 0.5, 0.4])


def test_the_width_is_a_choice_and_what_is_impossible_is_not_named() -> None:
    (wide,) = predictor("lookahead", width="5").router_ran(looks(0, [NEXT]))
    assert wide.experts == [1, 2, 0]
    (narrow,) = predictor("lookahead", width="1").router_ran(looks(0, [NEXT]))
    assert narrow.experts == [1]


def test_lookahead_knows_how_many_experts_each_layer_has() -> None:
    small, large = LayerGeometry(3, 1, 4, 16, 3, 2), LayerGeometry(6, 2, 4, 16, 3, 2)
    ahead = PREDICTORS["lookahead"](Geometry((large, small)), Known(), 1)
    (prediction,) = ahead.router_ran(looks(0, [[0.2, 0.5, 0.3, 0, 0, 0]]))
    assert prediction.experts == [1] and prediction.probabilities == pytest.approx([0.2, 0.5, 0.3])


# -- popularity ------------------------------------------------------------------------------------------------


def test_popularity_of_all_that_was_seen() -> None:
    popular = predictor("popularity", distance=2)
    assert said(popular.begin_iteration(began(0))) == {}, "nothing was seen"
    assert said(popular.router_ran(chose(0, [3, 4]))) == {}
    for layer in (1, 2, 3):
        assert said(popular.router_ran(chose(layer, [5, 1]))) == {}
    assert said(popular.begin_iteration(began(1))) == {(0, 1): [3, 4], (1, 2): [1, 5]}
    (prediction,) = popular.router_ran(chose(0, [4, 2]))
    assert (prediction.layer, prediction.distance, prediction.experts) == (2, 2, [1, 5])
    assert prediction.scores == [0.5, 0.5] and prediction.probabilities == [0, 0.5, 0, 0, 0, 0.5]
    assert said(popular.begin_iteration(began(2)))[0, 1] == [4, 2], "twice; once each, and 2 is before 3"


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


def test_a_request_asks_again_for_what_it_has_asked_for_most() -> None:
    counts = predictor("counts", distance=2)
    for experts in ([3, 4], [4, 5], [4, 3]):
        list(counts.begin_iteration(began(7)))
        for layer in range(4):
            list(counts.router_ran(chose(layer, experts)))
    at_begin = list(counts.begin_iteration(began(7)))
    assert said(at_begin) == {(0, 1): [4, 3], (1, 2): [4, 3]}
    assert at_begin[0].scores == pytest.approx([3 / 6, 2 / 6])
    assert at_begin[0].probabilities == pytest.approx([0, 0, 0, 2 / 6, 3 / 6, 1 / 6])
    assert said(counts.router_ran(chose(0, [0, 1]))) == {(2, 2): [4, 3]}
    assert said(counts.router_ran(chose(1, [0, 1]))) == {(3, 2): [4, 3]}
    assert said(counts.router_ran(chose(2, [0, 1]))) == {}


def test_a_new_request_has_what_is_popular_until_it_has_chosen() -> None:
    counts = predictor("counts", known=Known(popularity={2: 9, 5: 4, 0: 1}))
    assert said(counts.begin_iteration(began(1))) == {(0, 1): [2, 5]}
    list(counts.router_ran(chose(0, [3, 4])))
    assert said(counts.begin_iteration(began(1))) == {(0, 1): [3, 4]}
    assert said(counts.begin_iteration(began(2))) == {(0, 1): [2, 5]}


def test_without_a_training_part_what_others_have_asked_for_is_popular() -> None:
    counts = predictor("counts")
    assert said(counts.begin_iteration(began(1))) == {}
    list(counts.router_ran(chose(0, [3, 4])))
    assert said(counts.begin_iteration(began(2))) == {(0, 1): [3, 4]}


def test_a_request_that_was_left_out_is_forgotten() -> None:
    counts = predictor("counts")
    list(counts.begin_iteration(began(1)))
    list(counts.router_ran(chose(0, [5, 4])))
    for _ in range(3):
        list(counts.begin_iteration(began(2)))
        list(counts.router_ran(chose(0, [0, 1])))
    assert counts.facts() == {"requests": 1}
    assert said(counts.begin_iteration(began(1))) == {(0, 1): [0, 1]}, "as a new one: the popular"


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
