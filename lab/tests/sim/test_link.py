"""The link: what is queued is served one after the other, loads before prefetches."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly_lab.sim.hardware import Hardware, Link
from expertly_lab.sim.link import Clock, VirtualLink, VirtualLinks
from lab.tests.sim.drive import sized, toy

GEOMETRY = Geometry(sized(2, 8, 2, width=10), 2)  # segments of 20 bytes: 40 ns on the link


def span(expert: int, layer: int = 0, segment: int = 0, num_segments: int = 1, slot: int = 0) -> Span:
    return Span(layer, expert, segment, num_segments, slot)


class Watch:
    def __init__(self) -> None:
        self.moves: list[tuple[int, int, int]] = []
        self.takes: list[tuple[int, int]] = []

    def computed(self, text: str, layer: int, begin_ns: int, end_ns: int) -> None:
        raise AssertionError("a link computes nothing")

    def moved(self, span: Span, begin_ns: int, end_ns: int) -> None:
        self.moves.append((span.expert, begin_ns, end_ns))

    def took(self, begin_ns: int, end_ns: int) -> None:
        self.takes.append((begin_ns, end_ns))


def make(hardware: Hardware | None = None) -> tuple[Clock, VirtualLink, Watch]:
    clock, watch = Clock(), Watch()
    return clock, VirtualLink(clock, hardware or toy(), GEOMETRY, watch), watch


def arrivals(clock: Clock, link: VirtualLink | VirtualLinks, num: int) -> list[tuple[int, int]]:
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
        while dice.random() < 0.6 and (result := link.poll()) is not None:
            came.append(result)
        clock.now_ns += dice.randrange(150)
    while len(came) + len(cancelled) < len(asked):
        came.append(link.wait())
    assert sorted([*came, *cancelled]) == sorted(asked)
    assert all(end <= begin for (_, _, end), (_, begin, _) in pairwise(watch.moves))


# -- several devices ------------------------------------------------------------------------------------------------


def several(num_devices: int, hardware: Hardware | None = None) -> tuple[Clock, VirtualLinks, Watch]:
    clock, watch = Clock(), Watch()
    links = [VirtualLink(clock, hardware or toy(), GEOMETRY, watch) for _ in range(num_devices)]
    return clock, VirtualLinks(GEOMETRY, links), watch


def test_spans_of_different_devices_arrive_in_the_time_of_one_and_those_of_one_device_queue() -> None:
    clock, links, _ = several(4)
    links.submit([span(e) for e in range(4)])
    assert arrivals(clock, links, 4) == [(e, 47) for e in range(4)] and links.stall_ns == 47
    clock, links, _ = several(4)
    links.submit([span(0), span(4), span(1)])
    assert arrivals(clock, links, 3) == [(0, 47), (1, 47), (4, 87)]


def test_experts_are_dealt_out_in_turn_over_all_layers() -> None:
    _, links, _ = several(3)
    assert [links.device_of(0, e) for e in range(4)] == [0, 1, 2, 0]
    assert links.device_of(1, 0) == 8 % 3, "a layer has 8 experts"


def test_on_each_link_loads_go_before_prefetches() -> None:
    clock, links, _ = several(2)
    links.prefetch([span(0), span(2), span(1), span(3)])
    clock.now_ns = 10
    links.submit([span(4)])  # of device 0; device 1 has prefetches alone
    assert arrivals(clock, links, 5) == [(0, 47), (1, 47), (4, 87), (3, 87), (2, 127)]


def test_prefetches_that_did_not_begin_are_cancelled_on_every_link() -> None:
    clock, links, _ = several(2)
    links.prefetch([span(e) for e in range(6)] + [span(0, layer=1)])
    clock.now_ns = 7
    assert [taken.expert for taken in links.cancel(0)] == [2, 4, 3, 5], "each link had begun with its first"
    assert arrivals(clock, links, 3) == [(0, 47), (1, 47), (0, 87)]


def test_waiting_while_a_device_computes_is_a_stall_from_when_it_has_computed() -> None:
    clock, links, _ = several(2)
    links.submit([span(0)])
    clock.busy_until_ns = 40
    assert arrivals(clock, links, 1) == [(0, 47)] and links.stall_ns == 7
    links.submit([span(0)])
    clock.busy_until_ns = 1000
    assert arrivals(clock, links, 1) == [(0, 94)] and links.stall_ns == 7


class SlowLinks:
    """The definition, a nanosecond at a time: a free link begins what is ready, loads first, the oldest first."""

    def __init__(self, num_devices: int, latency_ns: int, miss_ns: int) -> None:
        self.now_ns = self.num_asked = 0
        self._latency_ns, self._miss_ns = latency_ns, miss_ns
        self._queued: list[list[tuple[bool, int, int, Span]]] = [[] for _ in range(num_devices)]
        self._ends: list[list[tuple[int, Span]]] = [[] for _ in range(num_devices)]
        self._free_ns = [0] * num_devices

    def ask(self, spans: list[Span], *, is_prefetch: bool) -> None:
        for each in spans:
            self.num_asked += 1
            device = GEOMETRY.expert_id(each.layer, each.expert) % len(self._queued)
            self._queued[device].append((is_prefetch, self.now_ns + self._latency_ns, self.num_asked, each))
        self._begin()

    def cancel(self, layer: int) -> list[Span]:
        taken = []
        for queue in self._queued:
            taken += [entry for entry in queue if entry[0] and entry[3].layer == layer]
            queue[:] = [entry for entry in queue if entry not in taken]
        return [entry[3] for entry in taken]

    def poll(self) -> Span | None:
        there = [(ends[0][0], device) for device, ends in enumerate(self._ends) if ends and ends[0][0] <= self.now_ns]
        if not there:
            return None
        span = self._ends[min(there)[1]].pop(0)[1]
        self.advance(self._miss_ns)
        return span

    def wait(self) -> Span:
        while not any(ends and ends[0][0] <= self.now_ns for ends in self._ends):
            self.advance(1)
        span = self.poll()
        assert span is not None
        return span

    def advance(self, nanoseconds: int) -> None:
        for _ in range(nanoseconds):
            self.now_ns += 1
            self._begin()

    def _begin(self) -> None:
        for device, queue in enumerate(self._queued):
            ready = [entry for entry in queue if entry[1] <= self.now_ns]
            if ready and self._free_ns[device] <= self.now_ns:
                queue.remove(min(ready))
                span = min(ready)[3]
                self._free_ns[device] = self.now_ns + 40 * span.num_segments
                self._ends[device].append((self._free_ns[device], span))


def random_acts(dice: random.Random) -> list[tuple[str, object]]:
    acts: list[tuple[str, object]] = []
    for _ in range(dice.randrange(30)):
        act = dice.choice(["submit", "prefetch", "cancel", "advance", "poll", "wait"])
        spans = [span(dice.randrange(8), dice.randrange(2), num_segments=dice.randint(1, 2)) for _ in range(4)]
        values = {"cancel": dice.randrange(2), "advance": dice.randrange(90), "poll": None, "wait": None}
        acts.append((act, values.get(act, spans[: dice.randint(0, 4)])))
    return acts


@pytest.mark.parametrize("seed", range(200))
def test_links_do_what_the_definition_says(seed: int) -> None:
    dice = random.Random(seed)
    num_devices, latency_ns, miss_ns = dice.randint(1, 4), dice.choice([0, 7]), dice.choice([0, 9])
    hardware = toy(link=Link(0.5e9, latency_ns), miss_ns=miss_ns)
    clock, links, _ = several(num_devices, hardware)
    alone_clock, alone, _ = make(hardware)
    slow, num_in_flight = SlowLinks(num_devices, latency_ns, miss_ns), 0
    tried = [(clock, links), (alone_clock, alone)] if num_devices == 1 else [(clock, links)]
    for act, value in [*random_acts(dice), *[("wait", None)] * 200]:
        if act == "wait" and not num_in_flight:
            continue
        if act in ("submit", "prefetch"):
            expected = slow.ask(value, is_prefetch=act == "prefetch")  # type: ignore[arg-type]
            num_in_flight += len(value)  # type: ignore[arg-type]
        else:
            expected = getattr(slow, act)(*[value] * (value is not None))
            num_in_flight -= len(expected) if act == "cancel" else isinstance(expected, Span)
        for its_clock, link in tried:
            if act == "advance":
                its_clock.now_ns += value  # type: ignore[operator]
            else:
                assert getattr(link, act)(*[value] * (value is not None)) == expected, act
            assert its_clock.now_ns == slow.now_ns, act
    assert not num_in_flight and alone.stall_ns == (links.stall_ns if num_devices == 1 else 0)
