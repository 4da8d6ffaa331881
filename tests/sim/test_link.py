"""One link, one disk, what decodes: what is queued is served one after the other, loads before prefetches."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from expertly.core.costs import CodecCosts, Link
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.core.resources import MIN_DECODE_NBYTES
from expertly.sim.decoding import NEVER_NS, DecodingDisk
from expertly.sim.hardware import Hardware
from expertly.sim.link import Clock, VirtualLink
from tests.sim.drive import INFINITE, sized, toy

GEOMETRY = Geometry(sized(2, 8, 2, width=10), 2)  # segments of 20 bytes: 3 + 40 ns on the link


def span(expert: int, layer: int = 0, segment: int = 0, num_segments: int = 1, slot: int = 0) -> Span:
    return Span(layer, expert, segment, num_segments, slot)


class Watch:
    def __init__(self) -> None:
        self.moves: list[tuple[str, int, int, int]] = []
        self.spends: list[tuple[str, int, int]] = []

    def moved(self, where: str, span: Span, begin_ns: int, end_ns: int) -> None:
        self.moves.append((where, span.expert, begin_ns, end_ns))

    def spent(self, what: str, begin_ns: int, end_ns: int) -> None:
        self.spends.append((what, begin_ns, end_ns))


def make(
    hardware: Hardware | None = None,
    load_ns: int = 0,
    submit_ns: int = 0,
    codec: CodecCosts | None = None,
    geometry: Geometry = GEOMETRY,
    prefetch_ns: int = 0,
    prefetch_each_ns: int = 0,
) -> tuple[Clock, VirtualLink, Any]:
    clock, watch = Clock(), Watch()
    own_ns = load_ns, submit_ns, codec, prefetch_ns, prefetch_each_ns
    link = VirtualLink(clock, hardware or toy(), geometry, watch, *own_ns)
    return clock, link, watch


def arrivals(clock: Clock, link: VirtualLink, num: int) -> list[tuple[int, int]]:
    """(expert, time) of what comes next."""
    return [(link.wait().expert, clock.now_ns) for _ in range(num)]


def test_transfers_queued_together_take_their_sum_and_one_latency() -> None:
    for num in (1, 2, 7):
        clock, link, _ = make()
        clock.now_ns = 1000
        link.submit([span(e) for e in range(num)])
        assert arrivals(clock, link, num) == [(e, 1007 + 43 * (e + 1)) for e in range(num)]
        assert link.stall_ns == 7 + num * 43
    clock, link, _ = make()
    link.submit([span(0, num_segments=2)])
    assert arrivals(clock, link, 1) == [(0, 7 + 3 + 80)], "adjacent segments pay the overhead once"


def test_the_latency_of_what_is_submitted_while_the_link_is_busy_is_hidden() -> None:
    clock, link, _ = make()
    link.submit([span(0)])
    clock.now_ns = 30
    link.submit([span(1)])  # could move from 37 on; the link is free at 50
    assert arrivals(clock, link, 2) == [(0, 50), (1, 93)]
    link.submit([span(2)])
    assert arrivals(clock, link, 1) == [(2, 93 + 7 + 43)]


def test_where_prefetches_begin_when_nothing_else_moves_each_pays_for_its_begin() -> None:
    clock, link, _ = make(toy(link=Link(0.5e9, 7, 3, prefetch_latency_ns=20)))
    link.submit([span(0)])
    link.prefetch([span(1), span(2)])
    assert arrivals(clock, link, 3) == [(0, 50), (1, 50 + 63), (2, 113 + 63)]


def test_a_load_waits_for_all_prefetches_that_are_under_way_together() -> None:
    """Two at a time, of 60 each: the third begins when the first has ended, unless a load waits."""
    clock, link, _ = make(toy(link=Link(0.5e9, 0, 0, prefetch_latency_ns=20, prefetch_read_nbytes=10)))
    link.prefetch([span(0), span(1), span(2)])
    clock.now_ns = 1
    link.submit([span(3)])
    assert arrivals(clock, link, 4) == [(0, 60), (1, 120), (3, 160), (2, 220)]
    link.prefetch([span(0), span(1), span(2)])
    clock.now_ns = 280
    link.submit([span(3)])
    assert arrivals(clock, link, 4) == [(0, 280), (1, 340), (2, 400), (3, 440)]
    link.submit([span(0)])
    link.prefetch([span(1)])
    clock.now_ns = 450
    link.submit([span(2)])
    assert arrivals(clock, link, 3) == [(0, 480), (2, 520), (1, 580)], "it does not begin beside a load"


def test_spans_that_arrive_together_do_so_when_the_last_one_has_moved() -> None:
    clock, link, _ = make(toy(link=Link(0.5e9, 7, 3, 20, 10, arrive_together=True)))
    link.submit([span(0), span(1), span(2)])
    assert arrivals(clock, link, 3) == [(0, 136), (1, 136), (2, 136)], "one latency, and 43 each"
    link.prefetch([span(0), span(1), span(2)])
    clock.now_ns = 137
    link.submit([span(3)])
    assert arrivals(clock, link, 4) == [(0, 242), (1, 242), (3, 285), (2, 348)], "two begin together, 20 + 86"
    link.prefetch([span(0, num_segments=2), span(1)])
    assert arrivals(clock, link, 2) == [(0, 348 + 103), (1, 451 + 63)], "four reads are under way at most"
    link.prefetch([span(0)])
    clock.now_ns = 520
    link.prefetch([span(1), span(2)])
    assert [one.expert for one in link.cancel(0)] == [2], "two of the four are there for one of these"
    link.prefetch([span(3)])
    assert arrivals(clock, link, 3) == [(0, 577), (1, 640), (3, 703)], "which takes its own time"


def test_what_begins_when_the_link_is_called_begins_no_sooner() -> None:
    clock, link, watch = make(toy(link=Link(0.5e9, 0, 0, 20, prefetches_when_called=True)))
    link.prefetch([span(0), span(1), span(2)])
    clock.now_ns = 100
    link.submit([])
    assert link.poll() == span(0) and link.poll() is None, "which was there at 60, and polling begins the next"
    clock.now_ns = 400
    assert [one.expert for one in link.cancel(0)] == [2], "nobody called since then"
    assert arrivals(clock, link, 1) == [(1, 400)]
    assert [(begin, end) for _, _, begin, end in watch.moves] == [(0, 60), (100, 160)]
    link.prefetch([span(0), span(1)])
    assert arrivals(clock, link, 2) == [(0, 460), (1, 520)], "waiting is a call"
    link.prefetch([span(0)])
    clock.now_ns = 530
    link.submit([span(1)])
    link.prefetch([span(2)])
    clock.now_ns = 1000
    assert arrivals(clock, link, 3) == [(0, 1000), (1, 1000), (2, 1060)]


def test_poll_gives_what_has_arrived_by_now_and_takes_no_time() -> None:
    clock, link, _ = make()
    link.submit([span(0), span(1)])
    clock.now_ns = 49
    assert link.poll() is None
    clock.now_ns = 50
    assert link.poll() == span(0) and link.poll() is None
    assert clock.now_ns == 50 and link.stall_ns == 0


def test_loads_go_before_prefetches_but_never_stop_one_that_has_begun() -> None:
    clock, link, watch = make()
    link.prefetch([span(0), span(1), span(2)])
    clock.now_ns = 10  # 0 is on the link until 50
    link.submit([span(3), span(4)])
    assert arrivals(clock, link, 5) == [(e, 7 + 43 * (i + 1)) for i, e in enumerate([0, 3, 4, 1, 2])]
    assert all(after[2] == before[3] for before, after in pairwise(watch.moves)), "no gaps"
    link.prefetch([span(0)])
    link.submit([span(1)])
    assert [expert for expert, _ in arrivals(clock, link, 2)] == [1, 0], "submitted at once"


def test_prefetches_that_did_not_begin_are_cancelled_by_layer_or_expert() -> None:
    clock, link, _ = make()
    link.prefetch([span(0), span(1, layer=1), span(2), span(3)])
    clock.now_ns = 8
    assert link.cancel(0) == [span(2), span(3)], "0 is under way"
    assert link.cancel(0) == []
    assert [link.wait() for _ in range(2)] == [span(0), span(1, layer=1)]
    assert link.busy_until_ns() == clock.now_ns == 7 + 2 * 43
    clock, link, _ = make()
    link.prefetch([span(0), span(1), span(2), span(2, layer=1), span(2, segment=1)])
    clock.now_ns = 8
    cancelled = link.cancel(0, [0, 2])
    assert cancelled == [span(2), span(2, segment=1)], "0 is under way, and the other 2 is another layer's"
    link.submit(cancelled)
    assert [link.wait() for _ in range(5)] == [span(0), *cancelled, span(1), span(2, layer=1)]
    assert clock.now_ns == 7 + 5 * 43


def test_busy_until_counts_the_overhead_of_every_span_and_what_has_begun_meanwhile() -> None:
    clock, link, _ = make()
    link.submit([span(e) for e in range(3)])
    link.prefetch([span(3)])
    assert link.busy_until_ns() == 4 * 43, "the latency keeps nobody busy"
    clock.now_ns = 60
    assert link.busy_until_ns() == 7 + 4 * 43


def test_asking_and_taking_cost_the_thread_time_that_is_no_stall() -> None:
    clock, link, watch = make(load_ns=5)
    link.submit([span(0), span(1)])
    assert arrivals(clock, link, 2) == [(0, 55), (1, 98)]
    assert link.stall_ns == 88 and watch.spends == [("take", 50, 55), ("take", 93, 98)]
    clock, link, watch = make(submit_ns=30)
    link.submit([span(0)])
    assert clock.now_ns == 30 and watch.spends == [("ask", 0, 30)]
    link.prefetch([span(2)])
    assert clock.now_ns == 30, "nobody waits for that"
    assert arrivals(clock, link, 1) == [(0, 50)] and link.stall_ns == 20, "the link begins meanwhile"
    clock, link, watch = make(prefetch_ns=9, prefetch_each_ns=4)
    link.prefetch([span(0, num_segments=2), span(1)])  # an expert and half of one
    assert clock.now_ns == 15 and watch.spends == [("ask", 0, 15)] and link.stall_ns == 0


# -- a disk behind: reads take 20 + 5 + 200 ns a segment --------------------------------------------------------------

DISK = Link(0.1e9, 20, 5)


def with_disk(num_segments: int) -> tuple[Clock, VirtualLink, Watch]:
    """The host holds the first so many segments."""
    return make(toy(disk=DISK, host_memory_nbytes=20 * num_segments))


def test_reads_and_copies_overlap_and_each_pays_its_latency_once() -> None:
    clock, link, watch = with_disk(4)
    link.submit([span(e) for e in (5, 6, 7)])
    assert arrivals(clock, link, 3)[-1] == (7, 20 + 3 * 205 + 7 + 43)
    assert [move[0] for move in watch.moves] == ["disk", "disk", "link", "disk", "link", "link"]


def test_only_what_the_host_lacks_is_read() -> None:
    clock, link, _ = with_disk(4)
    link.submit([span(5), span(0)])
    assert arrivals(clock, link, 2) == [(0, 50), (5, 20 + 205 + 7 + 43)], "0 does not wait for the disk"
    clock, link, watch = with_disk(3)  # both segments of expert 0, the first of expert 1
    link.submit([span(1, num_segments=2)])
    assert arrivals(clock, link, 1) == [(1, 20 + 205 + 7 + 83)] and watch.moves[0] == ("disk", 1, 20, 225)
    clock, link, _ = with_disk(0)  # it still passes everything on
    for _ in range(2):
        before = clock.now_ns
        link.submit([span(0)])
        assert arrivals(clock, link, 1) == [(0, before + 20 + 205 + 7 + 43)]


def test_a_load_overtakes_prefetches_on_the_disk_and_those_not_begun_are_cancelled() -> None:
    clock, link, _ = with_disk(4)
    link.prefetch([span(4), span(5), span(6, layer=1)])
    clock.now_ns = 30  # 4 is being read
    link.submit([span(7)])
    assert link.cancel(0) == [span(4), span(5)], "4 is not on the link yet"
    assert arrivals(clock, link, 1) == [(7, 20 + 2 * 205 + 7 + 43)]
    link.submit([span(4)])  # has been read in vain: it is there
    assert arrivals(clock, link, 1) == [(4, 480 + 50)]


def test_the_least_recently_used_segment_leaves_the_host() -> None:
    _, link, watch = with_disk(2)  # segments 0 and 1 of expert 0
    for expert, segment in ((0, 0), (3, 0), (0, 0), (0, 1), (3, 0)):  # 3 replaces (0, 1), which replaces 3
        link.submit([span(expert, segment=segment)])
        link.wait()
    reads = [expert for where, expert, _, _ in watch.moves if where == "disk"]
    assert reads == [3, 0, 3]


# -- compressed experts -----------------------------------------------------------------------------------------------

COSTS = CodecCosts(0.5, 0.25e9, 2)  # a segment is stored in 10 bytes, 3 + 20 ns on the link, and decoded in 80 ns
INSTANT = CodecCosts(0.5, float("inf"), 1)


def make_coded(
    costs: CodecCosts = COSTS, geometry: Geometry = GEOMETRY, **hardware: Any
) -> tuple[Clock, VirtualLink, Any]:
    return make(toy(**hardware), codec=costs, geometry=geometry)


def decoder(link: VirtualLink) -> DecodingDisk:
    assert link.decoder is not None
    return link.decoder


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_bound_by_decoding_loading_takes_the_rate_of_all_threads(threads: int) -> None:
    clock, link, _ = make_coded(CodecCosts(0.5, 0.25e9, threads), link=INFINITE)
    link.submit([span(e % 8, e // 8) for e in range(16)])
    assert {link.wait() for _ in range(16)} == {span(e % 8, e // 8) for e in range(16)}
    assert clock.now_ns == 16 * 80 // threads


def test_reading_and_decoding_overlap() -> None:
    """Read until 30, 53 and 76, and decoded for 80 each; from 76 until the first is done at 127 three share two
    processors.
    """
    clock, link, watch = make_coded()
    link.submit([span(e) for e in range(3)])
    assert arrivals(clock, link, 3) == [(0, 127), (1, 150), (2, 173)]
    assert watch.moves == [("link", 0, 7, 30), ("link", 1, 30, 53), ("link", 2, 53, 76)]


def test_a_large_span_is_decoded_by_several_threads_as_its_bytes_come() -> None:
    """Four parts, there at quarters of the read; one thread would take four times as long for each."""
    width = MIN_DECODE_NBYTES
    geometry = Geometry(sized(1, 2, 1, width=width), 1)  # 4 parts of 256 KiB
    per_part = MIN_DECODE_NBYTES * 4
    clock, link, _ = make_coded(CodecCosts(0.5, 0.25e9, 4), geometry=geometry, link=Link(0.5e9, 0, 0))
    link.submit([span(0)])
    link.wait()
    assert clock.now_ns == MIN_DECODE_NBYTES * 4 + per_part, "read at 0.5 bytes/ns, then the last quarter decoded"


def test_prefetches_that_no_reader_took_are_cancelled() -> None:
    clock, link, _ = make_coded(CodecCosts(0.5, 0.25e9, 1))
    link.prefetch([span(2), span(0), span(3), span(3, layer=1)])  # one for each reader
    link.prefetch([span(4), span(1), span(4, layer=1)])
    clock.now_ns = 8
    assert set(link.cancel(0)) == {span(4), span(1)}, "readers have the others"
    assert link.cancel(0) == []
    begun = [span(2), span(0), span(3), span(3, layer=1), span(4, layer=1)]
    assert {link.wait() for _ in begun} == set(begun)
    assert clock.now_ns == pytest.approx(7 + 23 + 5 * 80, abs=2) and decoder(link).next_ns == NEVER_NS


def test_a_prefetch_in_several_parts_begins_alone() -> None:
    """Spans of four parts: the second one waits until the first one is there, and is cancelled before."""
    geometry = Geometry(sized(1, 4, 1, width=MIN_DECODE_NBYTES), 1)
    clock, link, _ = make_coded(CodecCosts(0.5, 0.25e9, 4), geometry=geometry, link=Link(0.5e9, 0, 0))
    link.prefetch([span(0), span(1)])
    clock.now_ns = MIN_DECODE_NBYTES * 4  # the first has been read
    assert link.cancel(0) == [span(1)]
    assert link.wait() == span(0) and decoder(link).next_ns == NEVER_NS


def test_busy_until_is_when_the_slower_of_disk_and_threads_is_done() -> None:
    _, link, _ = make_coded()
    link.submit([span(e) for e in range(4)])
    assert link.busy_until_ns() == 4 * 80 // 2
    link.wait()  # at 137; by then one processor was at work for 23 and two for 84
    assert link.busy_until_ns() == 137 + (4 * 80 - 23 - 2 * 84 + 1) // 2
    other, slow = make_coded(link=Link(0.01e9, 7, 3))[:2]
    slow.submit([span(e) for e in range(4)])
    assert slow.busy_until_ns() == other.now_ns + 4 * 1003


# -- on the processors that compute ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("slowdown", "there"), [(1.0, 110), (2.0, 95)])
def test_what_computes_takes_processors_from_decoding(slowdown: float, there: int) -> None:
    """For 60 two parts share the one processor, or one and a half, that computing leaves them."""
    clock, link, _ = make_coded(link=INFINITE)
    link.submit([span(0), span(1)])
    link.computing(0, 60, slowdown)
    clock.now_ns = 60
    assert {link.wait(), link.wait()} == {span(0), span(1)} and clock.now_ns == there
    assert make_coded(link=INFINITE)[1].poll() is None


def test_where_computing_leaves_no_processor_decoding_waits() -> None:
    clock, link, _ = make_coded(CodecCosts(0.5, 0.25e9, 1, threads_beside=0), link=INFINITE)
    link.submit([span(0)])
    for begin in (0, 30, 100):  # it decodes from 60 until 100, and from 110
        link.computing(begin, begin + (10 if begin == 100 else 30))
        clock.now_ns = begin + 30
    assert link.wait() == span(0) and clock.now_ns == 110 + 40


def test_reading_takes_processors_from_decoding() -> None:
    """One of two, until 76: from 53 on the first two share one."""
    clock, link, _ = make_coded(CodecCosts(0.5, 0.25e9, 2, read_processors=1.0))
    link.submit([span(e) for e in range(3)])
    assert arrivals(clock, link, 3) == [(0, 145), (1, 168), (2, 179)]


# -- behind a host tier -----------------------------------------------------------------------------------------------


def test_behind_a_host_tier_decoded_experts_go_over_the_link() -> None:
    clock, link, watch = make_coded(disk=Link(0.1e9, 20, 5), host_memory_nbytes=4 * 20)
    link.submit([span(5), span(0)])
    assert link.wait() == span(0) and clock.now_ns == 50, "the host holds it"
    assert link.wait() == span(5) and clock.now_ns == 20 + 105 + 80 + 50
    assert [move[:2] for move in watch.moves] == [("link", 0), ("disk", 5), ("link", 5)]
    assert decoder(link).read_nbytes == 10


# -- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [None, *(CodecCosts(0.5, 0.25e9, threads) for threads in (1, 3))])
@pytest.mark.parametrize("hosted", [{}, {"disk": DISK, "host_memory_nbytes": 5 * 20}])
@pytest.mark.parametrize("seed", range(2))
def test_spans_arrive_once_in_time_order_and_the_queues_never_overlap(
    seed: int, hosted: dict[str, Any], codec: CodecCosts | None
) -> None:
    dice = random.Random(seed)
    clock, link, watch = make(toy(**hosted), codec=codec)
    waiting: list[Span] = []
    last = 0
    for number in range(300):
        free = [(la, e) for la in range(2) for e in range(8) if not any(w[:2] == (la, e) for w in waiting)]
        chosen = dice.sample(free, min(dice.randrange(3), len(free)))
        new = [span(e, la, 0, dice.choice((1, 2)), 10 * number + i) for i, (la, e) in enumerate(chosen)]
        (link.submit if dice.random() < 0.5 else link.prefetch)(new)
        waiting += new
        clock.now_ns += dice.randrange(90)
        if dice.random() < 0.2:
            for one in link.cancel(0):
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
    assert link.decoder is None or link.decoder.next_ns == NEVER_NS
