"""From bytes to slots (docs/conventions.md, Budget)."""

from __future__ import annotations

import random
import re

import pytest

from expertly.core.errors import BudgetError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.scheduler.budget import split_budget
from tests.scheduler.drive import geometry


def test_the_least_budget_works_as_bytes_and_as_the_percentage_said() -> None:
    for shape in (geometry(3, 7, 2, segments=4), geometry(13, 61, 3), geometry(1, 3, 2)):
        with pytest.raises(BudgetError) as caught:
            split_budget(shape, 1)
        result = re.search(r"is (\d+) bytes \(([\d.]+)% of the experts\)", str(caught.value))
        assert result is not None
        split_budget(shape, int(result[1]))
        split_budget(shape, int(shape.nbytes * float(result[2]) / 100) + 1)
        with pytest.raises(BudgetError):
            split_budget(shape, int(result[1]) - 1)


def test_more_staging_slots_than_segments_are_cut() -> None:
    shape = geometry(2, 4, 2)
    assert split_budget(shape, shape.nbytes, staging=1000).staging_slots == (0,)
    with pytest.raises(BudgetError, match=f"least that works is {shape.nbytes} bytes"):
        split_budget(shape, shape.nbytes - 1, staging=1000)


def test_any_shape_and_any_budget() -> None:
    dice = random.Random(0)
    for _ in range(300):
        segments = dice.choice([1, 2, 4])
        layers = tuple(
            LayerGeometry(dice.randint(3, 20), dice.randint(1, 3), 4, dice.choice([16, 16, 32]), 3, 2)
            for _ in range(dice.randint(1, 6))
        )
        shape = Geometry(layers, segments)
        memory, staging = dice.randint(1, shape.nbytes + 10), dice.choice([None, None, 1, 5])
        try:
            budget = split_budget(shape, memory, staging)
        except BudgetError:
            continue
        used = budget.staging_nbytes(shape) + budget.kept_nbytes(shape)
        assert used <= min(memory, shape.nbytes)
        if shape.num_size_classes == 1 and (staging or 0) < 5:
            assert used > min(memory, shape.nbytes) - shape.unit_nbytes[0], "nothing is left over"
        for size_class in range(shape.num_size_classes):
            of_class = [layer for layer, c in enumerate(shape.size_classes) if c == size_class]
            shares = [budget.layer_quotas[layer] for layer in of_class]
            most = [layers[layer].num_experts * segments for layer in of_class]
            assert sum(shares) == budget.kept_slots[size_class]
            assert all(share <= limit for share, limit in zip(shares, most, strict=True))
            assert sum(share % segments > 0 for share in shares) <= 1, "one layer keeps a part of an expert, if any"
            open_shares = [share for share, limit in zip(shares, most, strict=True) if share < limit]
            if open_shares:
                experts = [share // segments for share in open_shares]
                assert experts == sorted(experts, reverse=True), "the remainder is for the lowest layers"
                assert experts[0] - experts[-1] <= 1
                assert max(shares) // segments <= experts[-1] + 1, "a full layer has no more than the others"
            assert budget.pool_slots()[size_class] <= sum(most)
