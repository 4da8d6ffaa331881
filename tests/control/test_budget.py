"""From bytes to slots (SYSTEMS.md section 0, Budget)."""

from __future__ import annotations

import pytest

from expertly.control.budget import class_segment_nbytes, split_budget
from expertly.core.errors import BudgetError
from expertly.core.geometry import Geometry, LayerGeometry
from tests.control.drive import geometry


@pytest.mark.parametrize("segments", [1, 4])
def test_ring_and_kept_are_the_whole_budget_and_never_more(segments: int) -> None:
    shape = geometry(3, 8, 2, segments)
    nbytes = shape.segment_nbytes(0)
    for memory in range(2 * segments * nbytes, shape.nbytes + nbytes, nbytes // 2):
        budget = split_budget(shape, memory)
        used = budget.ring_nbytes(shape) + budget.kept_nbytes(shape)
        assert used <= min(memory, shape.nbytes)
        assert used > min(memory, shape.nbytes) - nbytes
        assert sum(budget.layer_shares) == sum(budget.kept_slots)


def test_the_remainder_goes_to_the_lowest_layers() -> None:
    shape = geometry(3, 8, 2)
    budget = split_budget(shape, (2 + 8) * shape.segment_nbytes(0))
    assert budget.ring_slots == (2,) and budget.layer_shares == (3, 3, 2)


def test_below_the_ring_the_least_budget_is_named() -> None:
    shape = geometry(3, 8, 2, segments=4)
    least = 2 * shape.layers[0].expert_nbytes
    with pytest.raises(BudgetError, match=f"least that works is {least} bytes"):
        split_budget(shape, least - 1)
    assert split_budget(shape, least).layer_shares == (0, 0, 0)


def test_a_ring_of_one_segment_is_the_smallest_there_is() -> None:
    shape = geometry(3, 8, 2, segments=4)
    assert split_budget(shape, shape.segment_nbytes(0), ring=1).ring_slots == (1,)
    with pytest.raises(BudgetError, match="ring=0"):
        split_budget(shape, shape.nbytes // 2, ring=0)


def test_a_budget_of_everything_needs_no_ring() -> None:
    shape = geometry(3, 8, 2)
    budget = split_budget(shape, shape.nbytes)
    assert budget.ring_slots == (0,) and budget.layer_shares == (8, 8, 8)


def test_two_size_classes_share_in_proportion() -> None:
    small, large = LayerGeometry(8, 2, 4, 16, 3, 2), LayerGeometry(8, 2, 4, 64, 3, 2)
    shape = Geometry((small, large, small), 1)
    budget = split_budget(shape, shape.nbytes // 2)
    assert len(budget.ring_slots) == 2
    assert budget.ring_nbytes(shape) + budget.kept_nbytes(shape) <= shape.nbytes // 2
    assert min(budget.layer_shares) > 0
    assert class_segment_nbytes(shape) == [small.expert_nbytes, large.expert_nbytes]
