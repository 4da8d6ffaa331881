"""Compressed experts through the readers: right bytes at every P, from disk and from memory; damage is told."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from expertly.core.errors import BudgetError, ConfigError, TransferError
from expertly.core.messages import Span
from expertly.engine import frame_reads
from expertly.engine.sources import make_source
from expertly.store.frames import FrameDecoder
from expertly.store.packed import PackedStore
from expertly.store.reader import ExpertFile
from tests.engine.frames import LAYERS, FrameBench, write_store
from tests.store.builders import write_store as write_plain_store

pytestmark = pytest.mark.timeout(60)

EVERYTHING = 10 * sum(layer.nbytes for layer in LAYERS)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> PackedStore:
    return write_store(tmp_path_factory.mktemp("planes") / "store")


@pytest.fixture
def own(tmp_path: Path) -> PackedStore:
    return write_store(tmp_path / "store")


MakeBench = Callable[..., FrameBench]


@pytest.fixture
def make(store: PackedStore) -> Iterator[MakeBench]:
    made: list[FrameBench] = []

    def make(segments: int = 1, compressed_nbytes: int = 0, of: PackedStore = store) -> FrameBench:
        made.append(FrameBench(of, segments, compressed_nbytes))
        return made[-1]

    yield make
    for bench in made:
        bench.readers.close()


class Reads:
    """Counts what is read of expert files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[int, int]] = []
        read_into = ExpertFile.read_into

        def counted(file: ExpertFile, offset: int, buffers: Sequence[memoryview]) -> bool:
            self.done.append((offset, sum(map(len, buffers))))
            return read_into(file, offset, buffers)

        monkeypatch.setattr(ExpertFile, "read_into", counted)


@pytest.mark.parametrize("compressed_nbytes", [0, EVERYTHING // 20, EVERYTHING])
@pytest.mark.parametrize("segments", [1, 2, 4, 8, 11, 16])
def test_every_span_of_every_expert(segments: int, compressed_nbytes: int, make: MakeBench) -> None:
    bench = make(segments, compressed_nbytes)
    for num_segments in {1, segments, max(1, segments // 2)}:
        for _ in range(2):
            bench.load(bench.spans(num_segments))


@pytest.mark.parametrize("segments", [1, 4])
def test_a_span_is_one_read_of_the_pages_that_its_frames_lie_in(
    segments: int, make: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    bench = make(segments)
    spans = [span for span in bench.spans() if span.layer < 2]
    bench.load(spans)
    assert len(reads.done) == len(spans)
    assert all(offset % 4096 == 0 and nbytes % 4096 == 0 for offset, nbytes in reads.done)
    stats = bench.readers.stats()
    stored = sum(index.stored_nbytes for index in bench.store.frames[:2])
    assert stored <= stats["disk_nbytes"] == sum(nbytes for _, nbytes in reads.done) <= stored + 2 * 4096 * len(spans)
    assert stats["decoded_nbytes"] == sum(layer.nbytes for layer in LAYERS[:2]) and stats["decode_ns"] > 0
    assert stats["buffered_nbytes"] == (0 if ExpertFile(bench.store.frames[0].path).is_direct else stats["disk_nbytes"])


def test_a_segment_of_half_a_frame_decodes_the_whole(make: MakeBench) -> None:
    bench = make(8)
    bench.load([span for span in bench.spans() if span.layer == 0])
    assert bench.readers.stats()["decoded_nbytes"] == 2 * LAYERS[0].nbytes


def test_readers_share_an_expert_and_decode_at_the_same_time(make: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(4)
    decode = FrameDecoder.decode

    def meet(*args: Any) -> None:
        together.wait(20)
        decode(*args)

    monkeypatch.setattr(frame_reads, "MIN_DECODE_NBYTES", 1)
    monkeypatch.setattr(FrameDecoder, "decode", meet)
    make().load([Span(0, 2, 0, 1, 0)])


@pytest.mark.parametrize("compressed_nbytes", [0, EVERYTHING])
def test_what_no_scratch_would_hold_is_cut_at_frames(
    compressed_nbytes: int, make: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_reads, "MAX_SCRATCH_NBYTES", 4096)  # so one frame and its pages
    reads = Reads(monkeypatch)
    bench = make(1, compressed_nbytes)
    bench.load(bench.spans())
    assert max(nbytes for _, nbytes in reads.done) <= 5 * 4096 + 4096
    assert len(reads.done) > len(bench.spans())


# -- what stays compressed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 4, 11])
def test_what_stays_is_not_read_again(segments: int, make: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(segments, EVERYTHING)
    bench.load(bench.spans())
    read = bench.readers.stats()["disk_nbytes"]
    assert bench.readers.stats()["compressed_hit_nbytes"] == 0
    reads = Reads(monkeypatch)
    bench.load(bench.spans(segments))
    assert not reads.done
    stats = bench.readers.stats()
    assert stats["disk_nbytes"] == read and stats["compressed_hit_nbytes"] == bench.store.experts_nbytes


def test_its_memory_is_what_was_given(make: MakeBench) -> None:
    nbytes = LAYERS[0].expert_nbytes * 4
    bench = make(1, nbytes)
    for _ in range(3):
        bench.load(bench.spans())
    assert 0 < bench.readers.compressed_nbytes <= nbytes
    assert sum(map(len, bench.pool._memory)) <= nbytes
    held = sum(bench.pool.tier.holds(*span[:3]) for span in bench.spans())
    assert held == sum(bench.pool.tier.slots_per_class)
    assert 0 < bench.readers.stats()["compressed_hit_nbytes"] < 2 * bench.store.experts_nbytes


def test_what_is_withdrawn_does_not_stay(make: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(1, EVERYTHING)
    may_read, reading = threading.Event(), threading.Event()
    read_into = ExpertFile.read_into

    def wait_and_read(*args: Any) -> bool:
        reading.set()
        may_read.wait(20)
        return read_into(*args)

    monkeypatch.setattr(ExpertFile, "read_into", wait_and_read)
    bench.readers.submit([Span(0, 0, 0, 1, 0)])
    assert reading.wait(20)
    bench.readers.submit_ahead([Span(0, 1, 0, 1, 1), Span(1, 1, 0, 1, 2)])
    gone = bench.readers.withdraw(0)
    assert gone == [Span(0, 1, 0, 1, 1)]
    may_read.set()
    for _ in range(2):
        bench.check(bench.readers.wait())
    tier = bench.pool.tier
    assert [tier.holds(*one) for one in ((0, 0, 0), (0, 1, 0), (1, 1, 0))] == [True, False, True]
    tier.check()


def test_too_little_for_one_segment_and_a_store_that_is_not_compressed(store: PackedStore, tmp_path: Path) -> None:
    geometry = store.geometry()
    with pytest.raises(BudgetError, match=r"compressed: 4096 bytes hold no segment; the least is \d+ bytes"):
        make_source(store, geometry, 4, 4096)
    plain = write_plain_store(tmp_path / "plain")
    with pytest.raises(ConfigError, match="compressed: the store's experts are not compressed"):
        make_source(plain, plain.geometry(), 4, 1 << 20)


# -- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 8]))


@pytest.mark.parametrize("compressed_nbytes", [0, EVERYTHING])
def test_a_damaged_frame_is_told_and_never_decoded(compressed_nbytes: int, own: PackedStore, make: MakeBench) -> None:
    index = own.frames[0]
    offset, nbytes = index.extent(1, 2)
    flip(index.path, offset + nbytes // 2)
    bench = make(1, compressed_nbytes, own)
    readers, wanted = bench.readers, Span(0, 1, 0, 1, 0)
    for _ in range(2):
        readers.submit([wanted])
        with pytest.raises(TransferError, match=r"experts-00000.planes: frame 2 of expert 1: checksum"):
            readers.wait()
        slot = bench.slots.pop(wanted)
        assert not any(slot[2 * index.frame_nbytes : 3 * index.frame_nbytes])
        readers.drain()
    bench.load([span for span in bench.spans() if span[:2] != (0, 1)])
    flip(index.path, offset + nbytes // 2)
    bench.load([wanted])


def test_damage_in_memory_is_told_and_read_again_from_disk(make: MakeBench) -> None:
    bench = make(1, EVERYTHING)
    wanted = Span(0, 3, 0, 1, 0)
    bench.load([wanted])
    held = bench.pool.begin(0, 3, 0)
    assert held is not None and held.is_filled
    bench.pool.withdrawn(wanted)
    held.memory[9000] ^= 1
    bench.readers.submit([wanted])
    with pytest.raises(TransferError, match="expert 3: checksum"):
        bench.readers.wait()
    del bench.slots[wanted]
    bench.load([wanted, wanted])


def test_a_failed_read_leaves_no_copy(make: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(4, EVERYTHING)
    fails = [True]
    read_into = ExpertFile.read_into

    def read(file: ExpertFile, offset: int, buffers: Sequence[memoryview]) -> bool:
        if fails and offset:
            raise TransferError(f"{file.path}: gone")
        return read_into(file, offset, buffers)

    monkeypatch.setattr(ExpertFile, "read_into", read)
    wanted = Span(0, 0, 0, 4, 0)  # its first segment is read, the others are not
    bench.readers.submit([wanted])
    with pytest.raises(TransferError, match="gone"):
        bench.readers.wait()
    assert not any(bench.pool.tier.holds(0, 0, segment) for segment in range(4))
    bench.pool.tier.check()
    fails.clear()
    del bench.slots[wanted]
    bench.load([wanted])


@pytest.mark.parametrize("segments", [1, 4])
def test_soak(segments: int, make: MakeBench) -> None:
    """Whatever races with what, every span comes once or is withdrawn, with its own bytes."""
    bench = make(segments, EVERYTHING // 30)
    readers, dice = bench.readers, random.Random(segments)
    spans = bench.spans()
    in_flight: set[Span] = set()
    ahead: set[Span] = set()
    counts = {"arrived": 0, "withdrawn": 0, "drained": 0}

    def arrived(span: Span) -> None:
        bench.check(span)
        in_flight.remove(span)
        ahead.discard(span)
        counts["arrived"] += 1

    end = time.perf_counter() + 1.0
    while time.perf_counter() < end:
        what = dice.random()
        if what < 0.4:
            new = [one for one in dice.sample(spans, 3) if one not in in_flight]
            in_flight.update(new)
            if dice.random() < 0.5:
                readers.submit(new)
            else:
                ahead.update(new)
                readers.submit_ahead(new)
        elif what < 0.55:
            for one in readers.withdraw(dice.randrange(3)):
                del bench.slots[one]
                ahead.remove(one)
                in_flight.remove(one)
                counts["withdrawn"] += 1
        elif what < 0.98:
            if in_flight:
                arrived(readers.wait())
        else:
            readers.drain()
            counts["drained"] += 1
            bench.slots.clear()
            in_flight.clear()
            ahead.clear()
        bench.pool.tier.check()
    while in_flight:
        arrived(readers.wait())
    assert min(counts.values()) > 5
    stats = readers.stats()
    assert stats["compressed_hit_nbytes"] > 0 and stats["disk_nbytes"] > 0
