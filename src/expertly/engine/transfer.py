"""Reader threads: from the packed store into slots, several reads in flight, page cache untouched, demands first."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from expertly.core.errors import TransferError
from expertly.core.geometry import PAGE_NBYTES, Geometry
from expertly.core.messages import Piece
from expertly.engine.numa import MemoryNode
from expertly.store.reader import ExpertFile

NUM_READERS = 4
"""Reads in flight. Disks and page-cache copies here are at their best from 4 on (`expertly doctor`)."""

_LOOK_EVERY_S = 1.0
"""Whoever waits looks so often whether the readers still run."""

MIN_READ_NBYTES = 1 << 20
"""A read is split over the readers down to this: smaller ones are slowed by the interpreter lock."""


@dataclass(slots=True, eq=False)
class _Ticket:
    """One piece under way."""

    piece: Piece
    is_ahead: bool
    nbytes: int
    reads_left: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    ticket: _Ticket
    file: ExpertFile
    offset: int
    buffer: memoryview


class ExtentSource(Protocol):
    """What readers need of a PackedStore."""

    def layer_extent(self, layer: int) -> tuple[Path, int]:
        """The file of a layer's experts and the offset of the first of them in it."""

    def expert_in_file(self, layer: int, expert: int) -> int:
        """The place of an expert in that file, from 0, where its number here is `expert`."""


class Readers:
    """Submit pieces, then take them back as they arrive, in any order. One caller thread.

    What is submitted ahead begins only while no demand is queued or being read. One piece of it is under way at a time,
    or as many small ones as there are readers: that is all a demand may find before it (fMoE, section 4.5).

    The caller's thread takes no lock: an interrupt could come between taking and giving it back, and stop the readers.
    A reader that ends, whatever ended it, is told of by `poll` and `wait`, and replaced by `drain`.
    """

    def __init__(
        self,
        store: ExtentSource,
        geometry: Geometry,
        buffer_of: Callable[[Piece], memoryview],
        num_readers: int = NUM_READERS,
        node: MemoryNode | None = None,
    ) -> None:
        extents = [store.layer_extent(layer) for layer in range(geometry.num_layers)]
        self._files = [ExpertFile(path) for path, _ in extents]
        self._offsets = [  # of each expert
            [offset + store.expert_in_file(layer, e) * shape.expert_nbytes for e in range(shape.num_experts)]
            for layer, ((_, offset), shape) in enumerate(zip(extents, geometry.layers, strict=True))
        ]
        self._geometry = geometry
        self._buffer_of = buffer_of
        self._num_readers = num_readers
        self._node = node
        self._jobs: SimpleQueue[list[_Read] | threading.Barrier | None] = SimpleQueue()  # of what has begun
        self._done: SimpleQueue[_Ticket | None] = SimpleQueue()  # None: a reader has ended
        self._ended_by: BaseException | None = None  # what ended a reader
        self._ahead: deque[list[_Read]] = deque()  # pieces not begun; whoever removes one has it
        self._lock = threading.Lock()  # of the readers
        self._num_demanded = 0  # pieces; written by the caller
        self._num_served = 0  # of these, read; written by the readers
        self._num_ahead_reads = 0  # begun and not ended; written by the readers
        self.num_in_flight = 0
        """Pieces submitted and neither taken back nor withdrawn."""
        self.asked_nbytes = 0
        """Of all pieces submitted and not withdrawn or dropped before they were begun."""
        self.buffered_nbytes = 0
        """What was read through the page cache."""
        self._threads = [self._start(i) for i in range(num_readers)]

    def submit(self, pieces: Iterable[Piece]) -> None:
        """Start reading; large pieces are cut over the readers, small ones travel together."""
        pieces = list(pieces)
        self._num_demanded += len(pieces)  # from here on nothing else begins
        batch: list[_Read] = []
        batch_nbytes = 0
        for piece in pieces:
            self.num_in_flight += 1
            reads = self._reads(piece, False)
            if len(reads) > 1:
                for read in reads:
                    self._jobs.put([read])
                continue
            batch += reads
            batch_nbytes += len(reads[0].buffer)
            if batch_nbytes >= MIN_READ_NBYTES:
                self._jobs.put(batch)
                batch, batch_nbytes = [], 0
        if batch:
            self._jobs.put(batch)

    def submit_ahead(self, pieces: Iterable[Piece]) -> None:
        """Read these, in this order, while no piece of `submit` is queued or being read."""
        for piece in pieces:
            self.num_in_flight += 1
            self._ahead.append(self._reads(piece, True))
        if self._num_demanded == self._num_served:  # else whoever serves the last demand looks for more, after this
            self._jobs.put([])

    def withdraw(self, layer: int | None = None, experts: Collection[int] | None = None) -> list[Piece]:
        """Take back what was submitted ahead of this layer, or of these experts of it, or of any, and not begun: it
        will not come.
        """
        gone: list[Piece] = []
        for reads in list(self._ahead):
            ticket = reads[0].ticket
            is_of_layer = layer is None or ticket.piece.layer == layer
            if is_of_layer and (experts is None or ticket.piece.expert in experts):
                try:
                    self._ahead.remove(reads)
                except ValueError:  # a reader was faster
                    continue
                gone.append(ticket.piece)
                self.num_in_flight -= 1
                self.asked_nbytes -= ticket.nbytes
        return gone

    def poll(self) -> Piece | None:
        """A piece that has arrived, or None. Raises what its read raised."""
        try:
            return self._take(self._done.get_nowait())
        except Empty:
            return None

    def wait(self) -> Piece:
        """The next piece to arrive. Raises what its read raised. Something must be in flight."""
        assert self.num_in_flight, "waiting for nothing would never end"
        while True:
            try:
                return self._take(self._done.get(timeout=_LOOK_EVERY_S))
            except Empty:
                if not all(thread.is_alive() for thread in self._threads):
                    self._done.put(None)

    def drain(self) -> None:
        """Drop what was submitted ahead and has not been begun, and wait for the rest; results and errors are dropped,
        and readers that have ended are started again.

        Counts nothing: an interrupt may have come between a count and what it counts. One that comes now leaves reads
        under way; drain again.
        """
        self.withdraw()
        for _ in range(2 if self._threads else 0):  # a reader may have been about to begin what it had just removed
            while not self._gather():
                pass
        while not self._done.empty():
            self._done.get()
        self.num_in_flight = self._num_demanded = self._num_served = self._num_ahead_reads = 0

    def _gather(self) -> bool:
        """Wait until all readers have done every job before this; False where one had ended, and must be replaced."""
        self._threads = [one if one.is_alive() else self._start(i) for i, one in enumerate(self._threads)]
        all_there = threading.Event()
        gate = threading.Barrier(len(self._threads), action=all_there.set)  # a reader waits at it until all have come
        try:
            for _ in self._threads:
                self._jobs.put(gate)
            while not all_there.wait(_LOOK_EVERY_S):
                if not all(thread.is_alive() for thread in self._threads):
                    gate.abort()
                    return False
        except BaseException:
            gate.abort()  # else the readers that are there would wait for ever
            raise
        return True

    def close(self) -> None:
        """End the threads and close the files. Idempotent."""
        self.drain()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        for file in self._files:
            file.close()
        self._files = []

    def _take(self, ticket: _Ticket | None) -> Piece:
        if ticket is None:
            cause = "" if self._ended_by is None else f": {type(self._ended_by).__name__}: {self._ended_by}"
            raise TransferError(f"a thread that reads experts has ended{cause}") from self._ended_by
        self.num_in_flight -= 1
        if ticket.error is not None:
            raise ticket.error
        return ticket.piece

    def _reads(self, piece: Piece, is_ahead: bool) -> list[_Read]:
        offset = self._offsets[piece.layer][piece.expert] + piece.segment * self._geometry.segment_nbytes(piece.layer)
        buffer = self._buffer_of(piece)
        size = -(-len(buffer) // self._num_readers)
        size = max(MIN_READ_NBYTES, -(-size // PAGE_NBYTES) * PAGE_NBYTES)
        starts = range(0, len(buffer), size)
        ticket = _Ticket(piece, is_ahead, len(buffer), len(starts))
        file = self._files[piece.layer]
        self.asked_nbytes += len(buffer)
        return [_Read(ticket, file, offset + start, buffer[start : start + size]) for start in starts]

    def _start(self, number: int) -> threading.Thread:
        thread = threading.Thread(target=self._run, name=f"expertly-reader-{number}", daemon=True)
        thread.start()
        return thread

    # -- in the readers ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._node is not None:
                self._node.pin_thread()
            self._serve()
        except BaseException as error:  # a thread's entry: the waiter raises it
            self._ended_by = error
            self._done.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, threading.Barrier):
                with contextlib.suppress(threading.BrokenBarrierError):  # whoever drains was interrupted
                    job.wait()
                continue
            for read in job:
                self._read(read)
            if self._ahead:
                self._begin_ahead()

    def _read(self, read: _Read) -> None:
        error: Exception | None = None
        try:
            direct = read.file.read_into(read.offset, [read.buffer])
        except Exception as e:  # a thread's entry: whatever it is, the waiter raises it
            error, direct = e, True
        ticket = read.ticket
        with self._lock:
            if not direct:
                self.buffered_nbytes += len(read.buffer)
            ticket.error = ticket.error or error
            ticket.reads_left -= 1
            is_last = not ticket.reads_left
            if ticket.is_ahead:
                self._num_ahead_reads -= 1
            elif is_last:
                self._num_served += 1
        if is_last:
            self._done.put(ticket)

    def _begin_ahead(self) -> None:
        """Begin what may begin; what has begun goes before demands that come later, so that it ends soon."""
        with self._lock:
            while self._ahead and self._num_demanded == self._num_served:
                try:
                    reads = self._ahead[0]
                    if self._num_ahead_reads and self._num_ahead_reads + len(reads) > self._num_readers:
                        return
                    self._ahead.remove(reads)
                except (IndexError, ValueError):  # withdrawn meanwhile
                    continue
                self._num_ahead_reads += len(reads)
                for read in reads:
                    self._jobs.put([read])
