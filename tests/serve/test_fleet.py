"""Servers that learn from each other by way of a pool: who is told what, and what happens when the pool is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest

from expertly.core.errors import StoreError
from expertly.serve.fleet import MAX_MEMBERS, SILENT_S, Member, News, Pool, Report
from expertly.serve.metrics import RequestMetrics, of_replica, together

ONE: Mapping[str, Any] = {"maps": np.ones(1)}
TWO: Mapping[str, Any] = {"maps": np.zeros(2)}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Learner:
    """In the place of a Sharing: what it tells next, and what it was given."""

    def __init__(self) -> None:
        self.told: Mapping[str, Any] | None = None
        self.given: list[tuple[str, Mapping[str, Any]]] = []
        self.refuses = False

    def take(self) -> Mapping[str, Any] | None:
        told, self.told = self.told, None
        return told

    def give(self, other: str, arrays: Mapping[str, Any]) -> None:
        if self.refuses:
            raise StoreError("of another model")
        self.given.append((other, arrays))


class Fleet:
    """Members of one pool, which can be lost."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.pool: Pool | None = Pool(self.clock)
        self.learners: dict[str, Learner] = {}
        self.members: dict[str, Member] = {}

    def add(self, name: str, identity: str = "demo") -> Learner:
        async def swap(report: Report) -> News:
            if self.pool is None:
                raise ConnectionError("no pool")
            return self.pool.swap(report)

        learner: Any = Learner()
        self.learners[name] = learner
        self.members[name] = Member(name, identity, learner, lambda: f"metrics of {name}", swap)
        made: Learner = learner
        return made

    def swap(self, *names: str) -> None:
        for name in names or self.members:
            asyncio.run(self.members[name].swap())


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_what_one_learns_each_other_hears_once(fleet: Fleet) -> None:
    a, b, c = (fleet.add(name) for name in "abc")
    a.told = ONE
    fleet.swap()
    fleet.swap()
    assert a.given == [] and b.given == c.given == [("a", ONE)]
    a.told, b.told = TWO, ONE
    fleet.swap()
    fleet.swap()
    assert a.given == [("b", ONE)]
    assert b.given == [("a", ONE), ("a", TWO)]
    assert c.given == [("a", ONE), ("a", TWO), ("b", ONE)]


def test_models_of_another_identity_are_not_told(fleet: Fleet) -> None:
    fleet.add("a").told = ONE
    other = fleet.add("b", identity="another")
    fleet.swap("a", "b", "a", "b")
    assert other.given == []


def test_a_pool_that_was_lost_is_told_again(fleet: Fleet) -> None:
    a = fleet.add("a")
    a.told = ONE
    fleet.add("b")
    fleet.swap()
    fleet.pool = None
    a.told = TWO
    with pytest.raises(ConnectionError):
        fleet.swap("a")
    fleet.pool = Pool(fleet.clock)
    fleet.swap()
    fleet.swap("a")
    late = fleet.add("c")
    fleet.swap("c")
    assert late.given == [("a", TWO)], "what did not reach the old one, too"


def test_a_new_pool_counts_from_the_start(fleet: Fleet) -> None:
    """Who has heard much of the old one hears the first of the new one."""
    a, b = fleet.add("a"), fleet.add("b")
    for _ in range(5):
        a.told = ONE
        fleet.swap()
    fleet.pool = Pool(fleet.clock)
    b.given.clear()
    fleet.add("c").told = TWO
    fleet.swap("c", "b")
    assert b.given == [("c", TWO)]


def test_what_cannot_be_taken_is_left_out(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    fleet.add("a").told = ONE
    b = fleet.add("b")
    b.refuses = True
    with caplog.at_level(logging.WARNING):
        fleet.swap()
    assert "what a has learned was left out: of another model" in caplog.text


def test_metrics_of_those_who_are_silent_go(fleet: Fleet) -> None:
    fleet.add("a").told = ONE
    fleet.add("b")
    fleet.swap()
    assert fleet.members["b"].metrics_of_others == {"a": "metrics of a"}
    fleet.clock.now_s += SILENT_S + 1
    fleet.swap("b")
    assert fleet.members["b"].metrics_of_others == {}
    late = fleet.add("c")
    fleet.swap("c")
    assert late.given == [("a", ONE)], "what it had learned stays"


def test_the_pool_does_not_grow_without_end() -> None:
    pool = Pool(Clock())
    for number in range(3 * MAX_MEMBERS):
        pool.swap(Report(f"member {number}", "demo", "", ONE))
    assert len(pool.swap(Report("last", "demo", "")).learned) == MAX_MEMBERS - 1


def test_metrics_of_several_are_one_text_in_which_each_metric_is_once() -> None:
    one, two = (RequestMetrics() for _ in range(2))
    for _ in range(3):
        one.token(0.5)
    two.token(None)
    made = together({"one": of_replica(one.registry, None), "two": of_replica(two.registry, 7)}).decode()
    assert made.count("# TYPE expertly_generated_tokens_total counter") == 1
    assert 'expertly_generated_tokens_total{replica="one"} 3.0' in made
    assert 'expertly_generated_tokens_total{replica="two"} 1.0' in made
    assert 'expertly_time_per_output_token_seconds_bucket{le="0.5",replica="one"} 3.0' in made
    assert 'expertly_learned_from_others_total{replica="two"} 7.0' in made
    assert "replica" not in generate_latest(one.registry).decode()
