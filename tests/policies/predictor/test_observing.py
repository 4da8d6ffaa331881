"""Predictors that go by what they are shown."""

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


def test_the_width_is_a_choice_and_what_is_impossible_is_not_named() -> None:
    (wide,) = predictor("lookahead", width="5").router_ran(looks(0, [NEXT]))
    assert wide.experts == [1, 2, 0]
    (narrow,) = predictor("lookahead", width="1").router_ran(looks(0, [NEXT]))
    assert narrow.experts == [1]


def test_lookahead_knows_how_many_experts_each_layer_has() -> None:
    small, large = LayerGeometry(3, 1, 4, 16, 3, 2), LayerGeometry(6, 2, 4, 16, 3, 2)
    ahead = PREDICTORS["lookahead"].make(Geometry((large, small)), Known(), 1)
    (prediction,) = ahead.router_ran(looks(0, [[0.2, 0.5, 0.3, 0, 0, 0]]))
    assert prediction.experts == [1] and prediction.probabilities == pytest.approx([0.2, 0.5, 0.3])


def test_lookahead_past_the_last_layer_is_of_the_next_token() -> None:
    ahead = predictor("lookahead", distance=2, next_token="yes")
    assert list(ahead.begin_iteration(began(0))) == []
    assert said(ahead.router_ran(looks(1, [NEXT, SECOND, THIRD]))) == {(3, 2): [0, 3]}
    assert said(ahead.router_ran(looks(2, [NEXT, SECOND, THIRD]))) == {(0, 2): [0, 3]}
    assert said(ahead.router_ran(looks(3, [NEXT, SECOND, THIRD]))) == {(1, 2): [0, 3]}
    assert said(ahead.router_ran(looks(0, [NEXT, SECOND, THIRD]))) == {(1, 1): [1, 2], (2, 2): [0, 3]}, "anew"
    assert said(ahead.router_ran(looks(2, [NEXT, [0] * 6]))) == {}, "nothing is known of it: an older trace"


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


def test_speculative_names_all_experts_in_the_order_of_their_scores() -> None:
    ahead = predictor("speculative")
    (prediction,) = ahead.router_ran(looks(1, [[0.1, 0.3, 0.25, 0.2, 0.15, 0]]))
    assert prediction.experts == [1, 2, 3, 4, 0] and prediction.layer == 2
    assert prediction.probabilities == pytest.approx([0.1, 0.3, 0.25, 0.2, 0.15, 0])
    assert said(ahead.router_ran(looks(3, [NEXT]))) == {(0, 1): [1, 2, 0]}, "the first layer, too"
    assert said(predictor("speculative", width="2").router_ran(looks(1, [NEXT]))) == {(2, 1): [1, 2]}
    assert said(predictor("speculative", next_token="no").router_ran(looks(3, [NEXT]))) == {}
    (both,) = ahead.router_ran(looks(0, [NEXT], [THIRD]))
    assert both.experts == [5, 1, 2, 4, 0], "the highest of either row first"


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


# -- random --------------------------------------------------------------------------------------------------------


def test_random_names_as_many_experts_as_a_layer_chooses_whatever_it_sees() -> None:
    one, other = predictor("random"), predictor("random")
    seen: set[int] = set()
    for _ in range(40):
        told = [*one.begin_iteration(began(0)), *one.router_ran(chose(0, [1, 2]))]
        assert [(p.layer, p.distance) for p in told] == [(0, 1), (1, 1)] and {len(p.experts) for p in told} == {2}
        assert all(p.probabilities is None and p.scores == sorted(p.scores, reverse=True) for p in told)
        again = [*other.begin_iteration(began(0)), *other.router_ran(chose(0, [4, 5]))]
        assert [p.experts for p in again] == [p.experts for p in told], "the same seed, whatever is asked for"
        seen.update(expert for p in told for expert in p.experts)
    assert seen == set(range(6))
    assert list(one.router_ran(chose(3, [0, 1]))) == [], "nothing is past the last layer"
    assert [p.experts for p in predictor("random", known=Known(seed=1)).begin_iteration(began(0))] != told
    (wide,) = predictor("random", width="5").begin_iteration(began(0))
    assert len(set(wide.experts)) == 5
