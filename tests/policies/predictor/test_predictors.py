"""What every predictor promises, what each of them means, and how scores become a prediction."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.policies.known import Known
from expertly.policies.prediction import best_of_rows
from expertly.policies.registry import PREDICTORS
from expertly.testing import PREDICTOR_CHECKS, made_up
from expertly.testing.made_up import SHAPE, ListFuture, some_future
from expertly.testing.predictor import DISTANCES
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
    if not name.startswith("eam"):  # which weighs them by the layers to go
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
