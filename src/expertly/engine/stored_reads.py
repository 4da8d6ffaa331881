"""Experts that stay in host memory as they are stored, to be decoded on the device: read, checked, and left so."""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass

import torch

from expertly.core.errors import BudgetError
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.engine.frame_extents import FrameRange, SegmentFrames
from expertly.engine.frame_reads import MAX_SCRATCH_NBYTES
from expertly.engine.numa import MemoryNode
from expertly.engine.reads import FileSource, Load, Moved
from expertly.scheduler.budget import default_ring
from expertly.scheduler.compressed import tier_slots
from expertly.store.frames import check_frame
from expertly.store.reader import ExpertFile


class StoredSlots:
    """Equal slots a size class, each for the pages of the file that one segment's frames lie in."""

    def __init__(
        self, frames: SegmentFrames, geometry: Geometry, memory_nbytes: int, node: MemoryNode | None = None
    ) -> None:
        """Raises BudgetError where one token's experts do not fit into `memory_nbytes`."""
        self._geometry = geometry
        self.slot_nbytes = frames.slot_nbytes()
        self.slots_per_class = tier_slots(geometry, self.slot_nbytes, memory_nbytes)
        need = default_ring(geometry)
        if any(num < least for num, least in zip(self.slots_per_class, need, strict=True)):
            least = sum(num * nbytes for num, nbytes in zip(need, self.slot_nbytes, strict=True))
            raise BudgetError(
                f"memory={memory_nbytes} bytes: one token's experts, as they are stored, take {least} bytes at least"
            )
        self._regions: list[torch.Tensor] = []
        for num_slots, nbytes in zip(self.slots_per_class, self.slot_nbytes, strict=True):
            region = mmap.mmap(-1, num_slots * nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                region.madvise(mmap.MADV_HUGEPAGE)
            flat = torch.frombuffer(region, dtype=torch.uint8)
            if node is not None:
                node.bind(flat.data_ptr(), len(region))
            self._regions.append(flat)

    def tensor(self, layer: int, slot: int, num_slots: int = 1) -> torch.Tensor:
        """The bytes of neighbouring slots."""
        size_class = self._geometry.size_classes[layer]
        nbytes = self.slot_nbytes[size_class]
        return self._regions[size_class][slot * nbytes : (slot + num_slots) * nbytes]

    def buffer(self, layer: int, slot: int, num_slots: int) -> memoryview:
        """The same, to be read into."""
        return self.tensor(layer, slot, num_slots).numpy().data

    def memory(self) -> list[torch.Tensor]:
        """The regions as bytes, one a size class."""
        return self._regions


class StoredSource(FileSource):
    """Reads of whole segments into such slots, frame by frame checked and not decoded; the host tier knows what is
    there, and asks for what it lacks only. See Source.
    """

    batch_nbytes = MAX_SCRATCH_NBYTES

    def __init__(self, files: list[ExpertFile], frames: SegmentFrames, geometry: Geometry, num_readers: int) -> None:
        super().__init__(files)
        self._frames = frames
        self._geometry = geometry
        self._num_readers = num_readers

    def load(self, span: Span, buffer: memoryview) -> Load:
        """Cut over the readers at frames."""
        size = len(buffer) // span.num_segments
        reads: list[_StoredRead] = []
        for number in range(span.num_segments):
            frames = self._frames.of(span.layer, span.expert, span.segment + number)
            slot = buffer[number * size : (number + 1) * size]
            count = -(-frames.count // self._num_readers)
            for first in range(0, frames.count, count):
                part = frames.part(first, min(count, frames.count - first))
                begin = part.cover_begin - frames.cover_begin
                reads.append(_StoredRead(self._files[span.layer], part, slot[begin : begin + part.cover_nbytes]))
        nbytes = span.num_segments * self._geometry.segment_nbytes(span.layer)
        return Load(reads, nbytes, sum(len(read.cover) for read in reads))


@dataclass(frozen=True, slots=True, eq=False)
class _StoredRead:
    """Frames of one expert. Where parts of a segment share a page, each reads it: the bytes are the same."""

    file: ExpertFile
    frames: FrameRange
    cover: memoryview  # where the pages that they lie in go

    def run(self, worker: None) -> Moved:
        """Read, and refuse what is damaged: nothing behind this can tell."""
        is_direct = self.file.read_into(self.frames.cover_begin, [self.cover])
        start_ns = time.thread_time_ns()
        for frame in range(self.frames.first, self.frames.first + self.frames.count):
            offset, nbytes = self.frames.index.extent(self.frames.expert, frame)
            offset -= self.frames.cover_begin
            check_frame(self.frames.index, self.frames.expert, frame, self.cover[offset : offset + nbytes])
        return Moved(0 if is_direct else len(self.cover), 0, time.thread_time_ns() - start_ns)
