"""From the scores of many rows to one prediction."""

from __future__ import annotations

import random

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.policies.predictor.base import Reach, WidthOptions, best_of_rows
from tests.scheduler.drive import geometry


def naively(scores: np.ndarray, width: int) -> list[tuple[int, float]]:
    """(expert, score), in words: of each row the best, ties to the lowest id, none of 0; the highest of each expert."""
    best: dict[int, float] = {}
    for row in scores.tolist():
        for expert in sorted(range(len(row)), key=lambda e: (-row[e], e))[:width]:
            if row[expert] > 0:
                best[expert] = max(best.get(expert, 0.0), row[expert])
    return sorted(best.items(), key=lambda one: (-one[1], one[0]))


@pytest.mark.parametrize("num_rows", [1, 2, 9])
@pytest.mark.parametrize("width", [1, 3, 8, 99])
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


def test_reach() -> None:
    reach = Reach(geometry(layers=6), 3)
    assert list(reach.at_begin()) == [0, 1, 2]
    assert [reach.after(layer) for layer in range(6)] == [3, 4, 5, None, None, None]
    assert list(Reach(geometry(layers=4), 1 << 30).at_begin()) == [0, 1, 2], "no farther than the layers there are"
    assert list(Reach(geometry(layers=1), 2).at_begin()) == [0]
    with pytest.raises(ConfigError, match="distance=0: must be at least 1"):
        Reach(geometry(layers=4), 0)


def test_a_width_of_nothing_is_refused() -> None:
    assert WidthOptions().width is None
    with pytest.raises(ConfigError, match="width=0: must be at least 1"):
        WidthOptions(0)
