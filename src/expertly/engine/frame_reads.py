"""Experts that are stored compressed: a read takes frames from disk, or from memory, and decodes them into the slot."""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass

from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.engine.compressed_pool import CompressedPool, Held
from expertly.engine.frame_extents import FrameRange, SegmentFrames
from expertly.engine.reads import Load, Moved
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

    def __init__(
        self,
        files: list[ExpertFile],
        frames: SegmentFrames,
        geometry: Geometry,
        num_readers: int,
        pool: CompressedPool | None,
    ) -> None:
        self._files = files
        self._frames = frames
        self._geometry = geometry
        self._num_readers = num_readers
        self._pool = pool
        self.compressed_nbytes = 0 if pool is None else pool.nbytes
        self._scratch_nbytes = max(MAX_SCRATCH_NBYTES, self._frames.max_frame_nbytes)

    def load(self, span: Span, buffer: memoryview) -> Load:
        """Cut over the readers at frames; segments that stay compressed in memory are cut apart, too."""
        nbytes = self._geometry.segment_nbytes(span.layer)
        each = span.num_segments if self._pool is None else 1
        reads: list[_FrameRead] = []
        for done in range(0, span.num_segments, each):
            held = None
            if self._pool is not None:
                held = self._pool.begin(span.layer, span.expert, span.segment + done)
            out = buffer[done * nbytes : (done + each) * nbytes]
            frames = self._frames.of(span.layer, span.expert, span.segment + done, each)
            for part in self._cut(frames):
                first = part.first_byte - frames.first_byte
                share = out[first : first + part.num_bytes]
                reads.append(_FrameRead(self._files[span.layer], part, share, held))
        return Load(reads, len(buffer), sum(read.disk_nbytes for read in reads))

    def ended(self, span: Span, ok: bool) -> None:
        """What was read stays, where it has a place."""
        if self._pool is not None:
            self._pool.ended(span, ok)

    def withdrawn(self, span: Span) -> None:
        """Its place is free again."""
        if self._pool is not None:
            self._pool.withdrawn(span)

    def abandon(self) -> None:
        """What was being read is not there."""
        if self._pool is not None:
            self._pool.abandon()

    def hit_nbytes(self) -> int:
        """Of weights decoded without a read."""
        return 0 if self._pool is None else self._pool.hit_nbytes

    def worker(self) -> Decoding:
        """Its decoder, and memory for what it reads."""
        return Decoding(self._scratch_nbytes)

    def close(self) -> None:
        """Close the files and let go of the pool."""
        for file in self._files:
            file.close()
        self._files, self._pool = [], None

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
    held: Held | None  # where their stored bytes are, or shall be

    @property
    def disk_nbytes(self) -> int:
        return 0 if self.held is not None and self.held.is_filled else self.frames.cover_nbytes

    def run(self, worker: Decoding) -> Moved:
        """Read, unless it is in memory, and decode."""
        frames, held = self.frames, self.held
        nbytes = frames.cover_nbytes
        buffered_nbytes = 0
        if held is None:
            cover = worker.scratch(nbytes)
        else:
            begin = frames.cover_begin - held.begin
            cover = held.memory[begin : begin + nbytes]
        if held is None or not held.is_filled:
            is_direct = self.file.read_into(frames.cover_begin, [cover])
            buffered_nbytes = 0 if is_direct else nbytes
        start_ns = time.thread_time_ns()
        frames.decode(worker.decoder, cover, self.out)
        return Moved(buffered_nbytes, frames.decoded_nbytes, time.thread_time_ns() - start_ns)
