"""Readers: loads before prefetches, on files that answer when they are told to."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from expertly.core.compiled import compiled
from expertly.core.errors import TransferError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.engine import transfer
from expertly.engine.transfer import Readers
from expertly.store.packed import LayerFile
from tests.engine.disk import Disk, Preads, can_bypass_the_page_cache
from tests.engine.observe import reader_threads
from tests.store.builders import PLAN, expert_bytes, write_store
from tests.waiting import until

pytestmark = pytest.mark.timeout(180)

MIB = 1 << 20
"""The smallest piece of a span."""
SMALL, LARGE = 4096, 4 * MIB


class Bench:
    """Readers over such files, and slots to look at."""

    def __init__(self, expert_nbytes: int, monkeypatch: pytest.MonkeyPatch, num_readers: int = 4) -> None:
        self.disk = Disk(Geometry((LayerGeometry(64, 1, 2048, expert_nbytes // 4096, 2, 1),) * 3))
        self.disk.put(monkeypatch)
        memory = memoryview(bytearray(64 * expert_nbytes))
        self.slots = [memory[slot * expert_nbytes : (slot + 1) * expert_nbytes] for slot in range(64)]
        self.readers = Readers(self.disk.layer_file, self.disk.geometry, lambda layer: memory, num_readers)

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
        self.open()

    def open(self) -> None:
        geometry = Geometry((LayerGeometry(self.num_experts, 1, 2048, self.nbytes // 4096, 2, 1),))
        self.readers = Readers(self.layer_file, geometry, lambda layer: self.memory)

    def layer_file(self, layer: int) -> LayerFile:
        return LayerFile(self.path, 0, None, range(self.num_experts))

    def slot(self, span: Span) -> memoryview:
        return self.memory[span.slot * self.nbytes : (span.slot + 1) * self.nbytes]


@pytest.fixture(params=[2 * 4096, 5 * MIB // 2], ids=["small", "large"])
def on_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[OnDisk]:
    bench = OnDisk(tmp_path / "experts", request.param)
    yield bench
    bench.readers.close()


def test_loads_and_prefetches_bypass_the_page_cache_where_they_can(on_disk: OnDisk) -> None:
    if not can_bypass_the_page_cache(on_disk.path):
        pytest.skip("this file system has no O_DIRECT")
    for begin in (on_disk.readers.submit, on_disk.readers.prefetch, on_disk.readers.submit):
        on_disk.memory[:] = bytes(len(on_disk.memory))
        wanted = [span(expert) for expert in (6, 1, 4, 0, 2, 7)]
        begin(wanted)
        assert sorted(on_disk.readers.wait() for _ in wanted) == sorted(wanted)
        for each in wanted:
            assert bytes(on_disk.slot(each)) == bytes([1 + each.expert]) * on_disk.nbytes
        assert on_disk.readers.poll() is None
    assert on_disk.readers.stats() == {"disk_nbytes": 18 * on_disk.nbytes, "buffered_nbytes": 0}
    on_disk.readers.close()
    on_disk.memory = memoryview(mmap.mmap(-1, on_disk.num_experts * on_disk.nbytes + 64))[64:]
    on_disk.open()
    on_disk.readers.submit([span(6)])
    assert on_disk.readers.wait() == span(6) and bytes(on_disk.slot(span(6))) == bytes([7]) * on_disk.nbytes
    assert on_disk.readers.stats()["buffered_nbytes"] == on_disk.nbytes, "a slot that lies as it may not"


def test_prefetches_go_on_while_nobody_calls(on_disk: OnDisk) -> None:
    on_disk.readers.prefetch([span(expert) for expert in range(6)])
    until(lambda: bytes(on_disk.slot(span(5))) == bytes([6]) * on_disk.nbytes)
    assert {on_disk.readers.wait().expert for _ in range(6)} == set(range(6))


@pytest.mark.parametrize("is_prefetch", [False, True])
def test_a_read_that_falls_short_is_explained(is_prefetch: bool, on_disk: OnDisk) -> None:
    with on_disk.path.open("r+b") as file:
        file.truncate(on_disk.nbytes)
    for spans in ([span(0), span(5)], [span(5)], [span(0)]):  # what is still there may have been written to, too
        (on_disk.readers.prefetch if is_prefetch else on_disk.readers.submit)(spans)
        with pytest.raises(TransferError, match="truncated"):
            on_disk.readers.wait()
        on_disk.readers.drain()


class Reads:
    """A pread that fails with these errors, one after the other, then reads, at most a third at once."""

    def __init__(self, *errors: int) -> None:
        self.errors = list(errors)

    def __call__(self, file: int, buffer: memoryview, offset: int) -> int:
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))
        return os.preadv(file, [buffer[: 1 + len(buffer) // 3]], offset)


@pytest.mark.parametrize("number", [None, errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EIO])
def test_reads_that_come_in_pieces_or_fail_for_now_are_whole_and_others_are_explained(
    number: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(*[] if number is None else [number, number])
    Preads(monkeypatch, reads)
    bench = OnDisk(tmp_path / "experts", SMALL)
    with contextlib.closing(bench.readers) as readers:
        readers.submit([span(3)])
        if number == errno.EIO:
            message = rf"experts: reading {SMALL} bytes at offset {3 * SMALL} failed \(Input"
            with pytest.raises(TransferError, match=message):
                readers.wait()
            assert readers.poll() is None and not readers.num_in_flight
        else:
            assert readers.wait() == span(3) and not reads.errors
            assert bytes(bench.slot(span(3))) == bytes([4]) * SMALL


LAYER = LayerGeometry(4, 2, hidden_size=64, intermediate_size=176, num_matrices=3, itemsize=2)
LAYERS = (LAYER, replace(LAYER, num_experts=3), replace(LAYER, hidden_size=32))  # the last one has two blocks


@pytest.mark.parametrize("segments", [1, 2, 4, 8, 11, 16])
def test_every_span_of_every_expert_has_its_bytes(segments: int, tmp_path: Path) -> None:
    """Of four blocks of 44 neurons segments of P = 8 are half a block, those of P = 11 begin in one and end in the
    next.
    """
    store = write_store(tmp_path / "store", replace(PLAN, layers=LAYERS, sites=("a.x", "b.x", "c.x")))
    geometry, slot = store.geometry(segments), bytearray(LAYER.expert_nbytes)

    def nbytes_of(span: Span) -> int:
        return span.num_segments * geometry.unit_nbytes[span.layer]

    with contextlib.closing(Readers(store.layer_file, geometry, lambda layer: memoryview(slot))) as readers:
        for layer, expert in (
            (layer, expert) for layer, shape in enumerate(LAYERS) for expert in range(shape.num_experts)
        ):
            whole = expert_bytes(layer, expert, store.manifest).tobytes()
            for length in (1, 1, segments, max(1, segments // 2)):
                for segment in range(0, segments - length + 1, length):
                    wanted = Span(layer, expert, segment, length, 0)
                    readers.submit([wanted])
                    assert readers.wait() == wanted
                    begin = segment * geometry.unit_nbytes[layer]
                    assert slot[: nbytes_of(wanted)] == whole[begin : begin + nbytes_of(wanted)]


def test_checksums_are_those_of_the_reference() -> None:
    """XXH3 of the library beside xxhash's, of all short lengths, those around its stripes and blocks, and others."""
    functions = {"xxh3": (ctypes.c_uint64, (ctypes.c_char_p, ctypes.c_int64))}
    xxh3 = compiled("native/_readers", transfer._VERSION, functions).xxh3
    dice = random.Random(0)
    usual = [dice.randrange(241, 99_999) for _ in range(50)]
    for nbytes in (*range(1, 260), 1023, 1024, 1025, 1088, 1089, 2049, *usual):
        data = dice.randbytes(nbytes)
        assert xxh3(data, nbytes) == xxhash.xxh3_64_intdigest(data), nbytes


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
    assert {read[1] for read in bench.disk.until_begun(7)[5:]} == {20, 21}
    bench.wait(3)
    bench.disk.let_end((0, 3), (0, 4))
    bench.wait(2)
    assert {read[1] for read in bench.disk.until_begun(7)[5:]} == {20, 21}, "nothing else begins beside loads"
    bench.disk.let_all_end()
    assert {each.expert for each in bench.wait(5)} == {20, 21, 5, 6, 7}
    assert {read[1] for read in bench.disk.begun[5:7]} == {20, 21}


def test_cancelled_is_what_no_reader_has_begun_of_the_layer_and_may_be_loaded(make: MakeBench) -> None:
    bench = make(LARGE)
    readers = bench.readers
    readers.prefetch([span(1), span(2, layer=1), span(3), span(4), span(5, layer=1)])
    bench.disk.until_begun(4)
    assert readers.stats()["disk_nbytes"] == 5 * LARGE
    assert readers.cancel(0) == [span(3), span(4)], "1 is under way, and 5 is another layer's"
    assert readers.cancel(0) == []
    assert readers.num_in_flight == 3 and readers.stats()["disk_nbytes"] == 3 * LARGE
    readers.submit([span(4)])
    bench.disk.let_all_end()
    assert bench.wait(4) == [span(1), span(4), span(2, layer=1), span(5, layer=1)]
    assert bench.disk.begun == [(0, 1)] * 4 + [(0, 4)] * 4 + [(1, 2)] * 4 + [(1, 5)] * 4, "once each"
    assert bench.disk.read_nbytes == readers.stats()["disk_nbytes"] == 4 * LARGE
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
            seen.append(-int(str(error).split("offset ")[1].split()[0]) // SMALL)
    assert sorted(seen) == [-9, -1, 0, 2, 3]
    bench.readers.prefetch([span(5)])
    assert bench.wait(1) == [span(5)], "the readers live on"


def test_drain_drops_what_has_not_begun(make: MakeBench) -> None:
    bench = make(LARGE)
    bench.readers.prefetch([span(i) for i in range(40)])
    bench.disk.until_begun(4)
    bench.readers.submit([span(50)])

    def let_end_when_all_else_is_cancelled() -> None:
        while bench.readers.stats()["disk_nbytes"] > 2 * LARGE:
            time.sleep(0.001)
        bench.disk.let_all_end()

    threading.Thread(target=let_end_when_all_else_is_cancelled, daemon=True).start()
    bench.readers.drain()
    assert set(bench.disk.begun) == {(0, 0)}, "neither the other prefetches nor the load that waited"
    assert bench.disk.num_ended == len(bench.disk.begun), "nothing is being read any more"
    assert bench.readers.num_in_flight == 0 and bench.readers.poll() is None
    assert bench.readers.stats()["disk_nbytes"] == LARGE
    bench.readers.prefetch([span(3)])
    bench.readers.submit([span(4)])
    assert {each.expert for each in bench.wait(2)} == {3, 4}, "and it goes on"


def test_close_ends_with_work_queued(make: MakeBench) -> None:
    bench = make(SMALL)
    bench.readers.prefetch([span(i) for i in range(40)])
    bench.disk.until_begun(4)
    bench.readers.submit([span(i) for i in range(40, 50)])
    bench.disk.let_all_end()
    bench.readers.close()
    bench.readers.close()
    assert not reader_threads()
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


@pytest.mark.parametrize("expert_nbytes", [SMALL, 5 * MIB // 2])
def test_soak(expert_nbytes: int, make: MakeBench) -> None:
    """Whatever races with what, every span comes once, whole, or is cancelled, never both."""
    bench = make(expert_nbytes)
    bench.disk.let_all_end()
    readers, dice, free = bench.readers, random.Random(expert_nbytes), list(range(64))
    in_flight: dict[Span, bool] = {}  # whether it is a prefetch
    counts: Counter[str] = Counter()

    def end(span: Span, how: str) -> None:
        del in_flight[span]
        if how == "arrived":
            assert bench.slots[span.slot] == bench.disk.content(span)
            bench.slots[span.slot][:] = bytes(expert_nbytes)
        free.append(span.slot)
        counts[how] += 1

    for step in range(20_000):
        if step >= 400 and counts["cancelled"] > 5 and counts["dropped"]:  # a fast disk leaves little to cancel
            break
        chance = dice.random()
        if chance < 0.4:
            count, is_prefetch = min(len(free), dice.randint(1, 6)), dice.random() < 0.6
            spans = [Span(dice.randrange(3), dice.randrange(1, 64), 0, 1, free.pop()) for _ in range(count)]
            in_flight.update(dict.fromkeys(spans, is_prefetch))
            (readers.prefetch if is_prefetch else readers.submit)(spans)
        elif chance < 0.55:
            layer = dice.randrange(3)
            for item in readers.cancel(layer):
                assert in_flight[item] and item.layer == layer
                end(item, "cancelled")
        elif chance < 0.9 and in_flight:
            end(readers.wait(), "arrived")
        elif chance < 0.99:
            while (polled := readers.poll()) is not None:
                end(polled, "arrived")
        else:
            readers.drain()
            for each in list(in_flight):
                end(each, "dropped")
        assert readers.num_in_flight == len(in_flight)
    while in_flight:
        end(readers.wait(), "arrived")
    assert readers.poll() is None
    assert counts["cancelled"] > 5 and counts["arrived"] > 100 and counts["dropped"]


def test_a_forked_child_closes_what_is_in_flight_without_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has none of the threads, of which one may hold the lock."""
    library = transfer.library()
    with contextlib.closing(OnDisk(tmp_path / "experts", SMALL).readers) as readers:
        readers.prefetch([span(expert) for expert in range(8)])
        child = os.fork()
        if not child:
            for name in ("readers_cancel", "readers_drain", "readers_hush", "readers_close"):
                monkeypatch.setattr(library, name, lambda *_: os._exit(3))
            readers.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
