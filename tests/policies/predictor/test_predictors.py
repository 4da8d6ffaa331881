"""What every predictor promises, what each of them means, and how scores become a prediction."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Began, Routed
from expertly.policies.known import Known
from expertly.policies.prediction import Predictor, best_of_rows
from expertly.policies.registry import PREDICTORS
from expertly.testing import check_predictor
from expertly.testing.made_up import SHAPE, Demands, watched
from tests.scheduler.drive import geometry
from tests.weights import random_weights

BUILT_IN = dict(PREDICTORS.built_in)


def known(shape: Geometry, demands: Demands, seed: int) -> Known:
    """All that a predictor may ask for."""
    return Known(seed=seed, items=(random_weights(shape.layers, seed=seed),))


@pytest.mark.parametrize("name", BUILT_IN)
def test_conformance(name: str) -> None:
    """A new predictor inherits this by being in PREDICTORS."""
    check_predictor(BUILT_IN[name], known)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "eam"])  # which weighs them by the layers to go
def test_of_one_row_scores_are_probabilities(name: str) -> None:
    for _, prediction in watched(BUILT_IN[name], 2, known=known)[1]:
        assert prediction.probabilities is not None
        assert prediction.scores == [prediction.probabilities[expert] for expert in prediction.experts]


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_it_is_made_with_is_checked(name: str) -> None:
    policy = BUILT_IN[name]
    with pytest.raises(ConfigError, match=f"prediction='{name}': option 'colour': unknown"):
        policy.make(SHAPE, Known(), 1, {"colour": "red"})
    with pytest.raises(ConfigError, match="distance=0: must be at least 1"):
        policy.make(SHAPE, Known(), 0)
    if policy.weights:
        with pytest.raises(ConfigError, match=r"no weights.*expertly lab train"):
            policy.make(SHAPE, Known(), 1)


def naively(scores: np.ndarray, width: int) -> list[tuple[int, float]]:
    """(expert, score), in words: of each row the best, ties to the lowest id, none of 0; the highest of each expert."""
    best: dict[int, float] = {}
    for row in scores.tolist():
        for expert in sorted(range(len(row)), key=lambda e: (-row[e], e))[:width]:
            if row[expert] > 0:
                best[expert] = max(best.get(expert, 0.0), row[expert])
    return sorted(best.items(), key=lambda value: (-value[1], value[0]))


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


# -- lookahead, which goes by what it is shown ------------------------------------------------------------------------


def looks(layer: int, *rows: list[list[float]]) -> Routed:
    return Routed(RouterRan(layer, [0], [1], [True], len(rows)), lookahead=np.array(rows, np.float32))


def lookahead(**options: Any) -> Predictor:
    return PREDICTORS["lookahead"].make(geometry(layers=4, experts=6), Known(), **options)


def said(predictions: Iterable[Prediction]) -> dict[tuple[int, int], list[int]]:
    """(layer, distance) -> experts."""
    return {(p.layer, p.distance): p.experts for p in predictions}


NEXT, SECOND, THIRD = [0.1, 0.5, 0.4, 0, 0, 0], [0.6, 0, 0, 0.4, 0, 0], [0, 0, 0, 0, 0.3, 0.7]


def test_lookahead_looks_as_far_as_it_is_shown() -> None:
    ahead = lookahead(distance=3)
    assert said(ahead.router_ran(looks(0, [NEXT]))) == {(1, 1): [1, 2]}
    assert said(ahead.router_ran(looks(1, [NEXT]))) == {(2, 1): [1, 2]}


def test_a_request_goes_on_from_its_last_row() -> None:
    """A prompt of three tokens and two requests that decode: what the prompt's first tokens say is over."""
    ahead = lookahead(texts={"next_token": "yes"})
    rows = [[NEXT], [THIRD], [[0, 0, 0, 1.0, 0, 0]], [SECOND], [NEXT]]
    list(ahead.begin_iteration(Began(np.array([7, 7, 4, 7, 4]), np.zeros(5, np.bool_))))
    (inside,) = ahead.router_ran(looks(2, *rows))
    assert (inside.layer, inside.experts) == (3, [3, 5, 0, 1, 2, 4][: len(inside.experts)]), "of all rows"
    (after,) = ahead.router_ran(looks(3, *rows))
    assert (after.layer, after.distance, after.experts) == (0, 1, [0, 1, 2, 3]), "SECOND and NEXT"
    assert after.probabilities == pytest.approx([0.6, 0.5, 0.4, 0.4, 0, 0])
    assert said(ahead.router_ran(looks(3, *rows[:2]))) == {}, "of rows that nobody announced"
    assert said(ahead.router_ran(looks(3, [THIRD]))) == {(0, 1): [5, 4]}, "a single one is the last"


def test_lookahead_past_the_last_layer_is_for_the_next_token() -> None:
    shown = looks(3, [THIRD])
    assert said(lookahead(texts={"next_token": "yes"}).router_ran(shown)) == {(0, 1): [5, 4]}
    assert said(lookahead().router_ran(shown)) == {}
