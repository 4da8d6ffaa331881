"""A link with host memory on its way: worked out by hand, at random, and beside the engine's device."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.scheduler.tier import Tier
from expertly_lab.sim.hardware import Hardware, Link
from expertly_lab.sim.link import Clock
from expertly_lab.sim.tiered import TieredLink
from lab.tests.sim.drive import make_study, make_trace, random_passes, results, sized, toy

GEOMETRY = Geometry(sized(2, 8, 2, width=10))  # experts of 40 bytes: 80 ns on the link, 400 from disk
DISK = toy(disk=Link(0.1e9, 20))


def span(expert: int, layer: int = 0) -> Span:
    return Span(layer, expert, 0, 1, 0)


def made(num_experts: int = 16, hardware: Hardware = DISK) -> tuple[Clock, TieredLink]:
    clock = Clock()
    return clock, TieredLink(clock, hardware, GEOMETRY, Tier(GEOMETRY, 40 * num_experts))


def arrivals(clock: Clock, link: TieredLink, num: int) -> list[tuple[int, int]]:
    return [(link.wait().expert, clock.now_ns) for _ in range(num)]


def test_a_miss_takes_disk_and_link_and_a_hit_the_link_alone() -> None:
    """The disk begins after 20 ns and takes 400 for each; each is copied behind its read, 7 and 80 ns."""
    clock, link = made()
    link.submit([span(0), span(1)])
    assert arrivals(clock, link, 2) == [(0, 420 + 87), (1, 820 + 87)] and link.disk_nbytes == 80
    assert link.stall_ns == 907
    link.submit([span(0)])
    assert arrivals(clock, link, 1) == [(0, 907 + 87)] and link.disk_nbytes == 80


def test_what_is_there_is_copied_while_the_rest_is_read() -> None:
    clock, link = made()
    link.submit([span(0)])
    arrivals(clock, link, 1)
    begin = clock.now_ns
    link.submit([span(1), span(0)])
    assert arrivals(clock, link, 2) == [(0, begin + 87), (1, begin + 420 + 87)]


def test_loads_are_read_and_copied_before_prefetches() -> None:
    """The first prefetch is being read when the load comes; what was read for prefetches waits for the load's copy."""
    clock, link = made()
    link.prefetch([span(2), span(3)])
    clock.now_ns = 100
    link.submit([span(0)])
    assert arrivals(clock, link, 3) == [(2, 420 + 87), (0, 820 + 87), (3, 1220 + 87)]


def test_prefetches_that_have_not_begun_are_cancelled_and_not_read() -> None:
    """2 is being read, 3 and 4 wait for the disk, and 5 for room. Then 2 is copied as a load is."""
    clock, link = made(num_experts=4)
    link.submit([span(7, layer=1)])
    arrivals(clock, link, 1)
    link.prefetch([span(expert) for expert in (2, 3, 4, 5)])
    clock.now_ns += 100
    assert {gone.expert for gone in link.cancel(0)} == {3, 4, 5} and link.cancel(0) == []
    assert [expert for expert, _ in arrivals(clock, link, 1)] == [2] and link.disk_nbytes == 80
    link.submit([span(3)])
    assert [expert for expert, _ in arrivals(clock, link, 1)] == [3]


def test_a_load_waits_for_room_until_a_copy_has_ended() -> None:
    """Host memory for two: 0 and 1 are being read. 2 may come when 0 has been copied, at 507."""
    clock, link = made(num_experts=2)
    link.submit([span(0), span(1), span(2)])
    assert arrivals(clock, link, 3) == [(0, 507), (1, 907), (2, 1220 + 87)]
    assert link.disk_nbytes == 120


@pytest.mark.parametrize("seed", range(6))
def test_every_span_arrives_once_in_order_of_time(seed: int) -> None:
    dice = random.Random(seed)
    clock, link = made(
        dice.choice([2, 3, 6, 16]), toy(disk=Link(dice.choice([1e8, 1e9]), 20), miss_ns=dice.choice([0, 9]))
    )
    coming: list[Span] = []  # asked for, and neither here nor cancelled
    for number in range(300):
        on_way = {(each.layer, each.expert) for each in coming}
        free = [(layer, expert) for layer in range(2) for expert in range(8) if (layer, expert) not in on_way]
        places = dice.sample(free, min(len(free), dice.randrange(3)))
        spans = [Span(*place, 0, 1, 3 * number + i) for i, place in enumerate(places)]
        (link.prefetch if dice.random() < 0.5 else link.submit)(spans)
        coming += spans
        for cancelled in link.cancel(dice.randrange(2)) if dice.random() < 0.2 else ():
            coming.remove(cancelled)
        while dice.random() < 0.6 and (arrived := link.poll()) is not None:
            coming.remove(arrived)
        clock.now_ns += dice.randrange(300)
        if len(coming) > 4:
            before = clock.now_ns
            coming.remove(link.wait())
            assert clock.now_ns >= before
        link._tier.check()
    while coming:
        coming.remove(link.wait())


def test_less_host_memory_takes_longer_and_reads_more(tmp_path: Path) -> None:
    layers = sized(3, 8, 2, width=10)
    trace = make_trace(tmp_path / "trace", random_passes(1, layers, 60, prompt=4), layers, is_full=True)
    rows = {}
    for memory in (None, "100%", "60%", "30%"):
        settings: Any = {} if memory is None else {"host_memory": memory}
        rows[memory] = results(make_study(trace, DISK, **settings), ["lru", "expertly-ahead"], "40%")
    for system in ("lru", "expertly-ahead"):
        in_memory = {memory: of_systems[system] for memory, of_systems in rows.items()}
        assert in_memory[None]["disk_bytes"] is None and 0 < in_memory["100%"]["disk_bytes"] <= 24 * 40, (
            "an expert is read once"
        )
        assert in_memory["100%"]["disk_bytes"] < in_memory["60%"]["disk_bytes"] < in_memory["30%"]["disk_bytes"]
        assert (
            in_memory[None]["tpot_s"]
            < in_memory["100%"]["tpot_s"]
            < in_memory["60%"]["tpot_s"]
            < in_memory["30%"]["tpot_s"]
        )
        if system == "lru":
            assert len({row["bytes_loaded"] for row in in_memory.values()}) == 1, "the device decides as before"
