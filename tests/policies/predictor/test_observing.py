"""Predictors that go by what they are shown."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Began, Routed
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
