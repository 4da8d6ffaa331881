"""Which prediction is loaded first."""

from __future__ import annotations

import pytest

from expertly.policies.prefetch import PREFETCHES


@pytest.mark.parametrize("name", PREFETCHES)
@pytest.mark.parametrize("layers_to_go", [1, 2, 7])
def test_the_surer_of_a_layer_never_comes_later(name: str, layers_to_go: int) -> None:
    """A new priority inherits this by being in PREFETCHES."""
    priorities = [PREFETCHES[name](score, layers_to_go) for score in (0.0, 0.1, 0.5, 0.9, 1.0)]
    assert priorities == sorted(priorities)


def test_by_score_the_distance_is_nothing() -> None:
    assert PREFETCHES["score"](0.3, 1) == PREFETCHES["score"](0.3, 9) == 0.3


def test_by_proximity_is_the_papers_formula() -> None:
    """p / (l - l_now) (fMoE, section 4.5)."""
    assert PREFETCHES["proximity"](0.6, 3) == pytest.approx(0.2)
    assert PREFETCHES["proximity"](0.25, 1) > PREFETCHES["proximity"](0.6, 3)
