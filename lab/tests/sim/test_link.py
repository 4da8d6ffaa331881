"""The link: what is queued is served one after the other, loads before prefetches."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly_lab.sim.hardware import Hardware
from expertly_lab.sim.link import Clock, VirtualLink
from lab.tests.sim.drive import sized, toy

GEOMETRY = Geometry(sized(2, 8, 2, width=10), 2)  # segments of 20 bytes: 40 ns on the link


def span(expert: int, layer: int = 0, segment: int = 0, num_segments: int = 1, slot: int = 0) -> Span:
    return Span(layer, expert, segment, num_segments, slot)


class Watch:
    def __init__(self) -> None:
        self.moves: list[tuple[int, int, int]] = []
        self.takes: list[tuple[int, int]] = []

    def computed(self, what: str, layer: int, begin_ns: int, end_ns: int) -> None:
        raise AssertionError("a link computes nothing")

    def moved(self, span: Span, begin_ns: int, end_ns: int) -> None:
        self.moves.append((span.expert, begin_ns, end_ns))

    def took(self, begin_ns: int, end_ns: int) -> None:
        self.takes.append((begin_ns, end_ns))


def make(hardware: Hardware | None = None) -> tuple[Clock, VirtualLink, Watch]:
    clock, watch = Clock(), Watch()
    return clock, VirtualLink(clock, hardware or toy(), GEOMETRY, watch), watch


def arrivals(clock: Clock, link: VirtualLink, num: int) -> list[tuple[int, int]]:
    """(expert, time) of what comes next."""
    return [(link.wait().expert, clock.now_ns) for _ in range(num)]


def test_transfers_queued_together_take_their_sum_and_one_latency() -> None:
    for num in (1, 2, 7):
        clock, link, _ = make()
        clock.now_ns = 1000
        link.submit([span(e) for e in range(num)])
        assert arrivals(clock, link, num) == [(e, 1007 + 40 * (e + 1)) for e in range(num)]
        assert link.stall_ns == 7 + num * 40


def test_the_latency_of_what_is_submitted_while_the_link_is_busy_is_hidden() -> None:
    clock, link, _ = make()
    link.submit([span(0)])
    clock.now_ns = 30
    link.submit([span(1)])  # could move from 37 on; the link is free at 47
    assert arrivals(clock, link, 2) == [(0, 47), (1, 87)]
    link.submit([span(2)])
    assert arrivals(clock, link, 1) == [(2, 87 + 7 + 40)]


def test_poll_gives_what_has_arrived_by_now_and_takes_no_time() -> None:
    clock, link, _ = make()
    link.submit([span(0), span(1)])
    clock.now_ns = 46
    assert link.poll() is None
    clock.now_ns = 47
    assert link.poll() == span(0)
    assert link.poll() is None and clock.now_ns == 47 and link.stall_ns == 0


def test_loads_go_before_prefetches_but_never_stop_one_that_has_begun() -> None:
    clock, link, _ = make()
    link.prefetch([span(0), span(1), span(2)])
    clock.now_ns = 10  # the first moves since 7
    link.submit([span(3)])
    assert arrivals(clock, link, 4) == [(0, 47), (3, 87), (1, 127), (2, 167)]


def test_prefetches_of_a_layer_that_did_not_begin_are_cancelled() -> None:
    clock, link, _ = make()
    link.prefetch([span(0), span(1), span(2), span(1, layer=1)])
    clock.now_ns = 7
    assert link.cancel(0) == [span(1), span(2)], "the first has begun"
    assert link.cancel(0) == []
    assert arrivals(clock, link, 2) == [(0, 47), (1, 87)]


def test_taking_costs_the_thread_time_that_is_no_stall() -> None:
    clock, link, watch = make(toy(miss_ns=5))
    link.submit([span(0), span(1)])
    assert arrivals(clock, link, 2) == [(0, 47 + 5), (1, 87 + 5)]
    assert link.stall_ns == 47 + 35
    assert watch.takes == [(47, 52), (87, 92)]
    assert watch.moves == [(0, 7, 47), (1, 47, 87)]


@pytest.mark.parametrize("seed", range(4))
def test_spans_arrive_once_in_time_order_and_moves_never_overlap(seed: int) -> None:
    dice = random.Random(seed)
    clock, link, watch = make(toy(miss_ns=dice.choice([0, 9])))
    asked, came, cancelled = [], [], []
    for number in range(200):
        spans = [span(dice.randrange(8), dice.randrange(2), slot=3 * number + i) for i in range(dice.randrange(4))]
        (link.prefetch if dice.random() < 0.5 else link.submit)(spans)
        asked += spans
        if dice.random() < 0.2:
            cancelled += link.cancel(dice.randrange(2))
        while dice.random() < 0.6 and (found := link.poll()) is not None:
            came.append(found)
        clock.now_ns += dice.randrange(150)
    while len(came) + len(cancelled) < len(asked):
        came.append(link.wait())
    assert sorted([*came, *cancelled]) == sorted(asked)
    assert all(end <= begin for (_, _, end), (_, begin, _) in pairwise(watch.moves))
