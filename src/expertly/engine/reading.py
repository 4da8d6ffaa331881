"""Reading experts: which bytes of a store fill a span's slots, stored as they are or compressed, and the slots in RAM.

A span is cut into reads, so that several reader threads (`transfer.Readers`) work on a large one. A compressed expert
is a row of frames; a read takes the pages that its frames lie in from disk, and decodes them into the slot.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from expertly.core.geometry import PAGE_NBYTES, Geometry
from expertly.core.messages import Span
from expertly.engine.numa import MemoryNode
from expertly.store.frames import FrameDecoder, FrameIndex, padded
from expertly.store.reader import ExpertFile
from expertly.store.sums import FirstReads, Sums

MIN_READ_NBYTES = 1 << 20
"""A read is split over the readers down to this: smaller ones are slowed by the interpreter lock."""

MIN_DECODE_NBYTES = 256 << 10
"""The same of compressed experts, in bytes of weights: decoding takes longer, so more readers share it."""

MAX_SCRATCH_NBYTES = 2 << 20
"""A read of compressed bytes takes no more from disk, unless a single frame is longer."""


class ExtentSource(Protocol):
    """What reading needs of a PackedStore."""

    def layer_extent(self, layer: int) -> tuple[Path, int]:
        """The file of a layer's experts and the offset of the first of them in it."""

    def expert_in_file(self, layer: int, expert: int) -> int:
        """The place of an expert in that file, from 0, where its number here is `expert`."""

    def frame_index(self, layer: int) -> FrameIndex | None:
        """Where the layer's frames lie, by the experts' places in the file; None where they are stored as they are."""

    def block_sums(self, layer: int) -> Sums | None:
        """What such experts are compared with when they are first read, by the same places; None: with nothing."""


class Moved(NamedTuple):
    """What one read did."""

    buffered_nbytes: int  # read through the page cache
    decoded_nbytes: int = 0
    decode_ns: int = 0  # processor time
    again_nbytes: int = 0  # read once more, of blocks that were compared with their sums


Read = Callable[[], Moved]
"""A part of a span: the reader that calls it brings it into its slots. Raises TransferError."""


class Source(Protocol):
    """Where the bytes of spans come from. Used by the thread that submits; readers call what `reads` gave."""

    batch_nbytes: int
    """Spans of one read go to a reader together, up to so many bytes of weights."""

    def reads(self, span: Span, buffer: memoryview) -> tuple[Sequence[Read], int]:
        """The reads that fill `buffer`, all of the span's slots; and the bytes that they ask of the disk."""

    def close(self) -> None:
        """Close files. Idempotent."""


def make_source(store: ExtentSource, geometry: Geometry, num_readers: int) -> Source:
    """By how the store's experts are stored. Raises StoreError where a file cannot be opened; none is left open."""
    files: list[ExpertFile] = []
    with contextlib.ExitStack() as undo:
        for layer in range(geometry.num_layers):
            files.append(ExpertFile(store.layer_extent(layer)[0]))
            undo.callback(files[-1].close)
        undo.pop_all()
    make = PlainSource if store.frame_index(0) is None else FrameSource
    return make(files, store, geometry, num_readers)


class PlainSource:
    """Experts stored as they are: a read goes straight from the file into the slots, and the first of each block is
    compared with its sum by the thread that reads it.
    """

    batch_nbytes = MIN_READ_NBYTES

    def __init__(self, files: list[ExpertFile], store: ExtentSource, geometry: Geometry, num_readers: int) -> None:
        self._files = files
        self._places: list[list[int]] = []  # of each expert in its layer's file
        self._begins: list[int] = []  # of the first expert there
        self._first_reads: list[FirstReads | None] = []
        self._expert_nbytes = [shape.expert_nbytes for shape in geometry.layers]
        self._segment_nbytes = [geometry.segment_nbytes(layer) for layer in range(geometry.num_layers)]
        self._num_readers = num_readers
        for layer, shape in enumerate(geometry.layers):
            begin, sums = store.layer_extent(layer)[1], store.block_sums(layer)
            nbytes = shape.expert_nbytes, self._segment_nbytes[layer]
            self._begins.append(begin)
            self._places.append([store.expert_in_file(layer, expert) for expert in range(shape.num_experts)])
            self._first_reads.append(None if sums is None else FirstReads(layer, files[layer], begin, *nbytes, sums))

    def reads(self, span: Span, buffer: memoryview) -> tuple[Sequence[Read], int]:
        layer, nbytes = span.layer, len(buffer)
        file, place, first = (
            self._files[layer],
            self._places[layer][span.expert],
            span.segment * self._segment_nbytes[layer],
        )
        offset = self._begins[layer] + place * self._expert_nbytes[layer] + first
        first_reads = self._first_reads[layer]
        if first_reads is not None and first_reads.are_over(place, first, nbytes):
            first_reads = None
        if nbytes <= MIN_READ_NBYTES:
            starts, size = range(1), nbytes
        else:
            size = max(MIN_READ_NBYTES, padded(-(-nbytes // self._num_readers)))
            if first_reads is not None and not first_reads.block_nbytes % PAGE_NBYTES:  # whole blocks to each reader
                size = -(-size // first_reads.block_nbytes) * first_reads.block_nbytes
            starts = range(0, nbytes, size)
        if first_reads is None:
            return [partial(_read_plain, file, offset + at, buffer[at : at + size]) for at in starts], nbytes
        check = partial(_read_checked, first_reads, place)
        return [partial(check, first + at, file, offset + at, buffer[at : at + size]) for at in starts], nbytes

    def close(self) -> None:
        _close(self._files)


def _read_plain(file: ExpertFile, offset: int, buffer: memoryview) -> Moved:
    is_direct = file.read_into(offset, [buffer])
    return Moved(0 if is_direct else len(buffer))


def _read_checked(
    first_reads: FirstReads, place: int, first: int, file: ExpertFile, offset: int, buffer: memoryview
) -> Moved:
    moved = _read_plain(file, offset, buffer)
    again_nbytes = first_reads.check(place, first, buffer)
    return moved._replace(again_nbytes=again_nbytes) if again_nbytes else moved


def _close(files: list[ExpertFile]) -> None:
    for file in files:
        file.close()
    files.clear()


class FrameSource:
    """Compressed experts. Each read is one direct read of some frames' pages, then the decoding of these frames, one by
    one: readers that read and readers that decode overlap. Where P does not divide an expert's frames, neighbouring
    segments share one.
    """

    batch_nbytes = MIN_DECODE_NBYTES

    def __init__(self, files: list[ExpertFile], store: ExtentSource, geometry: Geometry, num_readers: int) -> None:
        self._files = files
        self._indexes: list[FrameIndex] = []
        for layer in range(geometry.num_layers):
            index = store.frame_index(layer)
            assert index is not None, "all layers of a store have one codec"
            self._indexes.append(index)
        self._store = store
        self._segment_nbytes = [geometry.segment_nbytes(layer) for layer in range(geometry.num_layers)]
        self._num_readers = num_readers
        longest = max(padded(index.frame_nbytes) + PAGE_NBYTES for index in self._indexes)  # pages of one frame
        self._scratch_nbytes = max(MAX_SCRATCH_NBYTES, longest)
        self._scratch = _Scratch(self._scratch_nbytes)

    def reads(self, span: Span, buffer: memoryview) -> tuple[Sequence[Read], int]:
        """One read for each reader, but of no fewer bytes of weights than are worth it, nor more than scratch holds."""
        layer, index = span.layer, self._indexes[span.layer]
        place, size = self._store.expert_in_file(layer, span.expert), index.frame_nbytes
        begin = span.segment * self._segment_nbytes[layer]
        end = begin + len(buffer)
        frame, last = begin // size, -(-end // size)
        most = max(-(-(last - frame) // self._num_readers), MIN_DECODE_NBYTES // size, 1)
        reads: list[Read] = []
        disk_nbytes = 0
        while frame < last:
            count = min(most, last - frame)
            while (pages := _pages(index, place, frame, count))[1] > self._scratch_nbytes and count > 1:
                count //= 2
            first = max(begin, frame * size)  # byte of the expert's weights, the first that is wanted of these frames
            out = buffer[first - begin : (frame + count) * size - begin]
            reads.append(partial(self._read, layer, place, range(frame, frame + count), pages, first, out))
            disk_nbytes += pages[1]
            frame += count
        return reads, disk_nbytes

    def close(self) -> None:
        _close(self._files)

    def _read(
        self, layer: int, place: int, frames: range, pages: tuple[int, int], first: int, out: memoryview
    ) -> Moved:
        """Bring the weights of frames of the expert at a `place` in the file, from its byte `first` on, into `out`."""
        offset, disk_nbytes = pages
        stored, decoder = self._scratch.memory[:disk_nbytes], self._scratch.decoder
        is_direct = self._files[layer].read_into(offset, [stored])
        start_ns = time.thread_time_ns()
        index, size, done = self._indexes[layer], self._indexes[layer].frame_nbytes, 0
        for frame in frames:
            begin, nbytes = index.extent(place, frame)
            begin -= offset
            skip = max(0, first - frame * size)
            part = out[done : done + size - skip]
            decoder.decode(index, place, frame, stored[begin : begin + nbytes], part, skip)
            done += len(part)
        decode_ns = time.thread_time_ns() - start_ns
        return Moved(0 if is_direct else disk_nbytes, len(frames) * size, decode_ns)


class _Scratch(threading.local):
    """Each reader's own: a decoder, and page-aligned memory for what it reads."""

    def __init__(self, nbytes: int) -> None:
        self.decoder = FrameDecoder()
        self.memory = memoryview(mmap.mmap(-1, nbytes))


def _pages(index: FrameIndex, expert: int, first: int, count: int) -> tuple[int, int]:
    """Offset and bytes of the pages that these frames lie in."""
    offset, nbytes = index.extent(expert, first, count)
    begin = offset // PAGE_NBYTES * PAGE_NBYTES
    return begin, padded(offset + nbytes) - begin


# -- slots in RAM ----------------------------------------------------------------------------------------------------


class HostPool:
    """Slots in RAM, one region a size class, as bytes (for reads from disk) and as tensors (for computing).

    Pages are taken by the process when they are first written, so a pool costs what has been loaded; from `node`, where
    one is given. The memory is given back when nothing refers to it.
    """

    def __init__(
        self,
        geometry: Geometry,
        slots_per_class: Sequence[int],
        segment_nbytes: Sequence[int],
        dtype: torch.dtype,
        node: MemoryNode | None = None,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """`allocate`: what gives so many bytes; None: the system, with large pages. Raises OSError."""
        self.regions: list[torch.Tensor] = []
        """The memory as bytes, one region a size class."""
        slots: list[tuple[memoryview, int]] = []
        flats: list[torch.Tensor] = []
        for num_slots, nbytes in zip(slots_per_class, segment_nbytes, strict=True):
            size = num_slots * nbytes
            region = (_mapped if allocate is None else allocate)(max(size, mmap.PAGESIZE))
            if node is not None:
                node.bind(region.data_ptr(), len(region))
            self.regions.append(region)
            slots.append((region.numpy().data, nbytes))
            flats.append(region[:size])
        self._slots = [slots[c] for c in geometry.size_classes]
        self._rows = [layer_rows(flats[c], geometry, layer, dtype) for layer, c in enumerate(geometry.size_classes)]

    def rows(self, layer: int) -> torch.Tensor:
        """The slots as rows of this layer's shape, [S * I/P, M, H]: slot s is rows [s * I/P, (s+1) * I/P). In a format,
        blocks as bytes, [S * I/P/block_size, block_nbytes].
        """
        return self._rows[layer]

    def buffer(self, span: Span) -> memoryview:
        """The bytes of a span's slots."""
        memory, nbytes = self._slots[span.layer]
        return memory[span.slot * nbytes : (span.slot + span.num_segments) * nbytes]

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self.regions, self._slots, self._rows = [], [], []


def _mapped(nbytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def layer_rows(flat: torch.Tensor, geometry: Geometry, layer: int, dtype: torch.dtype) -> torch.Tensor:
    """A size class's bytes seen as rows of `layer`, [S * I/P, M, H]; in a format as its blocks, [S * I/P/G, nbytes]."""
    shape = geometry.layers[layer]
    if shape.format:
        return flat.view(-1, shape.block_nbytes)
    return flat.view(dtype).view(-1, shape.num_matrices, shape.hidden_size)
