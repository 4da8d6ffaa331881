"""Equations 5 to 7 with numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.policies.allocation.moepic import Timing
from expertly.policies.allocation.moepic.timing import Parts
from tests.policies.moepic.builders import shape_of

TIMING = Timing.of(shape_of(2, top_k=2), attention_ns=[30, 50], moe_ns=[100, 120], load_ns=[80, 90], head_ns=7)


def m(loaded: float) -> np.ndarray:
    return np.array([loaded])


def test_the_first_window_is_head_and_attention() -> None:
    assert TIMING.first_window_ns() == 37


def test_with_all_there_nothing_waits_and_the_whole_layer_hides_the_next_ones_prefetches() -> None:
    assert TIMING.exposed_ns(0, m(2.0)) == 0
    assert TIMING.next_window_ns(0, m(2.0)) == 100 + 50


def test_with_nothing_there_all_loading_is_waited_for_before_any_prefetch() -> None:
    assert TIMING.exposed_ns(0, m(0.0)) == 160
    assert TIMING.next_window_ns(0, m(0.0)) == 100 + 50  # computing comes after loading: all of it is left


def test_half_there() -> None:
    """One expert computes in 50 ns while the other loads in 80: 30 are waited for, 50 are left to the next window."""
    assert TIMING.exposed_ns(0, m(1.0)) == 30
    assert TIMING.next_window_ns(0, m(1.0)) == 100 - 50 + 50


def test_short_loads_take_their_own_time_of_the_window() -> None:
    """A quarter of an expert loads in 20 ns behind 87.5 of computing."""
    assert TIMING.exposed_ns(0, m(1.75)) == 0
    assert TIMING.next_window_ns(0, m(1.75)) == 100 - 20 + 50


@pytest.mark.parametrize(
    "alpha, beta, gamma, theta", [(1, 1, 0, 0.5), (0, 2, 0, 0.25), (0, 1, 1, 0.75), (2, 0, 0, 0.5)]
)
def test_the_terms_of_the_paper_are_those_of_m(alpha: int, beta: int, gamma: int, theta: float) -> None:
    loaded = alpha + beta * theta
    hide = (alpha + beta * theta) * 100 / 2
    miss = (beta * (1 - theta) + gamma) * 80
    assert TIMING.exposed_ns(0, m(loaded)) == pytest.approx(max(0, miss - hide))
    assert TIMING.next_window_ns(0, m(loaded)) == pytest.approx(100 - min(hide, miss) + 50)


COSTLY = replace(TIMING, piece_ns=(10, 0), ask_ns=(4, 0))


def parts(further: float = 0, early: float = 0, lacking: float = 0) -> Parts:
    return Parts(*(np.array([one], float) for one in (further, early, lacking)))


def test_spans_and_asking_cost_their_own_time() -> None:
    """All there in halves: two spans more. One of two always missing: asked for in 3 tokens of 4, as either may be."""
    assert COSTLY.exposed_ns(0, m(2.0), parts(further=2)) == 20
    assert COSTLY.next_window_ns(0, m(2.0), parts(further=2)) == 100 + 20 + 50
    without_load = replace(COSTLY, load_ns=(0, 0))
    assert without_load.exposed_ns(0, m(1.0), parts(lacking=1)) == pytest.approx(0.75 * 4)
    assert COSTLY.counts_parts(0) and not COSTLY.counts_parts(1) and COSTLY.without_parts() == TIMING


def test_what_is_exposed_is_the_mean_over_tokens() -> None:
    """Either of two experts is missing half the time: none, one (80 of loading behind 50) or both (160), by 1, 2, 1."""
    free_asking = replace(COSTLY, ask_ns=(0, 0))
    assert free_asking.exposed_ns(0, m(1.0), parts(lacking=1)) == pytest.approx((2 * 30 + 160) / 4)
    assert TIMING.exposed_ns(0, m(1.0)) == 30, "the paper's mean token"


def test_tops_are_computed_while_their_rest_loads() -> None:
    """Both tops are there, half of each: 80 load behind 50 and the 10 that half a span each costs more."""
    free_asking = replace(COSTLY, ask_ns=(0, 0))
    exposed = free_asking.exposed_ns(0, m(1.0), parts(further=2, early=1, lacking=2))
    assert exposed == pytest.approx(80 - 50 - 10 + 20)
    assert free_asking.next_window_ns(0, m(1.0), parts(further=2, early=1, lacking=2)) == 100 + 20 - 60 + 50


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attention_ns": [1]}, r"attention_ns: 1 values; must be one for each of 2 layers"),
        ({"moe_ns": [1, -2]}, r"moe_ns\[1\]=-2: must be at least 0"),
        ({"piece_ns": [1]}, r"piece_ns: 1 values; must be one for each of 2 layers"),
        ({"ask_ns": -1}, r"ask_ns\[0\]=-1: must be at least 0"),
        ({"load_ns": -1}, r"load_ns\[0\]=-1: must be at least 0"),
        ({"head_ns": -3}, r"head_ns=-3: must be at least 0"),
    ],
)
def test_errors_name_the_field(changes: dict, message: str) -> None:
    times = {"attention_ns": 1, "moe_ns": 1, "load_ns": 1, "head_ns": 1} | changes
    with pytest.raises(ConfigError, match=f"timing field {message}"):
        Timing.of(shape_of(2), **times)
