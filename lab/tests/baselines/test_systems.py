"""Systems of others by their names, with other parts, and why parts do not fit together."""

from __future__ import annotations

import pytest

from expertly.core.errors import ConfigError
from expertly.scheduler.systems import get_runnable, get_system, runnable_systems
from tests.scheduler.test_systems import assert_had_again

SPECS = {
    "lru:prediction=counts:width=4:distance=2": "lru:prediction=counts:distance=2:width=4",
    "belady:eviction=lfu": "belady:eviction=lfu",
    "brainstorm:prefill=stream": "brainstorm:prefill=stream",
    "mixtral-offloading:loop=overlapped": "mixtral-offloading:loop=overlapped",
    "mixtral-offloading:prediction=none": "mixtral-offloading:prediction=none",
    "lru:allocation=adapmoe": "lru:allocation=adapmoe",
    "adapmoe:allocation=none": "adapmoe:allocation=none",
    "moepic:prediction=random:tau=9:width=3": "moepic:prediction=random:width=3:tau=9",
    "moepic:eviction=random": "moepic:eviction=random",
}


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_is_a_system_that_can_be_had_again_by_its_name(spec: str) -> None:
    assert_had_again(spec, SPECS[spec])


def test_what_a_system_needs_follows_from_its_parts() -> None:
    assert get_system("lru:prediction=perfect").needs == ("future",)
    assert get_system("belady").needs == ("future",) == get_system("oracle").needs
    assert get_system("belady:eviction=lru:admission=always").needs == ()
    assert get_system("oracle:prediction=lookahead").needs == ("future", "lookahead")
    assert get_system("modelled-lookahead:prediction=popularity").needs == ()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pre-gated:eviction=lfu", r"eviction=lfu: of no use where nothing is kept \(allocation=none\)"),
        ("lru:allocation=none:scope=global", r"scope=global: of no use where nothing is kept"),
        ("lfu:allocation=none:admission=best", r"admission=best: of no use where nothing is kept"),
        ("fmoe:allocation=none", r"allocation='none' keeps no experts: .*accepted: ahead=staging"),
        ("resident:allocation=adapmoe", r"'resident' keeps every expert"),
        ("on-demand:allocation=adapmoe", r"among layers, scope='global' does not; accepted: scope=layer"),
        ("belady:loop=by-id", r"loop='by-id': one expert at a time; accepted: .*admission=always"),
        ("belady:eviction=static", r"admission='best' compares scores, which eviction='static' does not have"),
        ("lru:eviction=belady", r"eviction='belady' .*accepted: admission=best"),
        ("oracle:eviction=fmoe", r"prediction='perfect' does not give"),
        ("oracle:prefetch=proximity", r"prefetch='proximity' weighs probabilities.*accepted: score"),
    ],
)
def test_an_error_names_the_problem_and_what_is_accepted(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_system(spec)


@pytest.mark.parametrize("spec", ["belady", "oracle:distance=2", "mixtral-offloading"])
def test_what_needs_the_future_or_waits_cannot_run_a_model(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"system="):
        get_runnable(spec)
    assert not {"belady", "oracle", "mixtral-offloading"} & {*runnable_systems()}
