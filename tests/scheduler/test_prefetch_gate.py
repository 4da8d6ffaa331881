"""When decode steps prefetch, as stories on a link that is fast, slow, or becomes so."""

from __future__ import annotations

import random
from typing import Any

import pytest

from expertly.core.messages import RouterRan
from expertly.scheduler.prefetch_gate import Moment, PrefetchGate


class Link:
    """Steps through one gate: with prefetching a step takes `open_ns`, without `closed_ns`."""

    def __init__(self) -> None:
        self.gate, self.now_ns = PrefetchGate(), 0

    def step(self, open_ns: int, closed_ns: int, *, absent: int = 0, tokens: int = 1, is_decode: bool = True) -> bool:
        """Whether it prefetched. Every absent byte takes a nanosecond more."""
        self.gate.at(Moment.PASS_BEGAN, self.now_ns)
        self.gate.router_ran(RouterRan(0, [0], [tokens], [is_decode], tokens), absent)
        self.now_ns += (open_ns if self.gate.is_open else closed_ns) + absent
        self.gate.at(Moment.PASS_ENDED, self.now_ns)
        return self.gate.is_open

    def share(self, num: int, open_ns: int, closed_ns: int, **more: Any) -> float:
        """Of so many steps, those that prefetched."""
        return sum(self.step(open_ns, closed_ns, **more) for _ in range(num)) / num


@pytest.mark.parametrize(("open_ns", "closed_ns", "state"), [(840, 1000, "on"), (1500, 1000, "off")])
def test_the_better_way_is_taken_after_a_few_steps(open_ns: int, closed_ns: int, state: str) -> None:
    """Six pairs in turns, two where it is that clear, then the slower way in one step of ten at most."""
    link = Link()
    slower = "steps_without" if state == "on" else "steps_with"
    link.share(12, open_ns, closed_ns)
    tried = link.gate.facts()[slower]
    assert link.gate.facts()["state"] == state and tried == (6 if state == "on" else 2)
    link.share(300, open_ns, closed_ns)
    facts = link.gate.facts()
    assert facts["state"] == state and (facts["difference"] < 0) == (state == "on")
    assert tried < facts[slower] <= tried + 300 // 10


def test_a_link_that_becomes_slow_or_fast_is_noticed() -> None:
    link = Link()
    assert link.share(100, 900, 1000) > 0.8, "prefetching hides loads"
    link.share(40, 4000, 3000)
    assert link.share(100, 4000, 3000) < 0.1, "the link is busy: it delays loads"
    link.share(40, 900, 1000)
    assert link.share(100, 900, 1000) > 0.8


def test_steps_that_lack_more_are_not_taken_for_a_worse_way() -> None:
    """What a step lacks varies by four times what prefetching spares; it is known of each step."""
    dice, link = random.Random(0), Link()
    for _ in range(32):
        link.step(900, 1000, absent=dice.randrange(400, 1600))
    assert link.gate.facts()["state"] == "on" and -0.08 < link.gate.facts()["difference"] < -0.03
    link = Link()
    for _ in range(32):
        link.step(1000, 900, absent=dice.randrange(400, 1600))
    assert link.gate.facts()["state"] == "off" and 0.03 < link.gate.facts()["difference"] < 0.08


def test_steps_of_other_batches_are_compared_apart() -> None:
    link = Link()
    for _ in range(10):
        link.share(20, 900, 1000)
        link.share(20, 3000, 2000, tokens=8)
    assert link.share(20, 900, 1000) > 0.7 and link.share(20, 3000, 2000, tokens=8) < 0.3


def test_prompts_and_failed_passes_are_no_steps() -> None:
    link = Link()
    for _ in range(10):
        link.step(900, 1000)
        link.step(10**9, 1, is_decode=False, tokens=50)
        link.gate.at(Moment.PASS_BEGAN, link.now_ns)
        link.gate.router_ran(RouterRan(0, [0], [1], [True], 1), 0)
        link.gate.abandon()
        link.now_ns += 10**9
        link.gate.at(Moment.PASS_ENDED, link.now_ns)
    assert link.gate.facts()["steps_with"] + link.gate.facts()["steps_without"] == 10
