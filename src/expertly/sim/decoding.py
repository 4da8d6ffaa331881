"""A disk whose experts are stored compressed: reader threads read parts of them and decode several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import ceil, inf

from expertly.core.costs import CodecCosts, Link
from expertly.core.messages import Span
from expertly.core.resources import MIN_DECODE_NBYTES, NUM_READERS

NEVER_NS = 1 << 62

_NOTHING_NS = 1e-3
"""Work with less than this left is done: it is shared in fractions, while times are whole nanoseconds."""


@dataclass(slots=True, eq=False)
class _SpanUnderWay:
    span: Span
    is_prefetch: bool
    stored_nbytes: int
    reads_left: int  # parts
    decodes_left: int
    read_begin_ns: int = NEVER_NS


@dataclass(slots=True, eq=False)
class _Part:
    """A part of a span. Times are those that are left, with the disk or a processor to itself."""

    whole: _SpanUnderWay
    latency_ns: float
    read_ns: float
    decode_ns: float
    is_begun: bool = False  # by the disk


class DecodingDisk:
    """Serves spans as a TransferQueue does. Times are in nanoseconds. The disk serves one read after the other, each
    for the time of its stored bytes. All parts being decoded share the processors; computing takes some of them, and so
    does reading (`CodecCosts.read_processors`).

    A prefetch begins only when no part of a load is left: one span at a time, or as many parts of small spans as there
    are readers, as in the engine.
    """

    def __init__(self, disk: Link, costs: CodecCosts, moved: Callable[[Span, int, int], None] | None = None) -> None:
        """`moved(span, begin, end)` is called for each read; reads follow each other."""
        self.next_ns = NEVER_NS
        """When the next part is read or decoded, or speeds change; NEVER_NS where there is nothing to do."""
        self.read_nbytes = 0
        """Stored bytes that were read."""
        self._disk = disk
        self._costs = costs
        self._moved = moved
        self._moved_until_ns = 0
        self._free = NUM_READERS
        self._queue: deque[_Part] = deque()  # begun, and no reader has taken them
        self._prefetches: deque[list[_Part]] = deque()  # spans not begun
        self._late: list[_Part] = []  # taken by a reader, and no byte has come
        self._reading: list[_Part] = []  # the first of them moves
        self._decoding: list[_Part] = []
        self._num_load_parts = 0  # that are not done
        self._num_prefetch_parts = 0  # that have begun and are not done
        self._now_ns = 0
        self._processors = float(costs.threads)
        self._taken = 0.0  # of them, by computing, until `_computes_until_ns`
        self._computes_until_ns = 0

    def submit(self, span: Span, since_ns: int, nbytes: int, is_prefetch: bool) -> None:
        """Bring a span of so many bytes of weights, which waits from `since_ns` on."""
        self._advance(since_ns)
        num = max(1, min(NUM_READERS, nbytes // MIN_DECODE_NBYTES))
        stored_nbytes = ceil(nbytes * self._costs.ratio)
        read_ns = self._disk.occupies_ns(stored_nbytes)
        decode_ns = round(nbytes / num / self._costs.decode_nbytes_per_s * 1e9)
        whole = _SpanUnderWay(span, is_prefetch, stored_nbytes, num, num)
        parts = [
            _Part(whole, self._disk.latency_ns, read_ns * (i + 1) // num - read_ns * i // num, decode_ns)
            for i in range(num)
        ]
        if is_prefetch:
            self._prefetches.append(parts)
        else:
            self._queue += parts
            self._num_load_parts += num
        self._begin_parts()

    def begin(self) -> tuple[Span, bool, int, int] | None:
        """Do the next thing. If that completes a span: (span, whether it is a prefetch, begin of its read, end); else
        None.
        """
        self._advance(self.next_ns)
        done = None
        if (part := _finished(self._decoding, lambda part: part.decode_ns)) is not None:
            self._free += 1
            if part.whole.is_prefetch:
                self._num_prefetch_parts -= 1
            else:
                self._num_load_parts -= 1
            part.whole.decodes_left -= 1
            if not part.whole.decodes_left:
                done = part.whole
        elif (part := _finished(self._reading, lambda part: part.read_ns)) is not None:
            self._decoding.append(part)
            part.whole.reads_left -= 1
            if not part.whole.reads_left:
                self._was_read(part.whole)
            self._disk_begins()
        elif (part := _finished(self._late, lambda part: part.latency_ns)) is not None:
            self._reading.append(part)
            self._disk_begins()
        self._begin_parts()
        return None if done is None else (done.span, done.is_prefetch, done.read_begin_ns, self._now_ns)

    def computing(self, begin_ns: int, end_ns: int, slowdown: float) -> None:
        """The model computes for so long, which takes processors from decoding: fewer of them where it runs `slowdown`
        times slower than alone.
        """
        self._advance(begin_ns)
        self._computes_until_ns = end_ns
        self._taken = (self._costs.threads - self._costs.threads_beside) / slowdown
        self._find_next()

    def cancel(self, layer: int, experts: Collection[int] | None = None) -> list[Span]:
        """Drop prefetches of this layer, or of these experts of it, that have not begun; returns their spans."""
        spans = [parts[0].whole.span for parts in self._prefetches]
        cancelled = [span for span in spans if is_of(span, layer, experts)]
        if cancelled:
            self._prefetches = deque(one for one in self._prefetches if one[0].whole.span not in cancelled)
        return cancelled

    def busy_until_ns(self, now_ns: int) -> int:
        """When everything would be done if reading and decoding began at once and were shared evenly."""
        waiting = [*self._late, *self._reading, *self._decoding, *self._queue]
        waiting += [part for parts in self._prefetches for part in parts]
        passed_ns = now_ns - self._now_ns
        reading_ns = sum(part.read_ns for part in waiting)
        decoding_ns = sum(part.decode_ns for part in waiting) / self._processors
        return now_ns + max(0, ceil(max(reading_ns, decoding_ns) - passed_ns))

    def _begin_parts(self) -> None:
        """Give readers the next parts, loads first."""
        while self._prefetches and not self._num_load_parts:
            if self._num_prefetch_parts and self._num_prefetch_parts + len(self._prefetches[0]) > NUM_READERS:
                break
            parts = self._prefetches.popleft()
            self._num_prefetch_parts += len(parts)
            self._queue += parts
        while self._queue and self._free:
            self._free -= 1
            self._late.append(self._queue.popleft())
        self._find_next()

    def _disk_begins(self) -> None:
        if self._reading and not self._reading[0].is_begun:
            part = self._reading[0]
            part.is_begun = True
            part.whole.read_begin_ns = min(part.whole.read_begin_ns, self._now_ns)

    def _was_read(self, whole: _SpanUnderWay) -> None:
        self.read_nbytes += whole.stored_nbytes
        if self._moved is not None:
            begin = max(self._moved_until_ns, whole.read_begin_ns)
            self._moved_until_ns = max(begin, self._now_ns)
            self._moved(whole.span, begin, self._moved_until_ns)

    def _advance(self, to_ns: int) -> None:
        """Move on to a time before which nothing ends."""
        while self._now_ns < to_ns:
            end_ns = to_ns
            if self._now_ns < self._computes_until_ns < to_ns:
                end_ns = self._computes_until_ns
            passed = end_ns - self._now_ns
            for part in self._late:
                part.latency_ns -= passed
            if self._reading:
                self._reading[0].read_ns -= passed
            speed = self._decoding_speed()
            for part in self._decoding:
                part.decode_ns -= passed * speed
            self._now_ns = end_ns

    def _decoding_speed(self) -> float:
        """The share of a processor that each part being decoded gets."""
        if not self._decoding:
            return 0.0
        left = self._processors
        if self._reading:
            left -= self._costs.read_processors
        if self._now_ns < self._computes_until_ns:
            left -= self._taken
        return min(1.0, max(0.0, left) / len(self._decoding))

    def _find_next(self) -> None:
        left = min((part.latency_ns for part in self._late), default=inf)
        if self._reading:
            left = min(left, self._reading[0].read_ns)
        if self._decoding:
            least, speed = min(part.decode_ns for part in self._decoding), self._decoding_speed()
            if least <= _NOTHING_NS or speed:
                left = min(left, least / speed if speed else 0.0)
            if self._now_ns < self._computes_until_ns:
                left = min(left, self._computes_until_ns - self._now_ns)
        self.next_ns = NEVER_NS if left == inf else self._now_ns + max(0, ceil(left - _NOTHING_NS))


def is_of(span: Span, layer: int, experts: Collection[int] | None) -> bool:
    """Whether a span is of this layer and, where experts are given, of one of them."""
    return span.layer == layer and (experts is None or span.expert in experts)


def _finished(parts: list[_Part], left: Callable[[_Part], float]) -> _Part | None:
    """Take out the first part of which nothing is left."""
    for number, part in enumerate(parts):
        if left(part) <= _NOTHING_NS:
            return parts.pop(number)
    return None
