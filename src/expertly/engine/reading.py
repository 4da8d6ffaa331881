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
import random
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
from expertly.store.frames import FrameDecoder, FrameIndex, padded, read_frames
from expertly.store.packed import LayerFile
from expertly.store.reader import ExpertFile, is_changed
from expertly.store.sums import CHECK_EVERY, Sums

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


_CHANGED = "was written to while in use"


class Source:
    """Makes reads of spans. Called by the thread that submits; readers call the reads."""

    batch_nbytes: int
    """Small spans are read together by one reader, up to this many bytes of weights."""
    is_direct = False
    """Whether aligned reads bypass the page cache and need no reader: see `ReadQueue`."""

    def __init__(self, files: list[ExpertFile], layers: list[LayerFile], geometry: Geometry, num_readers: int) -> None:
        self.files = files
        """By layer. Where the times of one are not those of its `about` any more, call `changed`."""
        self._layers = layers
        self._num_readers = num_readers
        self._segment_nbytes = [geometry.segment_nbytes(layer) for layer in range(geometry.num_layers)]

    def reads(self, span: Span, buffer: memoryview) -> tuple[Sequence[Read], int]:
        """The reads that fill `buffer`, all of the span's slots, and the bytes that they take from disk."""
        raise NotImplementedError

    def changed(
        self, span: Span, now: os.stat_result, buffer_of: Callable[[Span], memoryview], *, is_last: bool
    ) -> None:
        """The file that a span was read from is `now` another. If it was written to, all of its bytes are compared, and
        these. Raises TransferError naming the file where they are others. `is_last`: nothing else is being read.
        """
        file = self.files[span.layer]
        before = file.about
        if now.st_size != before.st_size:
            sizes = f"{before.st_size} bytes then, {now.st_size} now" + ", truncated" * (now.st_size < before.st_size)
            raise TransferError(f"{file.path}: {_CHANGED} ({sizes}); restore it, or remove the store and pack again")
        try:
            if now.st_mtime_ns != before.st_mtime_ns:  # else it may only have another name, or none any more
                self._compare_layer(span.layer)
            self._compare_again(span, buffer_of)
        except TransferError as error:
            raise TransferError(f"{file.path}: {_CHANGED}: {error}") from None
        if is_last:
            file.about = now

    def explained(self, layer: int, error: Exception) -> Exception:
        """The error of a read, which says so if the file has been written to."""
        file = self.files[layer]
        if isinstance(error, TransferError) and is_changed(file.about, os.fstat(file.fd)):
            return TransferError(f"{file.path}: {_CHANGED}: {error}")
        return error

    def _compare_layer(self, layer: int) -> None:
        """Compare all bytes of a layer's file with their checksums. Raises TransferError."""
        raise NotImplementedError

    def _compare_again(self, span: Span, buffer_of: Callable[[Span], memoryview]) -> None:
        """The same for a span that was read, and for everything else when it is read next."""
        raise NotImplementedError

    def close(self) -> None:
        """Close files. Idempotent."""
        while self.files:
            self.files.pop().close()


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
    """Experts that are not compressed: a read goes straight from the file into the slots. Some are compared with their
    checksums: see BlockChecks.
    """

    batch_nbytes = MIN_READ_NBYTES

    def __init__(self, files: list[ExpertFile], layers: list[LayerFile], geometry: Geometry, num_readers: int) -> None:
        super().__init__(files, layers, geometry, num_readers)
        self.is_direct = all(file.direct_fd >= 0 for file in files)
        self._checks: list[BlockChecks | None] = []
        self._expert_nbytes = [shape.expert_nbytes for shape in geometry.layers]
        for layer, (file, (_, begin, _, sums, _, every)) in enumerate(zip(files, layers, strict=True)):
            nbytes = self._expert_nbytes[layer], self._segment_nbytes[layer]
            self._checks.append(None if sums is None else BlockChecks(layer, file, begin, *nbytes, sums, every))

    def reads(self, span: Span, buffer: memoryview) -> tuple[Sequence[Read], int]:
        layer, nbytes = span.layer, len(buffer)
        file, (_, begin, _, _, places, _) = self.files[layer], self._layers[layer]
        place, first = places[span.expert], span.segment * self._segment_nbytes[layer]
        offset = begin + place * self._expert_nbytes[layer] + first
        checks = self._checks[layer]
        if checks is not None and not checks.is_due(place, first, nbytes):
            checks = None
        size = MIN_READ_NBYTES
        if nbytes > size:
            size = max(size, padded(-(-nbytes // self._num_readers)))
        block = 0 if checks is None else checks.block_nbytes
        if block and not block % SECTOR_NBYTES:
            size = -(-size // block) * block  # each read gets whole blocks
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        reads: list[Read] = []
        for at in range(0, nbytes, size):
            part = buffer[at : at + size]
            request, check = (file.direct_fd, offset + at, address + at, len(part)), None
            # The rule of ExpertFile.read_into, not a call of it: a miss is to go through few files (bench/walk.py).
            is_direct = file.direct_fd >= 0 and not (request[1] | request[2] | request[3]) % file.alignment
            if checks is not None:
                check = partial(checks.check, place, first + at, part)
                is_direct = is_direct and not ((first + at) % block or len(part) % block)  # else checking reads, too
            reads.append(PlainRead(file, offset + at, part, request if is_direct else None, check))
        return reads, nbytes

    def _compare_layer(self, layer: int) -> None:
        if (checks := self._checks[layer]) is not None:
            checks.begin_again()
            buffer = memoryview(bytearray(self._expert_nbytes[layer]))
            for place in range(len(self._layers[layer].sums or ())):
                self.files[layer].read_into(self._layers[layer].begin + place * len(buffer), [buffer])
                checks.check(place, 0, buffer)

    def _compare_again(self, span: Span, buffer_of: Callable[[Span], memoryview]) -> None:
        place, first = self._layers[span.layer].places[span.expert], span.segment * self._segment_nbytes[span.layer]
        if (checks := self._checks[span.layer]) is None:
            raise TransferError("it has no checksums, or they are not compared: load the model again")
        checks.begin_again()
        checks.check(place, first, buffer_of(span))


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


class BlockChecks:
    """Compares each block of a layer with its sum when it is first read, and then at least at every 64th read of it
    (`check_every` of the store): a block that changes is found within so many reads. Any thread may call.
    """

    def __init__(
        self,
        layer: int,
        file: ExpertFile,
        begin: int,
        expert_nbytes: int,
        segment_nbytes: int,
        sums: Sums,
        every: int = CHECK_EVERY,
    ) -> None:
        """`begin`: the offset of the first expert in the file; `segment_nbytes`: for messages, which name segments."""
        self._layer = layer
        self._file = file
        self._begin = begin
        self._expert_nbytes = expert_nbytes
        self._segment_nbytes = segment_nbytes
        self._sums = sums
        self._num_blocks = len(sums[0])
        self.block_nbytes = expert_nbytes // self._num_blocks
        self._every = min(every, 256)
        self._dice = random.Random(layer)
        self._left = bytearray(len(sums) * self._num_blocks)
        """Of each block: how many reads of it come before the next that is compared."""

    def is_due(self, expert: int, first: int, nbytes: int) -> bool:
        """Count a read of `nbytes` from byte `first` of an expert. Whether it is one to `check`. `expert`: its place in
        the file.
        """
        at = expert * self._num_blocks
        blocks = slice(at + first // self.block_nbytes, at - (-(first + nbytes) // self.block_nbytes))
        left = self._left[blocks]
        self._left[blocks] = left.translate(_ONE_LESS)
        return 0 in left

    def begin_again(self) -> None:
        """Compare every block at its next read."""
        self._left[:] = bytes(len(self._left))

    def check(self, expert: int, first: int, view: memoryview) -> int:
        """Compare the blocks of `view`, which was read from byte `first` of an expert. A block that is only partly in
        it is read again as a whole where it is due; returns the bytes of these reads. Raises TransferError naming file,
        layer, expert and segment where a block is damaged.
        """
        at, block, again_nbytes = expert * self._num_blocks, self.block_nbytes, 0
        left = self._every - 1 - self._dice.randrange(max(1, self._every // 4))  # not all at the same time
        for number in range(first // block, -(-(first + len(view)) // block)):
            begin = number * block - first
            part = view[begin : begin + block] if begin >= 0 else view[:0]
            if len(part) < block:
                if self._left[at + number]:
                    continue
                part = memoryview(bytearray(block))
                self._file.read_into(self._begin + expert * self._expert_nbytes + number * block, [part])
                again_nbytes += block
            checksum, packed = xxhash.xxh3_64_intdigest(part), self._sums[expert][number]
            if checksum != packed:
                low, high = number * block // self._segment_nbytes, ((number + 1) * block - 1) // self._segment_nbytes
                segments = f"segment {low}" if low == high else f"segments {low} to {high}"
                self._left[at + number] = 0
                raise TransferError(
                    f"{self._file.path}: layer {self._layer}, expert {expert}, {segments}: checksum {checksum:016x}, "
                    f"but it was packed with {packed:016x}: damaged; remove the store and pack again"
                )
            self._left[at + number] = left
        return again_nbytes


_ONE_LESS = bytes([0, *range(255)])


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

    def _compare_layer(self, layer: int) -> None:
        index = self._indexes[layer]
        for _ in read_frames(self.files[layer], index, range(index.num_experts)):
            pass

    def _compare_again(self, span: Span, buffer_of: Callable[[Span], memoryview]) -> None:
        """Each read is compared."""

    def _read(
        self, layer: int, place: int, frames: range, pages: tuple[int, int], first: int, out: memoryview
    ) -> Moved:
        """Decode frames of the expert at `place` in the file into `out`, from byte `first` of its weights on."""
        offset, disk_nbytes = pages
        stored, decoder = self._scratch.memory[:disk_nbytes], self._scratch.decoder
        is_direct = self.files[layer].read_into(offset, [stored])
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
