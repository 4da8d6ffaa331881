"""Compressed experts through the readers: right bytes at every P; damage is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from expertly.core.errors import TransferError
from expertly.core.messages import Span
from expertly.engine import reading
from expertly.store.frames import FrameDecoder
from expertly.store.packed import PackedStore
from expertly.store.reader import ExpertFile
from tests.engine.frames import LAYERS, FrameBench, write_store

pytestmark = pytest.mark.timeout(180)


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

    def make(segments: int = 1, of: PackedStore = store) -> FrameBench:
        made.append(FrameBench(of, segments))
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


@pytest.mark.parametrize("segments", [1, 2, 4, 8, 11, 16])
def test_every_span_of_every_expert(segments: int, make: MakeBench) -> None:
    bench = make(segments)
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


def test_blocks_that_are_read_again_for_their_comparison_are_counted(tmp_path: Path) -> None:
    """Of experts stored as they are, whose blocks segments cut: each once, when it is first read."""
    bench, total = FrameBench(write_store(tmp_path / "plain", codec="none"), 8), sum(layer.nbytes for layer in LAYERS)
    for read_nbytes in (2 * total, 3 * total):
        bench.load(bench.spans())
        assert bench.readers.stats()["disk_nbytes"] == read_nbytes
    bench.readers.close()


def test_readers_share_an_expert_and_decode_at_the_same_time(make: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(4)
    decode = FrameDecoder.decode

    def meet(*args: Any) -> None:
        together.wait(20)
        decode(*args)

    monkeypatch.setattr(reading, "MIN_DECODE_NBYTES", 1)
    monkeypatch.setattr(FrameDecoder, "decode", meet)
    make().load([Span(0, 2, 0, 1, 0)])


def test_what_no_scratch_would_hold_is_cut_at_frames(make: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_SCRATCH_NBYTES", 4096)  # so one frame and its pages
    reads = Reads(monkeypatch)
    bench = make()
    bench.load(bench.spans())
    assert max(nbytes for _, nbytes in reads.done) <= 5 * 4096 + 4096
    assert len(reads.done) > len(bench.spans())


# -- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 8]))


def test_a_damaged_frame_is_told_and_never_decoded(own: PackedStore, make: MakeBench) -> None:
    index = own.frames[0]
    offset, nbytes = index.extent(1, 2)
    flip(index.path, offset + nbytes // 2)
    bench = make(1, own)
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
