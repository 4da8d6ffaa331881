"""Which prediction is loaded first."""

from __future__ import annotations

import pytest

from expertly.policies.prefetch import PREFETCHES, ByProximity, ByScore
from expertly.testing import check_prefetch


@pytest.mark.parametrize("name", PREFETCHES)
def test_conformance(name: str) -> None:
    """A new priority inherits this by being in PREFETCHES."""
    check_prefetch(PREFETCHES[name])


def test_by_score_the_distance_is_nothing() -> None:
    assert [ByScore().priority(0.3, layers) for layers in (1, 9)] == [0.3, 0.3]


def test_by_proximity_is_the_papers_formula() -> None:
    """p / (l - l_now) (fMoE, section 4.5)."""
    assert ByProximity().priority(0.6, 3) == pytest.approx(0.2)
    assert ByProximity().priority(0.25, 1) > ByProximity().priority(0.6, 3)
