"""Reader threads: from the packed store into slots, several reads in flight, page cache untouched."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from expertly.core.geometry import PAGE_NBYTES, Geometry
from expertly.core.messages import Piece
from expertly.store.reader import ExpertFile

NUM_READERS = 4
"""Reads in flight. Disks and page-cache copies here are at their best from 4 on (`expertly doctor`)."""

MIN_READ_NBYTES = 1 << 20
"""A read is split over the readers down to this: smaller ones are slowed by the interpreter lock."""


@dataclass(slots=True)
class _Ticket:
    """One piece under way."""

    piece: Piece
    reads_left: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Read:
    ticket: _Ticket
    file: ExpertFile
    offset: int
    buffer: memoryview


class ExtentSource(Protocol):
    """What readers need of a PackedStore."""

    def layer_extent(self, layer: int) -> tuple[Path, int]:
        """The file of a layer's experts and the offset of expert 0 in it."""


class Readers:
    """Submit pieces, then take them back as they arrive, in any order. One caller thread."""

    def __init__(
        self,
        store: ExtentSource,
        geometry: Geometry,
        buffer_of: Callable[[Piece], memoryview],
        num_readers: int = NUM_READERS,
    ) -> None:
        extents = [store.layer_extent(layer) for layer in range(geometry.num_layers)]
        self._files = [ExpertFile(path) for path, _ in extents]
        self._offsets = [offset for _, offset in extents]
        self._geometry = geometry
        self._buffer_of = buffer_of
        self._jobs: SimpleQueue[list[_Read] | threading.Barrier | None] = SimpleQueue()
        self._done: SimpleQueue[_Ticket] = SimpleQueue()
        self._lock = threading.Lock()
        self.num_in_flight = 0
        self.buffered_nbytes = 0
        self._threads = [
            threading.Thread(target=self._serve, name=f"expertly-reader-{i}", daemon=True) for i in range(num_readers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, pieces: Iterable[Piece]) -> None:
        """Start reading; large pieces are cut over the readers, small ones travel together."""
        batch: list[_Read] = []
        batch_nbytes = 0
        for piece in pieces:
            self.num_in_flight += 1
            reads = self._reads(piece)
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

    def poll(self) -> Piece | None:
        """A piece that has arrived, or None. Raises what its read raised."""
        try:
            return self._take(self._done.get_nowait())
        except Empty:
            return None

    def wait(self) -> Piece:
        """The next piece to arrive. Raises what its read raised. Something must be in flight."""
        assert self.num_in_flight, "waiting for nothing would never end"
        return self._take(self._done.get())

    def drain(self) -> None:
        """Wait until nothing is in flight; results and errors are dropped.

        Counts nothing: an interrupt may have come between a count and what it counts.
        """
        if self._threads:
            gate = threading.Barrier(len(self._threads) + 1)
            for _ in self._threads:
                self._jobs.put(gate)  # a reader waits at it until all have: then every job before it is done
            gate.wait()
        while not self._done.empty():
            self._done.get()
        self.num_in_flight = 0

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

    def _take(self, ticket: _Ticket) -> Piece:
        self.num_in_flight -= 1
        if ticket.error is not None:
            raise ticket.error
        return ticket.piece

    def _reads(self, piece: Piece) -> list[_Read]:
        layer = self._geometry.layers[piece.layer]
        offset = self._offsets[piece.layer] + piece.expert * layer.expert_nbytes
        offset += piece.segment * self._geometry.segment_nbytes(piece.layer)
        buffer = self._buffer_of(piece)
        size = -(-len(buffer) // (len(self._threads) or 1))
        size = max(MIN_READ_NBYTES, -(-size // PAGE_NBYTES) * PAGE_NBYTES)
        starts = range(0, len(buffer), size)
        ticket = _Ticket(piece, len(starts))
        file = self._files[piece.layer]
        return [_Read(ticket, file, offset + start, buffer[start : start + size]) for start in starts]

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, threading.Barrier):
                with contextlib.suppress(threading.BrokenBarrierError):  # whoever drains was interrupted
                    job.wait()
                continue
            for read in job:
                self._read(read)

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
        if is_last:
            self._done.put(ticket)
