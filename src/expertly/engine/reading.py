"""Reading experts: which bytes of a store fill a span's slots, plain or compressed, and the slots in RAM.

A span is split into reads, so that several reader threads (`transfer.Readers`) work on a large one. A compressed expert
is a row of frames: a read brings the pages of some frames from disk and decodes them into the slot.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
import xxhash

from expertly.core.errors import TransferError
from expertly.core.geometry import PAGE_NBYTES, SECTOR_NBYTES, Geometry
from expertly.core.messages import Span
from expertly.core.resources import MIN_DECODE_NBYTES
from expertly.engine.numa import MemoryNode
from expertly.store.frames import FrameDecoder, FrameIndex, padded
from expertly.store.packed import LayerFile
from expertly.store.reader import ExpertFile
from expertly.store.sums import Sums

MIN_READ_NBYTES = 1 << 20
"""The smallest read of plain experts: splitting further is slowed by the interpreter lock. (Of compressed ones it is
MIN_DECODE_NBYTES: decoding takes longer, so more readers share it.)
"""

MAX_SCRATCH_NBYTES = 2 << 20
"""The largest read of compressed bytes, unless a single frame is longer."""


class ExtentSource(Protocol):
    """The part of a PackedStore that reading needs."""

    def layer_file(self, layer: int) -> LayerFile:
        """Where the experts of a layer lie."""


class Moved(NamedTuple):
    """What one read did."""

    buffered_nbytes: int  # read through the page cache
    decoded_nbytes: int = 0
    decode_ns: int = 0  # processor time
    again_nbytes: int = 0  # read a second time, to compare whole blocks with their checksums


DirectRead = tuple[int, int, int, int]
"""For `ReadQueue`: file, offset, address and bytes."""

Read = Callable[[], Moved]
"""Brings a part of a span into its slots, in the reader that calls it. Raises TransferError."""


class Source:
    """Makes reads of spans. Called by the thread that submits; readers call the reads."""

    batch_nbytes: int
    """Small spans are read together by one reader, up to this many bytes of weights."""
    is_direct = False
    """Whether aligned reads bypass the page cache and need no reader: see `ReadQueue`."""

    def __init__(self, files: list[ExpertFile], layers: list[LayerFile], geometry: Geometry, num_readers: int) -> None:
        self._files = files
        self._layers = layers
        self._num_readers = num_readers
        self._segment_nbytes = [geometry.segment_nbytes(layer) for layer in range(geometry.num_layers)]

    def reads(self, span: Span, buffer: memoryview) -> tuple[Sequence[Read], int]:
        """The reads that fill `buffer`, all of the span's slots, and the bytes that they take from disk."""
        raise NotImplementedError

    def close(self) -> None:
        """Close files. Idempotent."""
        while self._files:
            self._files.pop().close()


def make_source(store: ExtentSource, geometry: Geometry, num_readers: int) -> Source:
    """The Source for a store's codec. Raises StoreError where a file cannot be opened, and leaves none open."""
    layers, files = [store.layer_file(layer) for layer in range(geometry.num_layers)], list[ExpertFile]()
    with contextlib.ExitStack() as undo:
        for one in layers:
            files.append(ExpertFile(one.path))
            undo.callback(files[-1].close)
        undo.pop_all()
    make = PlainSource if layers[0].frames is None else FrameSource
    return make(files, layers, geometry, num_readers)


class PlainSource(Source):
    """Experts that are not compressed: a read goes straight from the file into the slots. Each block is compared with
    its checksum when it is first read.
    """

    batch_nbytes = MIN_READ_NBYTES

    def __init__(self, files: list[ExpertFile], layers: list[LayerFile], geometry: Geometry, num_readers: int) -> None:
        super().__init__(files, layers, geometry, num_readers)
        self.is_direct = all(file.direct_fd >= 0 for file in files)
        self._first_reads: list[FirstReads | None] = []
        self._expert_nbytes = [shape.expert_nbytes for shape in geometry.layers]
        for layer, (_, begin, _, sums, _) in enumerate(layers):
            nbytes = self._expert_nbytes[layer], self._segment_nbytes[layer]
            self._first_reads.append(None if sums is None else FirstReads(layer, files[layer], begin, *nbytes, sums))

    def reads(self, span: Span, buffer: memoryview) -> tuple[Sequence[Read], int]:
        layer, nbytes = span.layer, len(buffer)
        file, (_, begin, _, _, places) = self._files[layer], self._layers[layer]
        place, first = places[span.expert], span.segment * self._segment_nbytes[layer]
        offset = begin + place * self._expert_nbytes[layer] + first
        first_reads = self._first_reads[layer]
        if first_reads is not None and (
            place not in first_reads.unchecked or first_reads.are_over(place, first, nbytes)
        ):
            first_reads = None
        size = MIN_READ_NBYTES
        if nbytes > size:
            size = max(size, padded(-(-nbytes // self._num_readers)))
        block = 0 if first_reads is None else first_reads.block_nbytes
        if block and not block % SECTOR_NBYTES:
            size = -(-size // block) * block  # each read gets whole blocks
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        reads: list[Read] = []
        for at in range(0, nbytes, size):
            part = buffer[at : at + size]
            request, check = (file.direct_fd, offset + at, address + at, len(part)), None
            # The rule of ExpertFile.read_into, not a call of it: a miss is to go through few files (bench/walk.py).
            is_direct = file.direct_fd >= 0 and not (request[1] | request[2] | request[3]) % file.alignment
            if first_reads is not None:
                check = partial(first_reads.check, place, first + at, part)
                is_direct = is_direct and not ((first + at) % block or len(part) % block)  # else checking reads, too
            reads.append(PlainRead(file, offset + at, part, request if is_direct else None, check))
        return reads, nbytes


@dataclass(slots=True)
class PlainRead:
    """A read of plain bytes: a reader calls it, or a ReadQueue does the same without one."""

    file: ExpertFile
    offset: int
    buffer: memoryview
    direct: DirectRead | None = None
    """The same for a ReadQueue; None where it needs a reader."""
    check: Callable[[], int] | None = None
    """Compares what was read with its checksums. Returns bytes read again; raises TransferError."""

    def __call__(self) -> Moved:
        is_direct = self.file.read_into(self.offset, [self.buffer])
        again_nbytes = 0 if self.check is None else self.check()
        return Moved(0 if is_direct else len(self.buffer), again_nbytes=again_nbytes)


class FirstReads:
    """Compares each block of a layer with its sum when it is first read. Any thread may call."""

    def __init__(self, layer: int, file: ExpertFile, begin: int, expert_nbytes: int, segment_nbytes: int, sums: Sums):
        """`begin`: the offset of the first expert in the file; `segment_nbytes`: for messages, which name segments."""
        self._layer = layer
        self._file = file
        self._begin = begin
        self._expert_nbytes = expert_nbytes
        self._segment_nbytes = segment_nbytes
        self._sums = sums
        self.block_nbytes = expert_nbytes // len(sums[0])
        self.unchecked = {expert: bytearray(len(blocks)) for expert, blocks in enumerate(sums)}
        """Of experts with blocks to compare, by their places in the file: 1 for each block that has been."""

    def are_over(self, expert: int, first: int, nbytes: int) -> bool:
        """Whether all blocks of these `nbytes`, from byte `first` of an expert, have been compared. `expert`: its place
        in the file.
        """
        block = self.block_nbytes
        return self.unchecked.get(expert, b"").find(0, first // block, -(-(first + nbytes) // block)) < 0

    def check(self, expert: int, first: int, view: memoryview) -> int:
        """Compare the blocks of `view`, which was read from byte `first` of an expert. A block that is only partly in
        it is read again as a whole; returns the bytes of these reads. Raises TransferError naming file, layer, expert
        and segment where a block is damaged.
        """
        is_known, block, again_nbytes = self.unchecked.get(expert), self.block_nbytes, 0
        if is_known is None:
            return 0
        for number in range(first // block, -(-(first + len(view)) // block)):
            if is_known[number]:
                continue
            begin = number * block - first
            part = view[begin : begin + block]
            if begin < 0 or len(part) < block:
                part = memoryview(bytearray(block))
                self._file.read_into(self._begin + expert * self._expert_nbytes + number * block, [part])
                again_nbytes += block
            found, packed = xxhash.xxh3_64_intdigest(part), self._sums[expert][number]
            if found != packed:
                one, last = number * block // self._segment_nbytes, ((number + 1) * block - 1) // self._segment_nbytes
                segments = f"segment {one}" if one == last else f"segments {one} to {last}"
                raise TransferError(
                    f"{self._file.path}: layer {self._layer}, expert {expert}, {segments}: checksum {found:016x}, but "
                    f"it was packed with {packed:016x}: damaged; remove the store and pack again"
                )
            is_known[number] = 1
        if 0 not in is_known:
            self.unchecked.pop(expert, None)
        return again_nbytes


class FrameSource(Source):
    """Compressed experts. Each read takes the pages of some frames from disk, then decodes these frames one by one, so
    that readers that read and readers that decode overlap. Where P does not divide an expert's frames, neighbouring
    segments share a frame.
    """

    batch_nbytes = MIN_DECODE_NBYTES

    def __init__(self, files: list[ExpertFile], layers: list[LayerFile], geometry: Geometry, num_readers: int) -> None:
        super().__init__(files, layers, geometry, num_readers)
        self._indexes = [one.frames for one in layers if one.frames is not None]  # all: a store has one codec
        longest = max(padded(index.frame_nbytes) + PAGE_NBYTES for index in self._indexes)  # the pages of one frame
        self._scratch_nbytes = max(MAX_SCRATCH_NBYTES, longest)
        self._scratch = _Scratch(self._scratch_nbytes)

    def reads(self, span: Span, buffer: memoryview) -> tuple[Sequence[Read], int]:
        """One read for each reader, but of at least MIN_DECODE_NBYTES of weights, and no more than scratch holds."""
        layer, index = span.layer, self._indexes[span.layer]
        place, size = self._layers[layer].places[span.expert], index.frame_nbytes
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
            first = max(begin, frame * size)  # the first byte of the expert's weights that is wanted of these frames
            out = buffer[first - begin : (frame + count) * size - begin]
            reads.append(partial(self._read, layer, place, range(frame, frame + count), pages, first, out))
            disk_nbytes += pages[1]
            frame += count
        return reads, disk_nbytes

    def _read(
        self, layer: int, place: int, frames: range, pages: tuple[int, int], first: int, out: memoryview
    ) -> Moved:
        """Decode frames of the expert at `place` in the file into `out`, from byte `first` of its weights on."""
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
    """Each reader's own decoder, and page-aligned memory for compressed bytes."""

    def __init__(self, nbytes: int) -> None:
        self.decoder = FrameDecoder()
        self.memory = memoryview(mmap.mmap(-1, nbytes))


def _pages(index: FrameIndex, expert: int, first: int, count: int) -> tuple[int, int]:
    """Offset and length of the pages of these frames."""
    offset, nbytes = index.extent(expert, first, count)
    begin = offset // PAGE_NBYTES * PAGE_NBYTES
    return begin, padded(offset + nbytes) - begin


# -- slots in RAM ----------------------------------------------------------------------------------------------------


class HostPool:
    """Slots in RAM, one region for each size class, as bytes (to read into) and as tensors (to compute with).

    The process takes pages, from NUMA node `node` if given, when they are first written, so a pool costs only what has
    been loaded. Memory is freed when nothing refers to it.
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
        """The slots as rows of this layer's shape, [S * I/P, M, H]: slot s is rows [s * I/P, (s+1) * I/P). In a weight
        format, blocks as bytes, [S * I/P/block_size, block_nbytes].
        """
        return self._rows[layer]

    def buffer(self, span: Span) -> memoryview:
        """The bytes of a span's slots."""
        memory, nbytes = self._slots[span.layer]
        return memory[span.slot * nbytes : (span.slot + span.num_segments) * nbytes]

    def close(self) -> None:
        """Drop the memory. Idempotent."""
        self.regions, self._slots, self._rows = [], [], []


def _mapped(nbytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def layer_rows(flat: torch.Tensor, geometry: Geometry, layer: int, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of a size class as `HostPool.rows` of a layer."""
    shape = geometry.layers[layer]
    if shape.format:
        return flat.view(-1, shape.block_nbytes)
    return flat.view(dtype).view(-1, shape.num_matrices, shape.hidden_size)


# -- reads without a reader --------------------------------------------------------------------------------------------

_SPIN_NS = 200_000
"""A read of some ten kilobytes ends sooner: so long it is asked for again and again instead of going to sleep, from
which a thread returns with cold caches.
"""


class ReadQueue:
    """Reads past the page cache that need no thread of their own: several begin in one call of the system (Linux AIO).
    Called by one thread.
    """

    MAX_READS = 64
    """In flight at a time."""

    def __init__(self) -> None:
        """Raises OSError where the system has no such reads."""
        numbers = _SYSTEM_CALLS.get(platform.machine()) if sys.platform == "linux" else None
        if numbers is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._setup, self._destroy, self._submit, self._get_events = numbers
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.argtypes, self._call.restype = 6 * (ctypes.c_long,), ctypes.c_long
        self._events = array("q", bytes(32 * self.MAX_READS))  # for each: tag, its request, result, another result
        self._timeout = array("q", (0, 0))
        self._context = ctypes.c_long()
        self._open()

    def begin(self, reads: Sequence[tuple[int, DirectRead]]) -> int:
        """Begin reads, each with a tag; returns how many of them, the first ones, the
        system has taken.
        """
        requests = array("q")  # struct iocb
        for tag, (fd, offset, address, nbytes) in reads:
            requests.extend((tag, 0, fd << 32, address, nbytes, offset, 0, 0))
        first = requests.buffer_info()[0]
        pointers = array("q", range(first, first + 64 * len(reads), 64))
        num: int = self._call(self._submit, self._context.value, len(reads), pointers.buffer_info()[0], 0, 0)
        return max(0, num)

    def ended(self, timeout_ns: int = 0) -> list[tuple[int, int]]:
        """Tags of reads that have ended, and how many bytes each read, below 0 where it failed. Waits until there is
        one, but no longer than `timeout_ns`, a second at most.
        """
        events, timeout = self._events, self._timeout
        start_ns, timeout[1] = time.perf_counter_ns(), 0
        context, room = self._context.value, (self.MAX_READS, events.buffer_info()[0], timeout.buffer_info()[0])
        num = self._call(self._get_events, context, 0, *room)
        while not num and time.perf_counter_ns() - start_ns < min(timeout_ns, _SPIN_NS):
            num = self._call(self._get_events, context, 0, *room)
        if not num and timeout_ns:
            timeout[1] = min(timeout_ns, 999_999_999)
            num = self._call(self._get_events, context, 1, *room)
        end = 4 * max(0, num)  # a signal came: nobody knows of any
        return list(zip(events[0:end:4], events[2:end:4], strict=True))

    def restart(self) -> None:
        """Wait until no read runs, and forget all. After an interrupt in here, call it again."""
        self.close()
        self._open()

    def close(self) -> None:
        """Wait until no read runs. Idempotent."""
        if self._context.value:
            self._call(self._destroy, self._context.value, 0, 0, 0, 0)
            self._context.value = 0

    def _open(self) -> None:
        if self._call(self._setup, self.MAX_READS, ctypes.addressof(self._context), 0, 0, 0):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


_SYSTEM_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
"""Numbers of io_setup, io_destroy, io_submit and io_getevents."""
