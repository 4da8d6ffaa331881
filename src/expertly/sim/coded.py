"""A disk whose experts are stored compressed: what is read is decoded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from expertly.core.costs import CodecCosts, Link
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.sim.readers import NUM_READERS, Readers
from expertly.sim.server import NEVER_NS

if TYPE_CHECKING:
    from expertly.sim.link import LinkWatcher

MIN_JOB_NBYTES = 256 << 10
"""Of weights. The engine cuts a span over so many readers, but not into less; each reads its part and decodes it."""


@dataclass(frozen=True, slots=True)
class Coding:
    """How experts are stored."""

    costs: CodecCosts

    def stored_nbytes(self, nbytes: int) -> int:
        """Of so many bytes of weights."""
        return ceil(nbytes * self.costs.ratio)

    def link(self, disk: Link) -> Link:
        """What loading over the disk comes to, decoding beside it."""
        rate = min(disk.nbytes_per_s / self.costs.ratio, self.costs.all_nbytes_per_s)
        return Link(rate, disk.latency_ns, disk.overhead_ns)


@dataclass(slots=True)
class _UnderWay:
    """A span that is not there."""

    is_ahead: bool
    nbytes: int
    parts_left: int  # to be decoded
    reads_left: int
    begin_ns: int = NEVER_NS  # of its first read, or decoding
    read_begin_ns: int = NEVER_NS


class CodedDisk:
    """Serves spans as a Server does, but by readers: each reads a part of a span, which takes the time of its stored
    bytes, and decodes it.
    """

    def __init__(self, disk: Link, geometry: Geometry, coding: Coding, watcher: LinkWatcher | None, name: str) -> None:
        self._disk = disk
        self._readers = Readers(disk, coding.costs)
        self._coding = coding
        self._segment_nbytes = [geometry.segment_nbytes(layer) for layer in range(geometry.num_layers)]
        self._watcher, self._name = watcher, name
        self._seen_until_ns = 0  # by the watcher: what it sees of the disk is one thing after the other
        self._under_way: dict[Span, _UnderWay] = {}
        self.read_nbytes = 0
        """Stored bytes that the disk brought."""

    @property
    def next_ns(self) -> int:
        """When something happens; NEVER_NS where nothing is to be done."""
        return self._readers.next_ns

    @property
    def num_waiting(self) -> int:
        return self._readers.num_waiting

    def submit(self, span: Span, since_ns: int, segments: Collection[int], is_ahead: bool) -> None:
        """Bring `segments` of a span; it waits from `since_ns` on."""
        nbytes = len(segments) * self._segment_nbytes[span.layer]
        parts = self._parts(nbytes)
        self._under_way[span] = _UnderWay(is_ahead, nbytes, len(parts), len(parts))
        self._readers.submit(span, since_ns, parts, is_ahead)

    def begin(self) -> tuple[Span, bool, int, int] | None:
        """Do what is next. Where that ends a span: (what, whether it was submitted ahead, its begin, its end)."""
        done = self._readers.step()
        if done is None:
            return None
        span = done.span
        under_way = self._under_way[span]
        under_way.begin_ns = min(under_way.begin_ns, done.begin_ns)
        if done.is_read:
            under_way.read_begin_ns = min(under_way.read_begin_ns, done.begin_ns)
            under_way.reads_left -= 1
            if not under_way.reads_left:
                self._was_read(span, under_way, done.end_ns)
            return None
        under_way.parts_left -= 1
        if under_way.parts_left:
            return None
        del self._under_way[span]
        return span, under_way.is_ahead, under_way.begin_ns, done.end_ns

    def computing(self, begin_ns: int, end_ns: int, slowdown: float) -> None:
        """See Readers: of a machine that decodes on the processors that compute."""
        self._readers.computing(begin_ns, end_ns, slowdown)

    def withdraw(self, layer: int, experts: Collection[int] | None = None) -> list[Span]:
        """Forget what was submitted ahead of this layer, or of these experts of it, and has not begun."""
        gone = self._readers.withdraw_where(
            lambda span: span.layer == layer and (experts is None or span.expert in experts)
        )
        for span in gone:
            del self._under_way[span]
        return gone

    def busy_until_ns(self, now_ns: int) -> int:
        """When everything that waits has been served, if it could begin at once."""
        return self._readers.busy_until_ns(now_ns)

    def _was_read(self, span: Span, under_way: _UnderWay, end_ns: int) -> None:
        self.read_nbytes += self._coding.stored_nbytes(under_way.nbytes)
        if self._watcher is not None:
            begin = max(self._seen_until_ns, under_way.read_begin_ns)
            self._seen_until_ns = max(begin, end_ns)
            self._watcher.moved(self._name, span, begin, self._seen_until_ns)

    def _parts(self, nbytes: int) -> list[tuple[int, int]]:
        """Cut so many bytes of weights over the readers: how long each part takes to read, and to decode."""
        num_parts = max(1, min(NUM_READERS, nbytes // MIN_JOB_NBYTES))
        decode_ns = round(nbytes / num_parts / self._coding.costs.decode_nbytes_per_s * 1e9)
        read_ns = self._disk.occupies_ns(self._coding.stored_nbytes(nbytes))
        return [(read_ns * (i + 1) // num_parts - read_ns * i // num_parts, decode_ns) for i in range(num_parts)]
