"""The compressed tier's memory: segments of experts as they are stored, to be decoded again without a read."""

from __future__ import annotations

import mmap
from typing import NamedTuple

import numpy as np

from expertly.core.errors import BudgetError
from expertly.core.geometry import PAGE_NBYTES, Geometry
from expertly.core.messages import Span
from expertly.engine.frame_extents import SegmentFrames
from expertly.engine.numa import MemoryNode
from expertly.scheduler.compressed import CompressedTier, tier_slots


class Held(NamedTuple):
    """Where a segment's pages of the file are in memory, or shall be."""

    memory: memoryview
    begin: int  # offset in the file of the first byte
    is_filled: bool  # they are there; else whoever reads them reads them into this


class CompressedPool:
    """Equal slots a size class, each for the pages of the file that one segment's frames lie in, so that a direct read
    goes straight into it. Equal, because segments of one size compress alike, and so nothing is ever moved.

    Which segments stay is decided by CompressedTier. One caller thread; the bytes are written and read by readers.
    """

    def __init__(
        self, frames: SegmentFrames, geometry: Geometry, memory_nbytes: int, node: MemoryNode | None = None
    ) -> None:
        """Raises BudgetError where not a single segment fits into `memory_nbytes`."""
        sizes = frames.slot_nbytes()
        slots = tier_slots(geometry, sizes, memory_nbytes)
        if not sum(slots):
            raise BudgetError(f"compressed: {memory_nbytes} bytes hold no segment; the least is {min(sizes)} bytes")
        self._frames = frames
        self._geometry = geometry
        self._slot_nbytes = sizes
        self.tier = CompressedTier(geometry, slots)
        self.nbytes = sum(num_slots * nbytes for num_slots, nbytes in zip(slots, sizes, strict=True))
        """Of all slots."""
        self.hit_nbytes = 0
        """Of weights that came from here, or are about to."""
        self._memory: list[memoryview] = []
        for num_slots, nbytes in zip(slots, sizes, strict=True):
            region = mmap.mmap(-1, max(num_slots * nbytes, PAGE_NBYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                region.madvise(mmap.MADV_HUGEPAGE)
            if node is not None:
                node.bind(np.frombuffer(region, np.uint8).ctypes.data, len(region))
            self._memory.append(memoryview(region))

    def begin(self, layer: int, expert: int, segment: int) -> Held | None:
        """A segment is to be loaded. None: it is not here, and does not stay."""
        place = self.tier.begin(layer, expert, segment)
        if place is None:
            return None
        if place.is_filled:
            self.hit_nbytes += self._geometry.segment_nbytes(layer)
        size_class = self._geometry.size_classes[layer]
        nbytes = self._slot_nbytes[size_class]
        memory = self._memory[size_class][place.slot * nbytes : (place.slot + 1) * nbytes]
        return Held(memory, self._frames.of(layer, expert, segment).cover_begin, place.is_filled)

    def ended(self, span: Span, ok: bool) -> None:
        """Its segments have been read and decoded; `ok`: and are good."""
        for segment in range(span.segment, span.segment + span.num_segments):
            (self.tier.end if ok else self.tier.fail)(span.layer, span.expert, segment)

    def withdrawn(self, span: Span) -> None:
        """Its segments will not be read or decoded."""
        for segment in range(span.segment, span.segment + span.num_segments):
            if self.tier.holds(span.layer, span.expert, segment):
                self.hit_nbytes -= self._geometry.segment_nbytes(span.layer)
            self.tier.withdraw(span.layer, span.expert, segment)

    def abandon(self) -> None:
        """Nothing is being read or decoded any more."""
        self.tier.abandon()
        self.tier.check()  # an interrupt in the middle of a decision shows here
