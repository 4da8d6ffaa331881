"""Where the configurator starts."""

from __future__ import annotations

import pytest

from expertly.core.errors import BudgetError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.policies.allocation.moepic import uniform_plan
from expertly.policies.allocation.moepic.configurator import half_split
from expertly.policies.allocation.uniform import equal_shares
from tests.policies.moepic.builders import shape_of


def mixed(widths: list[int], experts: list[int], segments: int = 2) -> Geometry:
    return Geometry(
        tuple(LayerGeometry(num, 1, 4, width, 3, 2) for width, num in zip(widths, experts, strict=True)), segments
    )


def test_shares_are_equal_and_the_remainder_goes_to_the_lowest_layers() -> None:
    assert equal_shares(shape_of(4), [22]) == [6, 6, 5, 5]
    assert equal_shares(shape_of(4), [2]) == [1, 1, 0, 0]
    assert equal_shares(shape_of(4), [0]) == [0] * 4


def test_no_layer_gets_more_than_its_experts_fill() -> None:
    assert equal_shares(shape_of(2), [1000]) == [24, 24]
    assert equal_shares(mixed([8, 8, 8], [8, 2, 8]), [20]) == [8, 4, 8]
    assert equal_shares(mixed([8, 8, 8], [8, 2, 8]), [21]) == [9, 4, 8]


def test_size_classes_do_not_share() -> None:
    shape = mixed([8, 16, 8], [4, 4, 4])
    assert equal_shares(shape, [6, 5]) == [3, 5, 3]
    for wrong in ([6], [6, -1], [1, 2, 3]):
        with pytest.raises(BudgetError, match=r"kept_segments=.*: must be a number at least 0 for each of 2 size"):
            equal_shares(shape, wrong)


@pytest.mark.parametrize(
    "budget, segments, kept",
    [
        (0, 4, (0, 0)),
        (1, 4, (1, 1)),  # less than half of one
        (2, 4, (1, 2)),
        (11, 4, (5, 2)),
        (16, 4, (8, 2)),
        (23, 4, (8, 2)),
        (24, 4, (8, 3)),  # half of all eight is 16: more of each
        (32, 4, (8, 4)),
        (5, 1, (5, 1)),  # there are no halves
        (9, 3, (8, 1)),  # a third is the nearest below
    ],
)
def test_half_of_each_expert(budget: int, segments: int, kept: tuple[int, int]) -> None:
    split = half_split(budget, 8, segments)
    assert (split.kept_experts, split.kept_segments, split.budget_segments) == (*kept, budget)


def test_the_plan_without_a_configurator() -> None:
    plan = uniform_plan(shape_of(3), [26])
    assert [(one.kept_experts, one.kept_segments, one.budget_segments) for one in plan.layers] == [
        (4, 2, 9),
        (4, 2, 9),
        (4, 2, 8),
    ]
    assert plan.free_segments == (2,)
