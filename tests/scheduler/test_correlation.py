"""A correlation that is counted as pairs come is that of all pairs at once."""

from __future__ import annotations

import random
import statistics

import pytest

from expertly.scheduler.counters import Correlation


def of(pairs: list[tuple[float, float]]) -> Correlation:
    correlation = Correlation()
    for x, y in pairs:
        correlation.add(x, y)
    return correlation


@pytest.mark.parametrize("seed", range(5))
def test_it_is_pearsons_however_it_is_cut(seed: int) -> None:
    dice = random.Random(seed)
    slope = dice.uniform(-2, 2)
    pairs = [(x, slope * x + dice.gauss(0, 0.3)) for x in (dice.random() + 100 * seed for _ in range(500))]
    expected = statistics.correlation([x for x, _ in pairs], [y for _, y in pairs])
    assert of(pairs).pearson() == pytest.approx(expected, abs=1e-9)
    total, start = Correlation(), 0
    while start < len(pairs):
        stop = start + dice.randint(0, 90)
        total.merge(of(pairs[start:stop]))
        start = stop
    assert total.pearson() == pytest.approx(expected, abs=1e-9)
    assert total.count == 500


@pytest.mark.parametrize("pairs", [[], [(1, 2)], [(1, 2), (1, 3)], [(1, 2), (3, 2)], [(0.1, 0.3)] * 50])
def test_of_what_does_not_vary_there_is_none(pairs: list[tuple[float, float]]) -> None:
    assert of(pairs).pearson() is None
    total = of(pairs)
    total.merge(of(pairs))
    assert total.pearson() is None


def test_a_line_is_one() -> None:
    assert of([(0.1 * i, 7 - i) for i in range(1000)]).pearson() == pytest.approx(-1)
    assert -1 <= of([(0.1 * i, 0.3 * i) for i in range(7)]).pearson() <= 1
