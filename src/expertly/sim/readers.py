"""The threads that read parts of experts and decode them: each does one after the other, several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

from expertly.core.costs import CodecCosts, Link
from expertly.core.messages import Span
from expertly.sim.server import NEVER_NS

NUM_READERS = 4

_NOTHING_NS = 1e-3
"""Less than this is left of what is done: work is divided, times are whole nanoseconds."""


class Done(NamedTuple):
    """A part that has been read or decoded, by then."""

    span: Span
    is_read: bool  # else it is decoded, and so all of it is there
    begin_ns: int  # when the disk began it; of what is decoded, when a reader took it
    end_ns: int


@dataclass(slots=True, eq=False)
class _Part:
    """A part of a span; times are what is left with the disk, and a processor, to itself."""

    span: Span
    is_ahead: bool
    latency_ns: float
    read_ns: float
    decode_ns: float
    begin_ns: int = 0  # when a reader took it
    disk_ns: int = 0  # when the disk began it


class Readers:
    """Times are in nanoseconds. The disk serves one read after the other; all that are decoded share the processors,
    which also what computes takes, and the disk while it reads (`CodecCosts.read_processors`).

    What is submitted ahead begins only where no part that is demanded is left, one span at a time, or as many parts of
    small ones as there are readers: as in the engine.
    """

    def __init__(self, disk: Link, costs: CodecCosts) -> None:
        self._latency_ns = disk.latency_ns
        self._free = NUM_READERS
        self._queue: deque[_Part] = deque()  # begun, and no reader has taken them
        self._ahead: deque[list[_Part]] = deque()  # spans not begun
        self._late: list[_Part] = []  # taken by a reader, and no byte has come
        self._reading: list[_Part] = []  # the first of them moves
        self._decoding: list[_Part] = []
        self._num_demanded = 0  # parts that are not done
        self._num_ahead = 0  # parts that have begun and are not done
        self._now_ns = 0
        self._processors = float(costs.threads)
        self._computing = float(costs.threads - costs.threads_beside)  # processors, of those that could decode
        self._read_processors = costs.read_processors
        self._taken = 0.0  # by computing, until `_computes_until_ns`
        self._computes_until_ns = 0
        self.next_ns = NEVER_NS
        """When a part has been read or decoded, or their shares change; NEVER_NS where nothing is to be done."""

    @property
    def num_waiting(self) -> int:
        """Parts that are not done."""
        return self._num_demanded + self._num_ahead + sum(map(len, self._ahead))

    def submit(self, span: Span, since_ns: int, parts: list[tuple[int, int]], is_ahead: bool) -> None:
        """Bring a span from now on; of each part, how long it takes to read and to decode."""
        self._advance(since_ns)
        made = [_Part(span, is_ahead, self._latency_ns, read, decode) for read, decode in parts]
        if is_ahead:
            self._ahead.append(made)
        else:
            self._queue += made
            self._num_demanded += len(made)
        self._begin()

    def step(self) -> Done | None:
        """What is done next; None where only shares change."""
        self._advance(self.next_ns)
        done = None
        if (part := _finished(self._decoding, lambda part: part.decode_ns)) is not None:
            done = Done(part.span, False, part.begin_ns, self._now_ns)
            self._free += 1
            if part.is_ahead:
                self._num_ahead -= 1
            else:
                self._num_demanded -= 1
        elif (part := _finished(self._reading, lambda part: part.read_ns)) is not None:
            done = Done(part.span, True, part.disk_ns, self._now_ns)
            self._decoding.append(part)
            self._disk_begins()
        elif (part := _finished(self._late, lambda part: part.latency_ns)) is not None:
            self._reading.append(part)
            self._disk_begins()
        self._begin()
        return done

    def computing(self, begin_ns: int, end_ns: int, slowdown: float) -> None:
        """The model computes for so long, on the processors that this takes from decoding; `slowdown` times slower than
        it would with them to itself, so that it takes less of them.
        """
        self._advance(begin_ns)
        self._computes_until_ns = end_ns
        self._taken = self._computing / slowdown
        self._find_next()

    def withdraw_where(self, is_meant: Callable[[Span], bool]) -> list[Span]:
        """Forget spans that have not begun."""
        gone = [parts for parts in self._ahead if is_meant(parts[0].span)]
        if gone:
            self._ahead = deque(parts for parts in self._ahead if not is_meant(parts[0].span))
        return [parts[0].span for parts in gone]

    def busy_until_ns(self, now_ns: int) -> int:
        """When everything has been done, if reading and decoding could begin at once and be shared out evenly."""
        waiting = [*self._late, *self._reading, *self._decoding, *self._queue]
        waiting += [part for parts in self._ahead for part in parts]
        gone = now_ns - self._now_ns
        reading = sum(part.read_ns for part in waiting)
        decoding = sum(part.decode_ns for part in waiting) / self._processors
        return now_ns + max(0, ceil(max(reading, decoding) - gone))

    def _begin(self) -> None:
        """Give readers what is to be done, demands first."""
        while self._ahead and not self._num_demanded:
            if self._num_ahead and self._num_ahead + len(self._ahead[0]) > NUM_READERS:
                break
            parts = self._ahead.popleft()
            self._num_ahead += len(parts)
            self._queue += parts
        while self._queue and self._free:
            part = self._queue.popleft()
            self._free -= 1
            part.begin_ns = self._now_ns
            self._late.append(part)
        self._find_next()

    def _disk_begins(self) -> None:
        if self._reading and not self._reading[0].disk_ns:
            self._reading[0].disk_ns = self._now_ns

    def _advance(self, to_ns: int) -> None:
        """Go on to a time up to which nothing ends."""
        while self._now_ns < to_ns:
            end_ns = to_ns
            if self._now_ns < self._computes_until_ns < to_ns:
                end_ns = self._computes_until_ns
            passed = end_ns - self._now_ns
            for part in self._late:
                part.latency_ns -= passed
            share = self._decoding_share()
            for part in self._reading[:1]:
                part.read_ns -= passed
            for part in self._decoding:
                part.decode_ns -= passed * share
            self._now_ns = end_ns

    def _decoding_share(self) -> float:
        """Of a processor, for each that decodes."""
        if not self._decoding:
            return 0.0
        left = self._processors
        if self._reading:
            left -= self._read_processors
        if self._now_ns < self._computes_until_ns:
            left -= self._taken
        return min(1.0, max(0.0, left) / len(self._decoding))

    def _find_next(self) -> None:
        left = min((part.latency_ns for part in self._late), default=inf)
        if self._reading:
            left = min(left, self._reading[0].read_ns)
        if self._decoding:
            least, share = min(part.decode_ns for part in self._decoding), self._decoding_share()
            if least <= _NOTHING_NS or share:
                left = min(left, least / share if share else 0.0)
            if self._now_ns < self._computes_until_ns:
                left = min(left, self._computes_until_ns - self._now_ns)
        self.next_ns = NEVER_NS if left == inf else self._now_ns + max(0, ceil(left - _NOTHING_NS))


def _finished(parts: list[_Part], left: Callable[[_Part], float]) -> _Part | None:
    """The first of which nothing is left, taken out."""
    for number, part in enumerate(parts):
        if left(part) <= _NOTHING_NS:
            return parts.pop(number)
    return None
