"""A disk whose experts are stored compressed: what is read, or lies in the compressed tier, is decoded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from expertly.core.costs import CodecCosts, Link
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.scheduler.compressed import CompressedTier, tier_slots
from expertly.sim.readers import NUM_READERS, Readers
from expertly.sim.server import NEVER_NS

if TYPE_CHECKING:
    from expertly.sim.link import LinkWatcher

MIN_JOB_NBYTES = 256 << 10
"""Of weights. The engine cuts a span over so many readers, but not into less; each reads its part and decodes it."""


@dataclass(frozen=True, slots=True)
class Coding:
    """How experts are stored, and the memory in which they also stay so."""

    costs: CodecCosts
    tier_nbytes: int = 0

    def stored_nbytes(self, nbytes: int) -> int:
        """Of so many bytes of weights."""
        return ceil(nbytes * self.costs.ratio)

    def tier(self, geometry: Geometry) -> CompressedTier:
        """Places for segments as they are stored, as many as the memory pays for."""
        sizes = [0] * geometry.num_size_classes
        for layer, size_class in enumerate(geometry.size_classes):
            sizes[size_class] = self.stored_nbytes(geometry.segment_nbytes(layer))
        return CompressedTier(geometry, tier_slots(geometry, sizes, self.tier_nbytes))

    def link(self, disk: Link) -> Link:
        """What loading over the disk comes to, decoding beside it."""
        rate = min(disk.nbytes_per_s / self.costs.ratio, self.costs.all_nbytes_per_s)
        return Link(rate, disk.latency_ns, disk.overhead_ns)


@dataclass(slots=True)
class _UnderWay:
    """A span that is not there."""

    is_ahead: bool
    segments: Collection[int]  # that are brought
    held_nbytes: int
    to_read_nbytes: int
    parts_left: int  # to be decoded
    reads_left: int
    begin_ns: int = NEVER_NS  # of its first read, or decoding
    read_begin_ns: int = NEVER_NS


class CodedDisk:
    """Serves spans as a Server does, but by readers: each reads a part of a span, which takes the time of its stored
    bytes, and decodes it. What the tier holds is not read.
    """

    def __init__(self, disk: Link, geometry: Geometry, coding: Coding, watcher: LinkWatcher | None, name: str) -> None:
        self._disk = disk
        self._readers = Readers(disk, coding.costs)
        self._coding = coding
        self._segment_nbytes = [geometry.segment_nbytes(layer) for layer in range(geometry.num_layers)]
        self._watcher, self._name = watcher, name
        self._seen_until_ns = 0  # by the watcher: what it sees of the disk is one thing after the other
        self._under_way: dict[Span, _UnderWay] = {}
        self.tier = coding.tier(geometry)
        self.read_nbytes = 0
        """Stored bytes that the disk brought."""
        self.decoded_nbytes = 0
        """Bytes of weights that have come."""
        self.held_nbytes = 0
        """Of those, bytes that the tier held."""

    @property
    def next_ns(self) -> int:
        """When something happens; NEVER_NS where nothing is to be done."""
        return self._readers.next_ns

    @property
    def num_waiting(self) -> int:
        return self._readers.num_waiting

    def submit(self, span: Span, since_ns: int, segments: Collection[int], is_ahead: bool) -> None:
        """Bring `segments` of a span; it waits from `since_ns` on."""
        size = self._segment_nbytes[span.layer]
        slots = [self.tier.begin(span.layer, span.expert, segment) for segment in segments]
        num_held = sum(slot is not None and slot.is_filled for slot in slots)
        held, absent = num_held * size, (len(slots) - num_held) * size
        read = self._parts(absent, is_held=False)
        parts = self._parts(held, is_held=True) + read
        self._under_way[span] = _UnderWay(is_ahead, segments, held, absent, len(parts), len(read))
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
        self.decoded_nbytes += len(under_way.segments) * self._segment_nbytes[span.layer]
        self.held_nbytes += under_way.held_nbytes
        for segment in under_way.segments:
            self.tier.end(span.layer, span.expert, segment)
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
            for segment in self._under_way.pop(span).segments:
                self.tier.withdraw(layer, span.expert, segment)
        return gone

    def busy_until_ns(self, now_ns: int) -> int:
        """When everything that waits has been served, if it could begin at once."""
        return self._readers.busy_until_ns(now_ns)

    def _was_read(self, span: Span, under_way: _UnderWay, end_ns: int) -> None:
        self.read_nbytes += self._coding.stored_nbytes(under_way.to_read_nbytes)
        if self._watcher is not None:
            begin = max(self._seen_until_ns, under_way.read_begin_ns)
            self._seen_until_ns = max(begin, end_ns)
            self._watcher.moved(self._name, span, begin, self._seen_until_ns)

    def _parts(self, nbytes: int, is_held: bool) -> list[tuple[int | None, int]]:
        """Cut so many bytes of weights over the readers: how long each part takes to read, and to decode."""
        if not nbytes:
            return []
        num_parts = max(1, min(NUM_READERS, nbytes // MIN_JOB_NBYTES))
        decode_ns = round(nbytes / num_parts / self._coding.costs.decode_nbytes_per_s * 1e9)
        if is_held:
            return [(None, decode_ns)] * num_parts
        read_ns = self._disk.occupies_ns(self._coding.stored_nbytes(nbytes))
        return [(read_ns * (i + 1) // num_parts - read_ns * i // num_parts, decode_ns) for i in range(num_parts)]
