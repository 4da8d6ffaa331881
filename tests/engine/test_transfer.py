"""Readers: loads before prefetches, on files that answer when they are told to."""

from __future__ import annotations

import contextlib
import mmap
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from expertly.core.errors import TransferError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.engine import reading
from expertly.engine.reading import MIN_READ_NBYTES, ReadQueue
from expertly.engine.transfer import Readers
from expertly.store.packed import LayerFile
from expertly.store.reader import ExpertFile
from tests.engine.disk import Disk

pytestmark = pytest.mark.timeout(180)

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


class OnDisk:
    """Readers over a real file of experts, each filled with one byte of its own, and their slots."""

    num_experts = 8

    def __init__(self, path: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        path.write_bytes(b"".join(bytes([1 + expert]) * self.nbytes for expert in range(self.num_experts)))
        self.path = path
        self.memory = memoryview(mmap.mmap(-1, self.num_experts * self.nbytes))
        geometry = Geometry((LayerGeometry(self.num_experts, 1, 2048, self.nbytes // 4096, 2, 1),))
        self.readers = Readers(self, geometry, self.slot)

    def layer_file(self, layer: int) -> LayerFile:
        return LayerFile(self.path, 0, None, None, range(self.num_experts))

    def slot(self, span: Span) -> memoryview:
        return self.memory[span.slot * self.nbytes : (span.slot + 1) * self.nbytes]


@pytest.fixture(params=[2 * 4096, 5 * MIN_READ_NBYTES // 2], ids=["small", "large"])
def on_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[OnDisk]:
    bench = OnDisk(tmp_path / "experts", request.param)
    yield bench
    bench.readers.close()


def needs_no_reader(bench: OnDisk) -> None:
    try:
        ReadQueue().close()
    except OSError:
        pytest.skip("this system has no such reads")
    with contextlib.closing(ExpertFile(bench.path)) as file:
        if not file.is_direct:
            pytest.skip("this file system has no O_DIRECT")


def test_loads_and_prefetches_need_no_reader(on_disk: OnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_no_reader(on_disk)
    monkeypatch.setattr(ExpertFile, "read_into", lambda *_: pytest.fail("a reader read"))
    for begin in (on_disk.readers.submit, on_disk.readers.prefetch, on_disk.readers.submit):
        on_disk.memory[:] = bytes(len(on_disk.memory))
        wanted = [span(expert) for expert in (6, 1, 4, 0, 2, 7)]
        begin(wanted)
        assert sorted(on_disk.readers.wait() for _ in wanted) == sorted(wanted)
        for one in wanted:
            assert bytes(on_disk.slot(one)) == bytes([1 + one.expert]) * on_disk.nbytes
        assert on_disk.readers.poll() is None
    assert on_disk.readers.stats()["disk_nbytes"] == 18 * on_disk.nbytes
    assert on_disk.readers.stats()["buffered_nbytes"] == 0


def test_prefetches_without_a_reader_begin_only_when_called(on_disk: OnDisk) -> None:
    needs_no_reader(on_disk)
    assert on_disk.readers.prefetches_when_called
    wanted = [span(expert) for expert in range(6)]
    on_disk.readers.prefetch(wanted)
    time.sleep(0.2)
    there = [bytes(on_disk.slot(one)) == bytes([1 + one.expert]) * on_disk.nbytes for one in wanted]
    assert there == [expert < (4 if on_disk.nbytes < MIN_READ_NBYTES else 1) for expert in range(6)]
    assert on_disk.readers.poll() is not None
    time.sleep(0.2)
    assert len(on_disk.readers.cancel(0)) == (0 if on_disk.nbytes < MIN_READ_NBYTES else 4), "polling began more"
    while on_disk.readers.num_in_flight:
        on_disk.readers.wait()


def test_a_reader_reads_what_cannot_bypass_the_page_cache(on_disk: OnDisk) -> None:
    needs_no_reader(on_disk)
    on_disk.memory = memoryview(mmap.mmap(-1, on_disk.num_experts * on_disk.nbytes + 64))[64:]
    on_disk.readers.submit([span(6)])
    on_disk.readers.prefetch([span(1)])
    assert {on_disk.readers.wait(), on_disk.readers.wait()} == {span(6), span(1)}
    assert bytes(on_disk.slot(span(6))) == bytes([7]) * on_disk.nbytes
    assert on_disk.readers.stats()["buffered_nbytes"] == 2 * on_disk.nbytes


def test_prefetches_begin_when_the_last_load_is_read_without_a_reader(on_disk: OnDisk) -> None:
    needs_no_reader(on_disk)
    on_disk.readers.submit([span(0), span(1)])
    on_disk.readers.prefetch([span(2), span(3), span(4), span(5)])
    assert on_disk.readers.cancel(0, [5]) == [span(5)]
    assert [on_disk.readers.wait().expert for _ in range(5)][2:] == [2, 3, 4] or on_disk.nbytes < MIN_READ_NBYTES
    assert not on_disk.readers.num_in_flight


def test_more_reads_than_the_system_takes_at_once_wait_for_it(on_disk: OnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_no_reader(on_disk)
    begin, room = ReadQueue.begin, [2, 0, 1]
    monkeypatch.setattr(ReadQueue, "begin", lambda queue, reads: begin(queue, reads[: room.pop(0) if room else 64]))
    on_disk.readers.submit([span(0), span(1), span(2)])
    on_disk.readers.prefetch([span(3), span(4), span(5)])
    assert {on_disk.readers.wait().expert for _ in range(6)} == set(range(6))
    for expert in range(6):
        assert bytes(on_disk.slot(span(expert))) == bytes([1 + expert]) * on_disk.nbytes
    assert len(room) < 3 and not on_disk.readers.num_in_flight


def test_reads_that_fail_or_find_no_room_are_done_by_readers(on_disk: OnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two fail and leave nothing, and then the system takes no more, in the middle of a large span."""
    needs_no_reader(on_disk)
    begin, ended, room, failing = ReadQueue.begin, ReadQueue.ended, [1, 1], [-5, -5]

    def fail(queue: ReadQueue, timeout_ns: int = 0) -> list[tuple[int, int]]:
        found = ended(queue, timeout_ns)
        for tag, _ in found:
            buffer = on_disk.readers._queued[tag].read.buffer
            buffer[:] = bytes(len(buffer))
        return [(tag, failing.pop() if failing else nbytes) for tag, nbytes in found]

    monkeypatch.setattr(ReadQueue, "begin", lambda queue, reads: begin(queue, reads[: room.pop() if room else 0]))
    monkeypatch.setattr(ReadQueue, "ended", fail)
    on_disk.readers.submit([span(0), span(1)])
    on_disk.readers.prefetch([span(2), span(3)])
    assert {on_disk.readers.wait().expert for _ in range(4)} == set(range(4))
    for expert in range(4):
        assert bytes(on_disk.slot(span(expert))) == bytes([1 + expert]) * on_disk.nbytes
    on_disk.readers.prefetch([span(4)])
    assert on_disk.readers.wait() == span(4), "and they go on"
    assert not failing and not on_disk.readers.num_in_flight


@pytest.mark.parametrize("is_prefetch", [False, True])
def test_a_read_without_a_reader_that_falls_short_is_explained(is_prefetch: bool, on_disk: OnDisk) -> None:
    with on_disk.path.open("r+b") as file:
        file.truncate(on_disk.nbytes)
    for spans in ([span(0), span(5)], [span(5)], [span(0)]):  # what is still there may have been written to, too
        (on_disk.readers.prefetch if is_prefetch else on_disk.readers.submit)(spans)
        with pytest.raises(TransferError, match="truncated"):
            on_disk.readers.wait()
        on_disk.readers.drain()


def test_draining_waits_for_reads_without_a_reader(on_disk: OnDisk) -> None:
    for _ in range(20):
        on_disk.readers.submit([span(expert) for expert in range(8)])
        on_disk.readers.drain()
        on_disk.memory[:] = bytes(len(on_disk.memory))
        assert on_disk.readers.poll() is None
    assert not any(on_disk.memory), "a read went on after that"


def span(expert: int, layer: int = 0) -> Span:
    return Span(layer, expert, 0, 1, expert)


def test_a_large_prefetch_goes_alone_and_a_load_comes_right_after_it(make: MakeBench) -> None:
    bench = make(LARGE)
    bench.readers.prefetch([span(1), span(2), span(3)])
    assert bench.disk.until_begun(4) == [(0, 1)] * 4, "cut over the four readers; the next one waits"
    bench.readers.submit([span(9)])
    bench.disk.let_end(*[(0, 1)] * 4)
    assert bench.disk.until_begun(8)[4:] == [(0, 9)] * 4, "the load overtakes 2 and 3"
    assert bench.wait(1) == [span(1)]
    bench.disk.let_end(*[(0, 9)] * 3)
    assert len(bench.disk.until_begun(8)) == 8, "nothing begins while a part of the load is being read"
    bench.disk.let_end((0, 9))
    assert bench.disk.until_begun(12)[8:] == [(0, 2)] * 4, "then the queue goes on where it was"
    assert bench.wait(1) == [span(9)]
    bench.disk.let_all_end()
    assert bench.wait(2) == [span(2), span(3)]
    assert not bench.readers.num_in_flight


def test_of_small_spans_as_many_as_readers_are_under_way(make: MakeBench) -> None:
    bench = make(SMALL)
    bench.readers.prefetch([span(i) for i in range(8)])
    assert sorted(bench.disk.until_begun(4)) == [(0, i) for i in range(4)]
    bench.disk.let_end((0, 2))
    assert bench.disk.until_begun(5)[4:] == [(0, 4)], "in the order in which they were submitted"
    bench.readers.submit([span(20), span(21)])
    bench.disk.let_end((0, 0), (0, 1))
    bench.wait(3)
    assert {read[1] for read in bench.disk.until_begun(6)[5:]} <= {20, 21}
    bench.disk.let_end((0, 3), (0, 4))
    bench.wait(2)
    assert len(bench.disk.until_begun(6)) == 6, "small loads travel together, and nothing begins beside them"
    bench.disk.let_all_end()
    assert {one.expert for one in bench.wait(5)} == {20, 21, 5, 6, 7}
    assert {read[1] for read in bench.disk.begun[5:7]} == {20, 21}


def test_cancelled_is_what_no_reader_has_begun_of_the_layer_and_may_be_loaded(make: MakeBench) -> None:
    bench = make(LARGE)
    readers = bench.readers
    readers.prefetch([span(1), span(2, layer=1), span(3), span(4), span(5, layer=1)])
    bench.disk.until_begun(4)
    assert readers.asked_nbytes == 5 * LARGE
    assert readers.cancel(0, [1, 3, 5]) == [span(3)], "1 is under way, and 5 is another layer's"
    assert readers.cancel(0) == [span(4)]
    assert readers.cancel(0) == []
    assert readers.num_in_flight == 3 and readers.asked_nbytes == 3 * LARGE
    readers.submit([span(4)])
    bench.disk.let_all_end()
    assert bench.wait(4) == [span(1), span(4), span(2, layer=1), span(5, layer=1)]
    assert bench.disk.begun == [(0, 1)] * 4 + [(0, 4)] * 4 + [(1, 2)] * 4 + [(1, 5)] * 4, "once each"
    assert readers.buffered_nbytes == readers.asked_nbytes == 4 * LARGE
    assert readers.poll() is None


def test_a_failed_read_is_raised_and_the_others_come(make: MakeBench) -> None:
    bench = make(SMALL)
    bench.disk.fails = lambda layer, expert: expert in (1, 9)
    bench.readers.submit([span(9)])
    bench.disk.until_begun(1)
    bench.readers.prefetch([span(0), span(1), span(2)])
    bench.readers.submit([span(3)])
    bench.disk.let_all_end()
    seen: list[int] = []
    for _ in range(5):
        try:
            seen.append(bench.readers.wait().expert)
        except TransferError as error:
            seen.append(-int(str(error).split("expert ")[1].split()[0]))
    assert sorted(seen) == [-9, -1, 0, 2, 3]
    bench.readers.prefetch([span(5)])
    assert bench.wait(1) == [span(5)], "the readers live on"


def test_drain_drops_what_has_not_begun(make: MakeBench) -> None:
    bench = make(LARGE)
    bench.readers.prefetch([span(i) for i in range(40)])
    bench.disk.until_begun(4)
    bench.readers.submit([span(50)])

    def let_end_when_all_else_is_cancelled() -> None:
        while bench.readers.asked_nbytes > 2 * LARGE:
            time.sleep(0.001)
        bench.disk.let_all_end()

    threading.Thread(target=let_end_when_all_else_is_cancelled, daemon=True).start()
    bench.readers.drain()
    assert set(bench.disk.begun) == {(0, 0), (0, 50)}
    assert bench.disk.num_ended == len(bench.disk.begun), "nothing is being read any more"
    assert bench.readers.num_in_flight == 0 and bench.readers.poll() is None
    assert bench.readers.asked_nbytes == 2 * LARGE
    bench.readers.prefetch([span(3)])
    bench.readers.submit([span(4)])
    assert {one.expert for one in bench.wait(2)} == {3, 4}, "and it goes on"


def test_close_ends_with_work_queued(make: MakeBench) -> None:
    bench = make(SMALL)
    before = threading.active_count()
    bench.readers.prefetch([span(i) for i in range(40)])
    bench.disk.until_begun(4)
    bench.readers.submit([span(i) for i in range(40, 50)])
    bench.disk.let_all_end()
    bench.readers.close()
    bench.readers.close()
    assert threading.active_count() == before - 4
    num_begun = len(bench.disk.begun)
    time.sleep(0.02)
    assert len(bench.disk.begun) == num_begun


def test_prefetches_behind_loads_start_by_themselves(make: MakeBench) -> None:
    """Whether the last load ends just before or just after: nobody has to poll for it."""
    bench = make(SMALL)
    bench.disk.let_all_end()
    for expert in range(300):
        bench.readers.submit([span(expert % 8)])
        if expert % 3:
            time.sleep(random.Random(expert).random() * 2e-4)
        bench.readers.prefetch([span(expert % 8 + 8)])
        bench.wait(2)


def test_an_interrupt_at_any_line_of_the_caller_leaves_readers_that_work(make: MakeBench) -> None:
    bench = make(SMALL)
    bench.disk.let_all_end()
    readers = bench.readers

    def use() -> None:
        readers.prefetch([span(1), span(2, layer=1), span(3)])
        readers.submit([span(4), span(5)])
        readers.cancel(0)
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
        readers.prefetch([span(6)])
        readers.submit([span(7)])
        assert {one.expert for one in bench.wait(2)} == {6, 7}, f"line {at}"
    assert at > 50


@pytest.mark.parametrize("expert_nbytes", [SMALL, 5 * MIN_READ_NBYTES // 2])
def test_soak(expert_nbytes: int, make: MakeBench) -> None:
    """Whatever races with what, every span comes once, whole, or is cancelled, never both."""
    bench = make(expert_nbytes)
    bench.disk.let_all_end()
    readers, dice, free = bench.readers, random.Random(expert_nbytes), list(range(64))
    in_flight: dict[Span, bool] = {}  # whether it is a prefetch
    counts: Counter[str] = Counter()

    def end(one: Span, how: str) -> None:
        del in_flight[one]
        if how == "arrived":
            assert bench.slots[one.slot] == bench.disk.content(one)
            bench.slots[one.slot] = bytearray(expert_nbytes)
        free.append(one.slot)
        counts[how] += 1

    for _ in range(1000):
        what = dice.random()
        if what < 0.4:
            count, is_prefetch = min(len(free), dice.randint(1, 6)), dice.random() < 0.6
            spans = [Span(dice.randrange(3), dice.randrange(1, 64), 0, 1, free.pop()) for _ in range(count)]
            in_flight.update(dict.fromkeys(spans, is_prefetch))
            (readers.prefetch if is_prefetch else readers.submit)(spans)
        elif what < 0.55:
            layer = dice.randrange(3)
            for one in readers.cancel(layer):
                assert in_flight[one] and one.layer == layer
                end(one, "cancelled")
        elif what < 0.9 and in_flight:
            end(readers.wait(), "arrived")
        elif what < 0.99:
            while (polled := readers.poll()) is not None:
                end(polled, "arrived")
        else:
            readers.drain()
            for one in list(in_flight):
                end(one, "dropped")
        assert readers.num_in_flight == len(in_flight)
    while in_flight:
        end(readers.wait(), "arrived")
    assert readers.poll() is None
    assert counts["cancelled"] > 20 and counts["arrived"] > 100 and counts["dropped"]
