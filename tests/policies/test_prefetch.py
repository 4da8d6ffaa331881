"""Which prediction is loaded first."""

from __future__ import annotations

import pytest

from expertly.policies.prefetch import PREFETCHES
from expertly.testing import check_prefetch


@pytest.mark.parametrize("name", PREFETCHES)
def test_conformance(name: str) -> None:
    """A new priority inherits this by being in PREFETCHES."""
    check_prefetch(PREFETCHES[name])


def test_by_score_the_distance_is_nothing() -> None:
    assert PREFETCHES["score"](0.3, 1) == PREFETCHES["score"](0.3, 9) == 0.3


def test_by_proximity_is_the_papers_formula() -> None:
    """p / (l - l_now) (fMoE, section 4.5)."""
    assert PREFETCHES["proximity"](0.6, 3) == pytest.approx(0.2)
    assert PREFETCHES["proximity"](0.25, 1) > PREFETCHES["proximity"](0.6, 3)
