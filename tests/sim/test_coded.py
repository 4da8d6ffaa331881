"""Compressed experts on a disk: what is read takes the time of its stored bytes, then it is decoded."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from expertly.sim.coded import MIN_JOB_NBYTES, CodedDisk, Coding

from expertly.core.costs import CodecCosts, Link
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.sim.link import Clock, VirtualLink
from tests.sim.drive import INFINITE, sized, toy

GEOMETRY = Geometry(sized(2, 8, 2, width=10), 2)  # segments of 20 bytes, 10 as they are stored: 3 + 20 ns on the link
COSTS = CodecCosts(0.5, 0.25e9, 2)  # 80 ns a segment
INSTANT = CodecCosts(0.5, float("inf"), 1)


def span(expert: int, layer: int = 0, segment: int = 0, num_segments: int = 1, slot: int = 0) -> Span:
    return Span(layer, expert, segment, num_segments, slot)


class Watch:
    def __init__(self) -> None:
        self.moves: list[tuple[str, int, int, int]] = []

    def moved(self, where: str, span: Span, begin_ns: int, end_ns: int) -> None:
        self.moves.append((where, span.expert, begin_ns, end_ns))

    def spent(self, what: str, begin_ns: int, end_ns: int) -> None:
        raise AssertionError("taking costs nothing here")


def make(costs: CodecCosts = COSTS, geometry: Geometry = GEOMETRY, **hardware: Any) -> tuple[Clock, VirtualLink, Watch]:
    clock, watch, coding = Clock(), Watch(), Coding(costs)
    return clock, VirtualLink(clock, toy(**hardware), geometry, lambda layer, num: 0, watch, 0, coding), watch


def coded(link: VirtualLink) -> CodedDisk:
    assert link.coded is not None
    return link.coded


@pytest.mark.parametrize("num", [1, 2, 7])
def test_bound_by_the_link_loading_takes_the_stored_bytes(num: int) -> None:
    clock, link, _ = make(INSTANT)
    link.submit([span(e) for e in range(num)])
    assert [link.wait().expert for _ in range(num)] == list(range(num))
    assert clock.now_ns == link.stall_ns == 7 + num * (3 + 20)
    assert link.moved_nbytes == num * 20 and coded(link).read_nbytes == num * 10


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_bound_by_decoding_loading_takes_the_rate_of_all_threads(threads: int) -> None:
    clock, link, _ = make(CodecCosts(0.5, 0.25e9, threads), link=INFINITE)
    link.submit([span(e % 8, e // 8) for e in range(16)])
    assert {link.wait() for _ in range(16)} == {span(e % 8, e // 8) for e in range(16)}
    assert clock.now_ns == 16 * 80 // threads


def test_reading_and_decoding_overlap() -> None:
    """Read until 30, 53 and 76, and decoded for 80 each; from 76 until the first is done at 127 three share two
    processors.
    """
    clock, link, watch = make()
    link.submit([span(e) for e in range(3)])
    arrivals = [(link.wait().expert, clock.now_ns) for _ in range(3)]
    assert arrivals == [(0, 127), (1, 150), (2, 173)]
    assert watch.moves == [("link", 0, 7, 30), ("link", 1, 30, 53), ("link", 2, 53, 76)]


def test_a_large_span_is_decoded_by_several_threads_as_its_bytes_come() -> None:
    """Four parts, there at quarters of the read; one thread would take four times as long for each."""
    width = MIN_JOB_NBYTES
    geometry = Geometry(sized(1, 2, 1, width=width), 1)  # 4 parts of 256 KiB
    per_part = MIN_JOB_NBYTES * 4
    clock, link, _ = make(CodecCosts(0.5, 0.25e9, 4), geometry=geometry, link=Link(0.5e9, 0, 0))
    link.submit([span(0)])
    link.wait()
    assert clock.now_ns == MIN_JOB_NBYTES * 4 + per_part, "read at 0.5 bytes/ns, then the last quarter decoded"


def test_withdrawn_is_what_no_reader_has() -> None:
    clock, link, _ = make(CodecCosts(0.5, 0.25e9, 1))
    link.submit_ahead([span(2), span(0), span(3), span(3, layer=1)])  # one for each reader
    link.submit_ahead([span(4), span(1), span(4, layer=1)])
    clock.now_ns = 8
    assert set(link.withdraw(0)) == {span(4), span(1)}, "readers have the others"
    assert link.withdraw(0) == []
    begun = [span(2), span(0), span(3), span(3, layer=1), span(4, layer=1)]
    assert {link.wait() for _ in begun} == set(begun)
    assert clock.now_ns == pytest.approx(7 + 23 + 5 * 80, abs=2) and coded(link).num_waiting == 0


def test_demands_are_read_before_what_is_loaded_ahead() -> None:
    clock, link, _ = make()
    link.submit_ahead([span(e) for e in range(6)])  # a reader has each of the first four
    clock.now_ns = 10
    link.submit([span(6), span(7)])
    assert [link.wait().expert for _ in range(8)] == [0, 1, 2, 3, 6, 7, 4, 5]


def test_what_is_loaded_ahead_in_several_parts_begins_alone() -> None:
    """Spans of four parts: the second one waits until the first one is there, and is withdrawn before."""
    geometry = Geometry(sized(1, 4, 1, width=MIN_JOB_NBYTES), 1)
    clock, link, _ = make(CodecCosts(0.5, 0.25e9, 4), geometry=geometry, link=Link(0.5e9, 0, 0))
    link.submit_ahead([span(0), span(1)])
    clock.now_ns = MIN_JOB_NBYTES * 4  # the first has been read
    assert link.withdraw(0) == [span(1)]
    assert link.wait() == span(0) and coded(link).num_waiting == 0


def test_busy_until_is_when_the_slower_of_disk_and_threads_is_done() -> None:
    _, link, _ = make()
    link.submit([span(e) for e in range(4)])
    assert link.busy_until_ns() == 4 * 80 // 2
    link.wait()  # at 137; by then one processor was at work for 23 and two for 84
    assert link.busy_until_ns() == 137 + (4 * 80 - 23 - 2 * 84 + 1) // 2
    other, slow = make(link=Link(0.01e9, 7, 3))[:2]
    slow.submit([span(e) for e in range(4)])
    assert slow.busy_until_ns() == other.now_ns + 4 * 1003


# -- on the processors that compute ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("slowdown", "there"), [(1.0, 110), (2.0, 95)])
def test_what_computes_takes_processors_from_decoding(slowdown: float, there: int) -> None:
    """For 60 two parts share the one processor, or one and a half, that computing leaves them."""
    clock, link, _ = make(link=INFINITE)
    link.submit([span(0), span(1)])
    link.computing(0, 60, slowdown)
    clock.now_ns = 60
    assert {link.wait(), link.wait()} == {span(0), span(1)} and clock.now_ns == there
    assert make(link=INFINITE)[1].poll() is None


def test_where_computing_leaves_no_processor_decoding_waits() -> None:
    clock, link, _ = make(CodecCosts(0.5, 0.25e9, 1, threads_beside=0), link=INFINITE)
    link.submit([span(0)])
    for begin in (0, 30, 100):  # it decodes from 60 until 100, and from 110
        link.computing(begin, begin + (10 if begin == 100 else 30))
        clock.now_ns = begin + 30
    assert link.wait() == span(0) and clock.now_ns == 110 + 40


def test_reading_takes_processors_from_decoding() -> None:
    """One of two, until 76: from 53 on the first two share one."""
    clock, link, _ = make(CodecCosts(0.5, 0.25e9, 2, read_processors=1.0))
    link.submit([span(e) for e in range(3)])
    arrivals = [(link.wait().expert, clock.now_ns) for _ in range(3)]
    assert arrivals == [(0, 145), (1, 168), (2, 179)]


# -- behind a host tier -----------------------------------------------------------------------------------------------


def test_behind_a_host_tier_decoded_experts_go_over_the_link() -> None:
    clock, link, watch = make(disk=Link(0.1e9, 20, 5), host_memory_nbytes=4 * 20)
    link.submit([span(5), span(0)])
    assert link.wait() == span(0) and clock.now_ns == 50, "the host holds it"
    assert link.wait() == span(5) and clock.now_ns == 20 + 105 + 80 + 50
    assert [move[:2] for move in watch.moves] == [("link", 0), ("disk", 5), ("link", 5)]
    assert link.moved_nbytes == 40 and coded(link).read_nbytes == 10


def test_behind_a_host_tier_the_device_computes_and_takes_no_processor() -> None:
    clock, link, _ = make(disk=Link(0.1e9, 20, 5), host_memory_nbytes=4 * 20)
    link.submit([span(5), span(6), span(7)])
    link.computing(0, 1000)
    assert link.wait() == span(5) and clock.now_ns < 1000


@pytest.mark.parametrize("seed", range(8))
def test_spans_arrive_once_in_time_order_whatever_is_asked_for(seed: int) -> None:
    dice = random.Random(seed)
    hosted = {"disk": Link(0.1e9, 20, 5), "host_memory_nbytes": 8 * 20} if seed % 2 else {}
    clock, link, watch = make(CodecCosts(0.5, 0.25e9, 1 + seed % 3), **hosted)
    waiting: list[Span] = []
    last = 0
    for number in range(400):
        free = [(la, e) for la in range(2) for e in range(8) if not any(w[:2] == (la, e) for w in waiting)]
        new = [span(e, la, 0, dice.choice((1, 2)), number) for la, e in dice.sample(free, min(2, len(free)))]
        (link.submit if dice.random() < 0.5 else link.submit_ahead)(new)
        waiting += new
        clock.now_ns += dice.randrange(90)
        if dice.random() < 0.2:
            for one in link.withdraw(0):
                waiting.remove(one)
        while (found := link.poll()) is not None:
            waiting.remove(found)
        if waiting and dice.random() < 0.5:
            waiting.remove(link.wait())
        assert clock.now_ns >= last
        last = clock.now_ns
    while waiting:
        waiting.remove(link.wait())
    for where in ("link", "disk"):
        times = [(begin, end) for place, _, begin, end in watch.moves if place == where]
        assert all(before[1] <= after[0] for before, after in pairwise(times))
    assert coded(link).num_waiting == 0
