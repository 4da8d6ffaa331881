"""One link, one disk: what is queued is served one after the other, demands first."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.sim.hardware import Hardware, Link
from expertly.sim.link import Clock, VirtualLink
from tests.sim.drive import INFINITE, sized, toy

GEOMETRY = Geometry(sized(2, 8, 2, width=10), 2)  # segments of 20 bytes: 3 + 40 ns on the link


def span(expert: int, layer: int = 0, segment: int = 0, num_segments: int = 1) -> Span:
    return Span(layer, expert, segment, num_segments, 0)


class Watch:
    def __init__(self) -> None:
        self.moves: list[tuple[str, int, int, int]] = []
        self.spends: list[tuple[str, int, int]] = []

    def moved(self, where: str, span: Span, begin_ns: int, end_ns: int) -> None:
        self.moves.append((where, span.expert, begin_ns, end_ns))

    def spent(self, what: str, begin_ns: int, end_ns: int) -> None:
        self.spends.append((what, begin_ns, end_ns))


def make(hardware: Hardware | None = None, taking_ns: int = 0, submit_ns: int = 0) -> tuple[Clock, VirtualLink, Watch]:
    clock, watch = Clock(), Watch()
    return clock, VirtualLink(clock, hardware or toy(), GEOMETRY, lambda layer, num: taking_ns, watch, submit_ns), watch


@pytest.mark.parametrize("num", [1, 2, 7])
def test_transfers_queued_together_take_their_sum_and_one_latency(num: int) -> None:
    clock, link, _ = make()
    clock.now_ns = 1000
    link.submit([span(e) for e in range(num)])
    arrived = []
    for _ in range(num):
        assert link.poll() is None
        arrived.append(link.wait().expert)
    assert arrived == list(range(num))
    assert clock.now_ns == 1000 + 7 + num * 43
    assert link.stall_ns == 7 + num * 43


def test_an_adjacent_run_of_segments_pays_the_overhead_once() -> None:
    clock, link, _ = make()
    link.submit([span(0, num_segments=2)])
    link.wait()
    assert clock.now_ns == 7 + 3 + 80


def test_the_latency_of_what_is_submitted_while_the_link_is_busy_is_hidden() -> None:
    clock, link, _ = make()
    link.submit([span(0)])
    clock.now_ns = 30
    link.submit([span(1)])  # could move from 37 on; the link is free at 50
    link.wait(), link.wait()
    assert clock.now_ns == 7 + 2 * 43
    clock.now_ns = 92  # the link has been free since 93 - 43 + 43
    link.submit([span(2)])
    link.wait()
    assert clock.now_ns == 92 + 7 + 43


def test_poll_gives_what_has_arrived_by_now_and_takes_no_time() -> None:
    clock, link, _ = make()
    link.submit([span(0), span(1)])
    clock.now_ns = 49
    assert link.poll() is None
    clock.now_ns = 50
    assert link.poll() == span(0) and link.poll() is None
    assert clock.now_ns == 50 and link.stall_ns == 0


def test_demands_go_before_what_is_loaded_ahead_but_never_stop_it() -> None:
    clock, link, watch = make()
    link.submit_ahead([span(0), span(1), span(2)])
    clock.now_ns = 10  # 0 is on the link until 50
    link.submit([span(3), span(4)])
    assert [link.wait().expert for _ in range(5)] == [0, 3, 4, 1, 2]
    assert clock.now_ns == 7 + 5 * 43
    assert all(after[2] == before[3] for before, after in pairwise(watch.moves)), "no gaps"


def test_of_a_demand_and_a_guess_submitted_at_once_the_demand_goes_first() -> None:
    _, link, _ = make()
    link.submit_ahead([span(0)])
    link.submit([span(1)])
    assert [link.wait().expert for _ in range(2)] == [1, 0]


def test_withdrawn_is_what_has_not_begun_of_the_layer() -> None:
    clock, link, _ = make()
    link.submit_ahead([span(0), span(1, layer=1), span(2), span(3)])
    clock.now_ns = 8
    assert link.withdraw(0) == [span(2), span(3)], "0 is under way"
    assert link.withdraw(0) == []
    assert [link.wait() for _ in range(2)] == [span(0), span(1, layer=1)]
    assert link.busy_until_ns() == clock.now_ns == 7 + 2 * 43


def test_the_spans_of_one_expert_are_withdrawn_alone_and_may_be_demanded() -> None:
    clock, link, _ = make()
    link.submit_ahead([span(0), span(1), span(2), span(2, layer=1), span(2, segment=1)])
    clock.now_ns = 8
    gone = link.withdraw(0, [0, 2])
    assert gone == [span(2), span(2, segment=1)], "0 is under way, and the other 2 is another layer's"
    link.submit(gone)
    assert [link.wait() for _ in range(5)] == [span(0), *gone, span(1), span(2, layer=1)]
    assert clock.now_ns == 7 + 5 * 43


def test_busy_until_counts_the_overhead_of_every_span_and_what_has_begun_meanwhile() -> None:
    clock, link, _ = make()
    link.submit([span(e) for e in range(3)])
    link.submit_ahead([span(3)])
    assert link.busy_until_ns() == 4 * 43, "the latency keeps nobody busy"
    clock.now_ns = 60
    assert link.busy_until_ns() == 7 + 4 * 43


def test_taking_a_span_costs_the_thread_time_that_is_no_stall() -> None:
    clock, link, watch = make(taking_ns=5)
    link.submit([span(0), span(1)])
    link.wait()
    assert (clock.now_ns, link.stall_ns) == (55, 50)
    link.wait()
    assert (clock.now_ns, link.stall_ns) == (98, 88) and watch.spends == [("take", 50, 55), ("take", 93, 98)]


def test_asking_costs_the_thread_time_while_the_link_begins() -> None:
    clock, link, watch = make(submit_ns=30)
    link.submit([span(0)])
    assert clock.now_ns == 30 and watch.spends == [("ask", 0, 30)]
    link.submit_ahead([span(2)])
    assert clock.now_ns == 30, "nobody waits for that"
    link.wait()
    assert (clock.now_ns, link.stall_ns) == (50, 20)


def test_an_infinite_link_brings_all_at_once() -> None:
    clock, link, _ = make(toy(link=INFINITE))
    clock.now_ns = 5
    link.submit([span(e) for e in range(8)])
    assert [link.poll() for _ in range(9)] == [*(span(e) for e in range(8)), None]
    assert clock.now_ns == 5 and link.stall_ns == 0


# -- a disk behind: reads take 20 + 5 + 200 ns a segment --------------------------------------------------------------

DISK = Link(0.1e9, 20, 5)


def with_disk(num_segments: int) -> tuple[Clock, VirtualLink, Watch]:
    """The host holds the first so many segments."""
    return make(toy(disk=DISK, host_memory_nbytes=20 * num_segments))


def test_reads_and_copies_overlap_and_each_pays_its_latency_once() -> None:
    clock, link, watch = with_disk(4)
    link.submit([span(e) for e in (5, 6, 7)])
    assert [link.wait().expert for _ in range(3)] == [5, 6, 7]
    assert clock.now_ns == 20 + 3 * 205 + 7 + 43
    assert [move[0] for move in watch.moves] == ["disk", "disk", "link", "disk", "link", "link"]


def test_what_the_host_holds_does_not_wait_for_the_disk() -> None:
    clock, link, _ = with_disk(4)
    link.submit([span(5), span(0)])
    assert link.wait().expert == 0 and clock.now_ns == 50
    assert link.wait().expert == 5 and clock.now_ns == 20 + 205 + 7 + 43


def test_only_the_missing_segments_of_a_span_are_read() -> None:
    clock, link, watch = with_disk(3)  # both of expert 0, the first of expert 1
    link.submit([span(1, num_segments=2)])
    link.wait()
    assert clock.now_ns == 20 + 205 + 7 + 83 and watch.moves[0] == ("disk", 1, 20, 225)


def test_a_demand_overtakes_guesses_on_the_disk_and_those_not_begun_are_withdrawn() -> None:
    clock, link, _ = with_disk(4)
    link.submit_ahead([span(4), span(5), span(6, layer=1)])
    clock.now_ns = 30  # 4 is being read
    link.submit([span(7)])
    assert link.withdraw(0) == [span(4), span(5)], "4 is not on the link yet"
    assert link.wait() == span(7) and clock.now_ns == 20 + 2 * 205 + 7 + 43
    link.submit([span(4)])  # has been read in vain: it is there
    assert link.wait() == span(4) and clock.now_ns == 480 + 50


def test_the_least_recently_used_segment_leaves_the_host() -> None:
    _, link, watch = with_disk(2)  # segments 0 and 1 of expert 0
    for expert, segment in ((0, 0), (3, 0), (0, 0), (0, 1), (3, 0)):  # 3 replaces (0, 1), which replaces 3
        link.submit([span(expert, segment=segment)])
        link.wait()
    reads = [expert for where, expert, _, _ in watch.moves if where == "disk"]
    assert reads == [3, 0, 3]


def test_a_host_that_holds_nothing_still_passes_everything_on() -> None:
    clock, link, _ = with_disk(0)
    for _ in range(2):
        before = clock.now_ns
        link.submit([span(0)])
        link.wait()
        assert clock.now_ns == before + 20 + 205 + 7 + 43


@pytest.mark.parametrize("seed", range(6))
def test_spans_arrive_once_in_time_order_and_the_servers_never_overlap(seed: int) -> None:
    dice = random.Random(seed)
    clock, link, watch = with_disk(5) if seed % 2 else make()
    waiting: list[Span] = []
    last = 0
    for number in range(300):
        new = [span(dice.randrange(8), dice.randrange(2), 0, dice.choice((1, 2))) for _ in range(dice.randrange(3))]
        new = [Span(*one[:4], 10 * number + i) for i, one in enumerate(new)]
        (link.submit if dice.random() < 0.5 else link.submit_ahead)(new)
        waiting += new
        clock.now_ns += dice.randrange(60)
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
