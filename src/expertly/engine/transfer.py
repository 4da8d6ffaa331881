"""Reader threads: from the packed store into slots, several reads in flight, loads before prefetches."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from queue import Empty, SimpleQueue
from typing import NamedTuple

from expertly.core.errors import TransferError
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.core.resources import NUM_READERS
from expertly.engine.numa import MemoryNode
from expertly.engine.reading import DirectRead, ExtentSource, Moved, PlainRead, Read, ReadQueue, make_source

_COLLECT_NS = 1_000_000
"""So long a wait looks only at reads without a reader."""

LOOK_EVERY_S = 1.0
"""A thread that waits for another checks this often whether that one still runs."""


@dataclass(slots=True, eq=False)
class _Ticket:
    """One span under way."""

    span: Span
    disk_nbytes: int
    is_prefetch: bool
    reads_left: int
    error: Exception | None = None
    failed: list[_Job] = field(default_factory=list)  # of reads without a reader


class _Job(NamedTuple):
    ticket: _Ticket
    read: Read


class Readers:
    """Submit spans, then take them back as they arrive, in any order. Called by one thread.

    A prefetch begins only while no load is queued or being read. One prefetched span is in flight at a time, or as many
    small ones as there are readers, so that a load waits for no more than that (fMoE, section 4.5).

    What needs no more than its bytes is read without a reader: waking one costs half as much as a small read, and
    takes the interpreter from the thread that computes. The caller begins such prefetches, when it submits, polls or
    waits.

    The caller takes no lock: an interrupt between taking and releasing it would stop the readers for ever. When a
    reader thread has ended, `poll` and `wait` raise its exception and `drain` replaces it.
    """

    def __init__(
        self,
        store: ExtentSource,
        geometry: Geometry,
        buffer_of: Callable[[Span], memoryview],
        num_readers: int = NUM_READERS,
        node: MemoryNode | None = None,
        arrived: Callable[[], None] | None = None,
    ) -> None:
        """`buffer_of` gives the bytes of a span's slots; `node`: where the threads run. `arrived` is called by a reader
        when there is something for `poll`; then all reads are the readers'.
        """
        self._arrived = arrived
        self._source = make_source(store, geometry, num_readers)
        self._buffer_of = buffer_of
        self._num_readers = num_readers
        self._node = node
        self._jobs: SimpleQueue[list[_Job] | threading.Barrier | None] = SimpleQueue()  # begun; None ends a reader
        self._done: SimpleQueue[_Ticket | None] = SimpleQueue()  # None: a reader has ended
        self._ended_by: BaseException | None = None  # what ended a reader
        self._prefetches: deque[list[_Job]] = deque()  # spans not begun; the thread that removes one owns it
        self._queue = _read_queue() if arrived is None else None
        self.prefetches_when_called = self._queue is not None and self._source.is_direct
        """Whether prefetches begin only in calls of `prefetch`, `poll` and `wait`, as far as they need no reader."""
        self._queued: dict[int, _Job] = {}  # begun there, by tag
        self._waiting: list[tuple[_Job, DirectRead]] = []  # to begin there, when the system has room
        self._num_queued = 0  # that ever were
        self._lock = threading.Lock()  # taken by readers only
        self._num_loads = 0  # spans; written by the caller
        self._num_loads_read = 0  # of these; written by the readers
        self._num_queued_read = 0  # and those without one; written by the caller
        self._num_prefetch_reads = 0  # begun and not ended; written by the readers
        self._num_queued_prefetch_reads = 0  # the same without one; written by the caller
        self.num_in_flight = 0
        """Spans submitted and neither taken back nor cancelled."""
        self.asked_nbytes = 0
        """To be read from disk for all spans, without those cancelled before they began."""
        self.again_nbytes = 0
        """Read a second time to verify checksums of whole blocks."""
        self.buffered_nbytes = 0
        """Read through the page cache."""
        self.decoded_nbytes = 0
        """Weights decoded from compressed frames."""
        self.decode_ns = 0
        """Processor time of decoding, of all readers."""
        self._threads = [self._start(i) for i in range(num_readers)]

    def submit(self, spans: Sequence[Span]) -> None:
        """Start reading. A large span is several reads; small ones go together, to no reader or to one."""
        self._num_loads += len(spans)  # from here on no prefetch begins
        batch: list[_Job] = []
        batch_nbytes = 0
        queued: list[tuple[_Job, DirectRead]] = []
        for span in spans:
            self.num_in_flight += 1
            buffer = self._buffer_of(span)
            reads, disk_nbytes = self._source.reads(span, buffer)
            self.asked_nbytes += disk_nbytes
            ticket = _Ticket(span, disk_nbytes, False, len(reads))
            jobs = list(map(_Job, repeat(ticket), reads))
            direct = self._direct(jobs)
            if direct is not None:
                queued += direct
            elif len(jobs) > 1:
                for job in jobs:
                    self._jobs.put([job])
            else:
                batch += jobs
                batch_nbytes += len(buffer)
                if batch_nbytes >= self._source.batch_nbytes:
                    self._jobs.put(batch)
                    batch, batch_nbytes = [], 0
        if queued:
            self._enqueue(queued)
        if batch:
            self._jobs.put(batch)

    def prefetch(self, spans: Sequence[Span]) -> None:
        """Read these, in this order, while no load is queued or being read."""
        for span in spans:
            self.num_in_flight += 1
            reads, disk_nbytes = self._source.reads(span, self._buffer_of(span))
            self.asked_nbytes += disk_nbytes
            ticket = _Ticket(span, disk_nbytes, True, len(reads))
            self._prefetches.append(list(map(_Job, repeat(ticket), reads)))
        self._begin()

    def cancel(self, layer: int | None = None, experts: Collection[int] | None = None) -> list[Span]:
        """Cancel prefetches that have not begun: of this layer, or of these experts of it, or all. Returns them; they
        will not arrive.
        """
        cancelled: list[Span] = []
        for jobs in list(self._prefetches):
            span = jobs[0].ticket.span
            if (layer is None or span.layer == layer) and (experts is None or span.expert in experts):
                try:
                    self._prefetches.remove(jobs)
                except ValueError:  # a reader was faster
                    continue
                cancelled.append(span)
                self.num_in_flight -= 1
                self.asked_nbytes -= jobs[0].ticket.disk_nbytes
        return cancelled

    def poll(self) -> Span | None:
        """A span that has arrived, or None. Raises the exception of its read."""
        if not self.num_in_flight:
            return None
        if self._queued and self._done.empty():
            self._collect()
        try:
            return self._take(self._done.get_nowait())
        except Empty:
            return None

    def wait(self) -> Span:
        """The next span to arrive. Raises the exception of its read. Something must be in flight."""
        assert self.num_in_flight, "waiting for nothing would never end"
        while self._queued and self._done.empty():
            self._collect(_COLLECT_NS)
        while True:
            try:
                return self._take(self._done.get(timeout=LOOK_EVERY_S))
            except Empty:
                self.look()

    def look(self) -> None:
        """Have `poll` raise if a reader has ended without an exception."""
        if not all(thread.is_alive() for thread in self._threads):
            self._done.put(None)

    def drain(self) -> None:
        """Cancel all prefetches that have not begun, wait for all other reads, drop results and errors, and start
        readers that have ended again.

        It relies on no count of what is in flight: an interrupt may have left one wrong. After an interrupt in here,
        call it again.
        """
        self.cancel()
        if self._queue is not None:
            try:
                self._queue.restart()
            except OSError:  # the system has given its room to others
                self._queue = None
        self._queued.clear()
        self._waiting = []
        for _ in range(2 if self._threads else 0):  # a reader may have been about to begin what it had just removed
            while not self._gather():
                pass
        while not self._done.empty():
            self._done.get()
        self._num_loads = self._num_loads_read = self._num_queued_read = 0
        self.num_in_flight = self._num_prefetch_reads = self._num_queued_prefetch_reads = 0

    def stats(self) -> dict[str, int]:
        """Bytes asked of the disk, and of these through the page cache; of a compressed store also bytes of weights
        decoded, and processor time that it took.
        """
        return {
            "disk_nbytes": self.asked_nbytes + self.again_nbytes,
            "buffered_nbytes": self.buffered_nbytes,
            "decoded_nbytes": self.decoded_nbytes,
            "decode_ns": self.decode_ns,
        }

    def close(self) -> None:
        """End the threads and close the files. Idempotent."""
        self.drain()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self._queue is not None:
            self._queue.close()
        self._source.close()

    def _are_loads_read(self) -> bool:
        return self._num_loads == self._num_loads_read + self._num_queued_read

    def _direct(self, jobs: Sequence[_Job]) -> list[tuple[_Job, DirectRead]] | None:
        """The jobs of a span as reads that need no reader; None where they need one."""
        direct: list[tuple[_Job, DirectRead]] = []
        for job in jobs if self._queue is not None else ():
            read = job.read.direct if isinstance(job.read, PlainRead) else None
            if read is None:
                return None
            direct.append((job, read))
        return direct or None

    def _enqueue(self, reads: Sequence[tuple[_Job, DirectRead]]) -> None:
        """Begin reads that need no reader. What the system has no room for comes with the next ones."""
        assert self._queue is not None
        self._waiting += reads
        tagged: list[tuple[int, DirectRead]] = []
        for job, read in self._waiting:
            self._num_queued += 1
            self._queued[self._num_queued] = job
            tagged.append((self._num_queued, read))
        num = self._queue.begin(tagged)
        for tag, _ in tagged[num:]:
            del self._queued[tag]
        self._waiting = self._waiting[num:]
        if self._waiting and not self._queued:  # and nothing will make room
            rest, self._waiting = [job for job, _ in self._waiting], []
            self._num_queued_prefetch_reads -= sum(job.ticket.is_prefetch for job in rest)
            for ticket in {job.ticket for job in rest}:
                rest += ticket.failed
                ticket.reads_left += len(ticket.failed)
            self._hand_over(rest)

    def _hand_over(self, jobs: Sequence[_Job]) -> None:
        """Have readers do what is left of spans of which nothing is under way; prefetches become loads."""
        for job in jobs:
            if job.ticket.is_prefetch:
                job.ticket.is_prefetch = False
                self._num_loads += 1
            self._jobs.put([job])

    def _begin(self) -> None:
        """Begin the prefetches that may begin and need no reader; have a reader begin others."""
        while self._prefetches and self._are_loads_read():  # else whoever reads the last load begins them
            try:
                jobs = self._prefetches[0]
                num_busy = self._num_queued_prefetch_reads + self._num_prefetch_reads
                if num_busy and num_busy + len(jobs) > self._num_readers:
                    return  # what ends next will be followed by them
                direct = self._direct(jobs)
                if direct is None:
                    self._jobs.put([])
                    return
                self._prefetches.remove(jobs)
            except (IndexError, ValueError):  # a reader was faster
                continue
            self._num_queued_prefetch_reads += len(jobs)
            self._enqueue(direct)

    def _collect(self, timeout_ns: int = 0) -> None:
        """Take what has been read without a reader; waits for that no longer than `timeout_ns`."""
        assert self._queue is not None
        for tag, nbytes in self._queue.ended(timeout_ns):
            job = self._queued.pop(tag)
            ticket = job.ticket
            assert isinstance(job.read, PlainRead)
            if nbytes != len(job.read.buffer):
                ticket.failed.append(job)
            elif job.read.check is not None:
                try:
                    job.read.check()
                except Exception as error:  # `poll` and `wait` raise it
                    ticket.error = error
            ticket.reads_left -= 1
            self._num_queued_prefetch_reads -= ticket.is_prefetch
            if ticket.reads_left:
                continue
            if not ticket.failed:
                self._num_queued_read += not ticket.is_prefetch
                self._done.put(ticket)
                continue
            ticket.reads_left = len(ticket.failed)
            self._hand_over(ticket.failed)  # a reader tries again, and says what is wrong
        if self._waiting:
            self._enqueue(())
        if self._prefetches:
            self._begin()

    def _take(self, ticket: _Ticket | None) -> Span:
        if ticket is None:
            cause = "" if self._ended_by is None else f": {type(self._ended_by).__name__}: {self._ended_by}"
            raise TransferError(f"a thread that reads experts has ended{cause}") from self._ended_by
        self.num_in_flight -= 1
        if ticket.error is not None:
            raise self._source.explained(ticket.span.layer, ticket.error)
        file = self._source.files[ticket.span.layer]
        now, before = os.fstat(file.fd), file.about
        if now.st_ctime_ns != before.st_ctime_ns or now.st_mtime_ns != before.st_mtime_ns:
            self._source.changed(ticket.span, now, self._buffer_of, is_last=not self.num_in_flight)
        return ticket.span

    def _gather(self) -> bool:
        """Wait until all readers have done every job queued so far; False where one has ended and must be replaced."""
        self._threads = [one if one.is_alive() else self._start(i) for i, one in enumerate(self._threads)]
        all_there = threading.Event()
        barrier = threading.Barrier(len(self._threads), action=all_there.set)
        try:
            for _ in self._threads:
                self._jobs.put(barrier)
            while not all_there.wait(LOOK_EVERY_S):
                if not all(thread.is_alive() for thread in self._threads):
                    barrier.abort()
                    return False
        except BaseException:
            barrier.abort()  # else readers at the barrier would wait for ever
            raise
        return True

    def _start(self, number: int) -> threading.Thread:
        thread = threading.Thread(target=self._run, name=f"expertly-reader-{number}", daemon=True)
        thread.start()
        return thread

    # -- in the readers ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._node is not None:
                self._node.pin_thread()
            while (jobs := self._jobs.get()) is not None:
                if isinstance(jobs, threading.Barrier):
                    with contextlib.suppress(threading.BrokenBarrierError):  # `drain` was interrupted
                        jobs.wait()
                    continue
                for job in jobs:
                    self._run_one(job)
                if self._prefetches:
                    self._begin_prefetches()
        except BaseException as error:  # a thread's entry: the waiter raises it
            self._ended_by = error
            self._done.put(None)
            if self._arrived is not None:
                self._arrived()

    def _run_one(self, job: _Job) -> None:
        error: Exception | None = None
        moved = Moved(0)
        try:
            moved = job.read()
        except Exception as e:  # a thread's entry: whatever it is, the waiter raises it
            error = e
        ticket = job.ticket
        with self._lock:
            self.again_nbytes += moved.again_nbytes
            self.buffered_nbytes += moved.buffered_nbytes
            self.decoded_nbytes += moved.decoded_nbytes
            self.decode_ns += moved.decode_ns
            ticket.error = ticket.error or error
            ticket.reads_left -= 1
            is_last = not ticket.reads_left
            if ticket.is_prefetch:
                self._num_prefetch_reads -= 1
            elif is_last:
                self._num_loads_read += 1
        if is_last:
            self._done.put(ticket)
            if self._arrived is not None:
                self._arrived()

    def _begin_prefetches(self) -> None:
        """Begin the prefetches that may begin. They are queued before later loads, so that they end soon."""
        with self._lock:
            while self._prefetches and self._are_loads_read():
                try:
                    jobs = self._prefetches[0]
                    num_busy = self._num_queued_prefetch_reads + self._num_prefetch_reads
                    if num_busy and num_busy + len(jobs) > self._num_readers:
                        return
                    self._prefetches.remove(jobs)
                except (IndexError, ValueError):  # cancelled meanwhile
                    continue
                self._num_prefetch_reads += len(jobs)
                for job in jobs:
                    self._jobs.put([job])


def _read_queue() -> ReadQueue | None:
    try:
        return ReadQueue()
    except OSError:  # not Linux, or forbidden here
        return None
