"""Readers: demands before what is loaded ahead, on files that answer when they are told to."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from expertly.core.errors import TransferError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.engine import reading
from expertly.engine.reading import MIN_READ_NBYTES
from expertly.engine.transfer import Readers
from tests.engine.disk import Disk

pytestmark = pytest.mark.timeout(60)

SMALL, LARGE = 4096, 4 * MIN_READ_NBYTES


class Bench:
    """Readers over such files, and slots to look at."""

    def __init__(self, expert_nbytes: int, monkeypatch: pytest.MonkeyPatch, num_readers: int = 4) -> None:
        self.disk = Disk(Geometry((LayerGeometry(64, 1, 2048, expert_nbytes // 4096, 2, 1),) * 3))
        monkeypatch.setattr(reading, "ExpertFile", self.disk.open)
        self.slots = [bytearray(expert_nbytes) for _ in range(64)]
        self.readers = Readers(self.disk, self.disk.geometry, lambda p: memoryview(self.slots[p.slot]), num_readers)

    def wait(self, count: int) -> list[Span]:
        spans = sorted(self.readers.wait() for _ in range(count))
        for span in spans:
            assert self.slots[span.slot] == self.disk.content(span)
        return spans


MakeBench = Callable[..., Bench]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeBench]:
    made: list[Bench] = []

    def make(expert_nbytes: int, num_readers: int = 4) -> Bench:
        made.append(Bench(expert_nbytes, monkeypatch, num_readers))
        return made[-1]

    yield make
    for bench in made:
        bench.disk.let_all_end()
        bench.readers.close()


def span(expert: int, layer: int = 0) -> Span:
    return Span(layer, expert, 0, 1, expert)


def test_a_large_span_ahead_goes_alone_and_a_demand_comes_right_after_it(make: MakeBench) -> None:
    bench = make(LARGE)
    bench.readers.submit_ahead([span(1), span(2), span(3)])
    assert bench.disk.until_begun(4) == [(0, 1)] * 4, "cut over the four readers; the next one waits"
    bench.readers.submit([span(9)])
    bench.disk.let_end(*[(0, 1)] * 4)
    assert bench.disk.until_begun(8)[4:] == [(0, 9)] * 4, "the demand overtakes 2 and 3"
    assert bench.wait(1) == [span(1)]
    bench.disk.let_end(*[(0, 9)] * 3)
    assert len(bench.disk.until_begun(8)) == 8, "nothing begins while a part of the demand is being read"
    bench.disk.let_end((0, 9))
    assert bench.disk.until_begun(12)[8:] == [(0, 2)] * 4, "then the queue goes on where it was"
    assert bench.wait(1) == [span(9)]
    bench.disk.let_all_end()
    assert bench.wait(2) == [span(2), span(3)]
    assert not bench.readers.num_in_flight


def test_what_has_begun_ends_before_the_demands(make: MakeBench) -> None:
    bench = make(3 * MIN_READ_NBYTES, num_readers=2)  # two parts each
    bench.readers.submit_ahead([span(1), span(2)])
    bench.disk.until_begun(2)
    bench.readers.submit([span(8), span(9)])
    bench.disk.let_all_end()
    bench.wait(4)
    assert bench.disk.begun[:2] == [(0, 1)] * 2
    assert sorted(bench.disk.begun[2:6]) == [(0, 8)] * 2 + [(0, 9)] * 2
    assert bench.disk.begun[6:] == [(0, 2)] * 2


def test_of_small_spans_as_many_as_readers_are_under_way(make: MakeBench) -> None:
    bench = make(SMALL)
    bench.readers.submit_ahead([span(i) for i in range(8)])
    assert sorted(bench.disk.until_begun(4)) == [(0, i) for i in range(4)]
    bench.disk.let_end((0, 2))
    assert bench.disk.until_begun(5)[4:] == [(0, 4)], "in the order in which they were submitted"
    bench.readers.submit([span(20), span(21)])
    bench.disk.let_end((0, 0), (0, 1))
    bench.wait(3)
    assert {read[1] for read in bench.disk.until_begun(6)[5:]} <= {20, 21}
    bench.disk.let_end((0, 3), (0, 4))
    bench.wait(2)
    assert len(bench.disk.until_begun(6)) == 6, "small demands travel together, and nothing begins beside them"
    bench.disk.let_all_end()
    assert {one.expert for one in bench.wait(5)} == {20, 21, 5, 6, 7}
    assert {read[1] for read in bench.disk.begun[5:7]} == {20, 21}


def test_withdrawn_is_what_no_reader_has_begun_of_the_layer(make: MakeBench) -> None:
    bench = make(LARGE)
    readers = bench.readers
    readers.submit_ahead([span(1), span(2, layer=1), span(3), span(4), span(5, layer=1)])
    bench.disk.until_begun(4)
    assert readers.asked_nbytes == 5 * LARGE
    assert readers.withdraw(0) == [span(3), span(4)], "1 is under way"
    assert readers.withdraw(0) == []
    assert readers.num_in_flight == 3 and readers.asked_nbytes == 3 * LARGE
    bench.disk.let_all_end()
    assert bench.wait(3) == [span(1), span(2, layer=1), span(5, layer=1)]
    assert bench.disk.begun == [(0, 1)] * 4 + [(1, 2)] * 4 + [(1, 5)] * 4
    assert readers.buffered_nbytes == readers.asked_nbytes == 3 * LARGE
    assert readers.poll() is None


def test_the_spans_of_one_expert_are_withdrawn_alone(make: MakeBench) -> None:
    bench = make(LARGE)
    readers = bench.readers
    readers.submit_ahead([span(1), span(2), span(3), span(3, layer=1)])
    bench.disk.until_begun(4)
    assert readers.withdraw(0, [1, 3]) == [span(3)], "1 is under way, and the other 3 is another layer's"
    bench.disk.let_all_end()
    assert bench.wait(3) == [span(1), span(2), span(3, layer=1)]
    assert bench.disk.begun == [(0, 1)] * 4 + [(0, 2)] * 4 + [(1, 3)] * 4


def test_what_was_withdrawn_may_be_demanded(make: MakeBench) -> None:
    bench = make(LARGE)
    bench.readers.submit_ahead([span(1), span(2)])
    bench.disk.until_begun(4)
    bench.readers.submit(bench.readers.withdraw(0))
    bench.disk.let_all_end()
    assert bench.wait(2) == [span(1), span(2)]
    assert len(bench.disk.begun) == 8, "once each"


def test_a_failed_read_ahead_is_raised_and_the_others_come(make: MakeBench) -> None:
    bench = make(SMALL)
    bench.disk.let_all_end()
    bench.disk.fails = lambda layer, expert: expert == 1
    bench.readers.submit_ahead([span(0), span(1), span(2)])
    bench.readers.submit([span(3)])
    seen: list[int] = []
    for _ in range(4):
        try:
            seen.append(bench.readers.wait().expert)
        except TransferError as error:
            assert "expert 1" in str(error)
            seen.append(-1)
    assert sorted(seen) == [-1, 0, 2, 3]
    bench.readers.submit_ahead([span(5)])
    assert bench.wait(1) == [span(5)], "the readers live on"


def test_a_failed_demand_does_not_freeze_the_queue(make: MakeBench) -> None:
    bench = make(SMALL)
    bench.disk.fails = lambda layer, expert: expert == 9
    bench.readers.submit([span(9)])
    bench.disk.until_begun(1)
    bench.readers.submit_ahead([span(1)])
    bench.disk.let_all_end()
    with pytest.raises(TransferError):
        bench.readers.wait()
    assert bench.wait(1) == [span(1)]


def test_drain_drops_what_has_not_begun(make: MakeBench) -> None:
    bench = make(LARGE)
    bench.readers.submit_ahead([span(i) for i in range(40)])
    bench.disk.until_begun(4)
    bench.readers.submit([span(50)])
    threading.Timer(0.05, bench.disk.let_all_end).start()
    bench.readers.drain()
    assert set(bench.disk.begun) == {(0, 0), (0, 50)}
    assert bench.disk.num_ended == len(bench.disk.begun), "nothing is being read any more"
    assert bench.readers.num_in_flight == 0 and bench.readers.poll() is None
    assert bench.readers.asked_nbytes == 2 * LARGE
    bench.readers.submit_ahead([span(3)])
    bench.readers.submit([span(4)])
    assert {one.expert for one in bench.wait(2)} == {3, 4}, "and it goes on"


def test_close_ends_with_work_queued(make: MakeBench) -> None:
    bench = make(SMALL)
    before = threading.active_count()
    bench.readers.submit_ahead([span(i) for i in range(40)])
    bench.disk.until_begun(4)
    bench.readers.submit([span(i) for i in range(40, 50)])
    bench.disk.let_all_end()
    bench.readers.close()
    bench.readers.close()
    assert threading.active_count() == before - 4
    num_begun = len(bench.disk.begun)
    time.sleep(0.02)
    assert len(bench.disk.begun) == num_begun


def test_a_queue_that_was_submitted_behind_demands_starts_by_itself(make: MakeBench) -> None:
    """Whether the last demand ends just before or just after: nobody has to poll for it."""
    bench = make(SMALL)
    bench.disk.let_all_end()
    for expert in range(300):
        bench.readers.submit([span(expert % 8)])
        if expert % 3:
            time.sleep(random.Random(expert).random() * 2e-4)
        bench.readers.submit_ahead([span(expert % 8 + 8)])
        bench.wait(2)


def test_an_interrupt_at_any_line_of_the_caller_leaves_readers_that_work(make: MakeBench) -> None:
    bench = make(SMALL)
    bench.disk.let_all_end()
    readers = bench.readers

    def use() -> None:
        readers.submit_ahead([span(1), span(2, layer=1), span(3)])
        readers.submit([span(4), span(5)])
        readers.withdraw(0)
        while readers.num_in_flight:
            readers.wait()

    for at in range(1, 10_000):
        left = at

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal left
            if "/expertly/engine/" not in frame.f_code.co_filename:
                return None
            left -= event == "line"
            if event == "line" and left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            use()
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        readers.drain()
        readers.submit_ahead([span(6)])
        readers.submit([span(7)])
        assert {one.expert for one in bench.wait(2)} == {6, 7}, f"line {at}"
    assert at > 50


@pytest.mark.parametrize("expert_nbytes", [SMALL, 5 * MIN_READ_NBYTES // 2])
def test_soak(expert_nbytes: int, make: MakeBench) -> None:
    """Every span comes once or is withdrawn, never both, with its own bytes, whatever races with what."""
    bench = make(expert_nbytes)
    bench.disk.let_all_end()
    readers, dice = bench.readers, random.Random(expert_nbytes)
    free, in_flight, ahead = list(range(64)), set[Span](), set[Span]()
    num_withdrawn, num_arrived = 0, 0

    def arrived(one: Span) -> None:
        nonlocal num_arrived
        in_flight.remove(one)
        ahead.discard(one)
        assert bench.slots[one.slot] == bench.disk.content(one)
        bench.slots[one.slot] = bytearray(expert_nbytes)
        free.append(one.slot)
        num_arrived += 1

    end = time.perf_counter() + 1.0
    while time.perf_counter() < end:
        what = dice.random()
        if what < 0.4 and len(free) > 8:
            count = dice.randint(1, 6)
            new = [Span(dice.randrange(3), dice.randrange(1, 64), 0, 1, free.pop()) for _ in range(count)]
            in_flight.update(new)
            if dice.random() < 0.4:
                readers.submit(new)
            else:
                ahead.update(new)
                readers.submit_ahead(new)
        elif what < 0.55:
            layer = dice.randrange(3)
            gone = readers.withdraw(layer)
            num_withdrawn += len(gone)
            assert all(one.layer == layer for one in gone)
            for one in gone:
                ahead.remove(one)
                in_flight.remove(one)
                free.append(one.slot)
        elif what < 0.9 and in_flight:
            arrived(readers.wait())
        elif what < 0.999:
            while (polled := readers.poll()) is not None:
                arrived(polled)
        else:
            readers.drain()
            free += [one.slot for one in in_flight]
            in_flight.clear()
            ahead.clear()
        assert readers.num_in_flight == len(in_flight)
    while in_flight:
        arrived(readers.wait())
    assert num_withdrawn > 20 and num_arrived > 100
    assert readers.poll() is None
