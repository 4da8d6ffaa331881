"""What every allocation promises, and equal quotas."""

from __future__ import annotations

import pytest

from expertly.core.errors import BudgetError, ConfigError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.policies.allocation import Uniform, equal_quotas
from expertly.policies.registry import ALLOCATIONS
from expertly.scheduler.budget import allocate, check_quotas, split_budget
from tests.scheduler.drive import geometry

SMALL, LARGE = LayerGeometry(5, 2, 4, 16, 3, 2), LayerGeometry(8, 3, 4, 32, 3, 2)
SHAPES = [geometry(4, 8, 2), geometry(3, 8, 2, 4), Geometry((SMALL, LARGE, LARGE, SMALL), 2)]


@pytest.mark.parametrize("name", ALLOCATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=["whole", "segments", "classes"])
def test_quotas_are_what_there_is_of_each_size_at_every_budget(name: str, shape: Geometry) -> None:
    """A new allocation inherits this by being in ALLOCATIONS."""
    make = ALLOCATIONS[name].make
    for percent in range(30, 101, 5):
        before = split_budget(shape, shape.nbytes * percent // 100)
        after = allocate(shape, before, make(shape))
        assert after.pool_slots() == before.pool_slots() and after.memory_nbytes == before.memory_nbytes
        assert list(after.kept_slots) == check_quotas(shape, after.layer_quotas)
        assert after.kept_slots == (before.kept_slots if ALLOCATIONS[name].keeps else (0,) * len(before.kept_slots))
        assert allocate(shape, after, make(shape)) == after, "it is divided once"


def narrow(widths: list[int], experts: list[int]) -> Geometry:
    pairs = zip(widths, experts, strict=True)
    return Geometry(tuple(LayerGeometry(num, 1, 4, width, 3, 2) for width, num in pairs), 2)


@pytest.mark.parametrize(
    ("widths", "experts", "slots", "shares"),
    [
        ([8] * 4, [6] * 4, [22], [6, 6, 5, 5]),  # the remainder goes to the lowest layers
        ([8] * 4, [6] * 4, [2], [1, 1, 0, 0]),
        ([8, 8], [6, 6], [1000], [12, 12]),  # no layer gets more than its experts fill
        ([8, 8, 8], [8, 2, 8], [20], [8, 4, 8]),
        ([8, 8, 8], [8, 2, 8], [21], [9, 4, 8]),
        ([8, 16, 8], [4, 4, 4], [6, 5], [3, 5, 3]),  # size classes do not share
    ],
)
def test_equal_quotas(widths: list[int], experts: list[int], slots: list[int], shares: list[int]) -> None:
    shape = narrow(widths, experts)
    assert equal_quotas(shape, slots) == shares
    for wrong in ([*slots, 1], [-1] * len(slots)):
        with pytest.raises(BudgetError, match="kept_segments="):
            equal_quotas(shape, wrong)


class Wrong(Uniform):
    def __init__(self, shape: Geometry, wrong: list[int]) -> None:
        super().__init__(shape)
        self.wrong = wrong

    def quotas(self, kept_slots: object) -> list[int]:
        return self.wrong


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([1, 1, 1], "3 quotas; must be one for each of 4 layers"),
        ([0, 9, 0, 0], r"quota=9 of layer 1: must be from 0 to its 8 segments"),
        ([0, 0, -1, 0], r"quota=-1 of layer 2"),
        ([8, 8, 8, 8], r"keeps \[32\] segments of each size; accepted: at most \(14,\)"),
    ],
)
def test_quotas_that_cannot_be_are_refused(wrong: list[int], message: str) -> None:
    shape = SHAPES[0]
    with pytest.raises(ConfigError, match=message):
        allocate(shape, split_budget(shape, shape.nbytes // 2), Wrong(shape, wrong))
