"""Experts that are stored compressed: a read takes frames from disk and decodes them into the slot."""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass

from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.engine.frame_extents import FrameRange, SegmentFrames
from expertly.engine.reads import ExtentSource, Load, Moved, PlainSource, Source, open_files
from expertly.store.frames import FrameDecoder
from expertly.store.reader import ExpertFile

MAX_SCRATCH_NBYTES = 2 << 20
"""A read takes no more from disk, unless a single frame is longer."""

MIN_DECODE_NBYTES = 256 << 10
"""Weights that a read makes, where there are so many: decoding takes longer than reading, so more readers share it."""


class FrameSource:
    """Compressed experts: one direct read of the pages that the frames of a part lie in, then the frames, one by one,
    into the slot. So readers that read and readers that decode overlap. See Source.
    """

    batch_nbytes = MIN_DECODE_NBYTES

    def __init__(self, store: ExtentSource, geometry: Geometry, num_readers: int) -> None:
        self._files = open_files(store, geometry)
        self._frames = SegmentFrames(store, geometry)
        self._num_readers = num_readers
        self._scratch_nbytes = max(MAX_SCRATCH_NBYTES, self._frames.max_frame_nbytes)

    def load(self, span: Span, buffer: memoryview) -> Load:
        """Cut over the readers at frames."""
        frames = self._frames.of(span.layer, span.expert, span.segment, span.num_segments)
        reads: list[_FrameRead] = []
        for part in self._cut(frames):
            first = part.first_byte - frames.first_byte
            reads.append(_FrameRead(self._files[span.layer], part, buffer[first : first + part.num_bytes]))
        return Load(reads, len(buffer), sum(read.frames.cover_nbytes for read in reads))

    def worker(self) -> Decoding:
        """Its decoder, and memory for what it reads."""
        return Decoding(self._scratch_nbytes)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()
        self._files = []

    def _cut(self, frames: FrameRange) -> list[FrameRange]:
        """A part for each reader, but of no fewer bytes of weights than are worth it, nor more than scratch holds."""
        count = max(-(-frames.count // self._num_readers), MIN_DECODE_NBYTES // frames.index.frame_nbytes, 1)
        parts = []
        done = 0
        while done < frames.count:
            part = frames.part(done, min(count, frames.count - done))
            while part.count > 1 and part.cover_nbytes > self._scratch_nbytes:
                part = frames.part(done, part.count // 2)
            parts.append(part)
            done += part.count
        return parts


class Decoding:
    """What a reader has of its own."""

    def __init__(self, scratch_nbytes: int) -> None:
        self.decoder = FrameDecoder()
        self._scratch_nbytes = scratch_nbytes
        self._scratch = memoryview(b"")

    def scratch(self, nbytes: int) -> memoryview:
        """Page-aligned memory, good until the next call."""
        if not self._scratch:
            self._scratch = memoryview(mmap.mmap(-1, self._scratch_nbytes))
        return self._scratch[:nbytes]


@dataclass(frozen=True, slots=True, eq=False)
class _FrameRead:
    """Frames of one expert, and the bytes of weights that are wanted of them."""

    file: ExpertFile
    frames: FrameRange
    out: memoryview

    def run(self, worker: Decoding) -> Moved:
        """Read and decode."""
        frames = self.frames
        cover = worker.scratch(frames.cover_nbytes)
        is_direct = self.file.read_into(frames.cover_begin, [cover])
        start_ns = time.thread_time_ns()
        frames.decode(worker.decoder, cover, self.out)
        decode_ns = time.thread_time_ns() - start_ns
        return Moved(0 if is_direct else len(cover), frames.decoded_nbytes, decode_ns)


def make_source(store: ExtentSource, geometry: Geometry, num_readers: int) -> Source:
    """By how the store's experts are stored."""
    if store.frame_index(0) is None:
        return PlainSource(store, geometry, num_readers)
    return FrameSource(store, geometry, num_readers)
