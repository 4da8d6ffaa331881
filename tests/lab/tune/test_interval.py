"""The median and how sure it is: against a count of how often it is wrong."""

from __future__ import annotations

from random import Random

import pytest

from expertly.lab.tune.verdict import median_interval


def test_few_values_say_from_the_least_to_the_largest() -> None:
    found = median_interval([3.0, 1.0, 2.0])
    assert (found.low, found.median, found.high) == (1.0, 2.0, 3.0)


def test_outliers_do_not_move_it() -> None:
    values = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 100.0]
    assert median_interval(values).high == median_interval([*values[:-1], 1.9]).high == 1.8


@pytest.mark.parametrize("count", [5, 8, 20])
def test_each_end_is_on_its_side_in_nineteen_cases_of_twenty(count: int) -> None:
    dice = Random(0)
    intervals = [median_interval([dice.gauss(0, 1) for _ in range(count)]) for _ in range(2000)]
    too_high = sum(found.low > 0 for found in intervals) / len(intervals)
    too_low = sum(found.high < 0 for found in intervals) / len(intervals)
    assert too_high < 0.06 and too_low < 0.06
    assert too_high > 0.005  # it is no wider than it must be
