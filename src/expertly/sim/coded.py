"""A disk whose experts are stored compressed: what is read, or lies in the compressed tier, is decoded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from expertly.control.compressed import CompressedTier, tier_slots
from expertly.core.costs import CodecCosts, Link
from expertly.core.geometry import Geometry
from expertly.core.messages import Piece
from expertly.sim.decoders import Decoders
from expertly.sim.server import Server

if TYPE_CHECKING:
    from expertly.sim.link import LinkWatcher

NUM_READERS = 4
MIN_JOB_NBYTES = 256 << 10
"""Of weights. The engine cuts a piece over so many readers, but not into less; each reads its part and decodes it."""


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
    """A piece whose jobs have not all begun."""

    is_ahead: bool
    segments: Collection[int]  # that are brought
    to_read_nbytes: int  # of weights, whose read has not begun
    held_nbytes: int
    jobs_left: int = 0
    begin_ns: int = -1  # of its first job, or of its read
    end_ns: int = 0  # of those jobs that have begun


class CodedDisk:
    """Serves pieces as a Server does, but in steps: a read, which takes the time of its stored bytes, and the jobs that
    decode it, which begin as its bytes come. What the tier holds is not read.
    """

    def __init__(self, disk: Link, geometry: Geometry, coding: Coding, watcher: LinkWatcher | None, name: str) -> None:
        self._disk = Server(disk)
        self._decoders = Decoders(coding.costs.threads)
        self._coding = coding
        self._segment_nbytes = [geometry.segment_nbytes(layer) for layer in range(geometry.num_layers)]
        self._watcher, self._name = watcher, name
        self._under_way: dict[Piece, _UnderWay] = {}
        self.tier = coding.tier(geometry)
        self.read_nbytes = 0
        """Stored bytes that the disk brought."""
        self.decoded_nbytes = 0
        """Bytes of weights that have come."""
        self.held_nbytes = 0
        """Of those, bytes that the tier held."""

    @property
    def next_ns(self) -> int:
        """When the next read or job begins; NEVER_NS where none waits."""
        return min(self._disk.next_ns, self._decoders.next_ns)

    @property
    def num_waiting(self) -> int:
        return self._disk.num_waiting + self._decoders.num_waiting

    def submit(self, piece: Piece, since_ns: int, segments: Collection[int], is_ahead: bool) -> None:
        """Bring `segments` of a piece; it waits from `since_ns` on."""
        size = self._segment_nbytes[piece.layer]
        slots = [self.tier.begin(piece.layer, piece.expert, segment) for segment in segments]
        num_held = sum(slot is not None and slot.is_filled for slot in slots)
        held, absent = num_held * size, (len(slots) - num_held) * size
        under_way = self._under_way[piece] = _UnderWay(is_ahead, segments, absent, held)
        if held:
            self._decode(piece, under_way, held, since_ns, since_ns)
        if absent:
            self._disk.submit(piece, since_ns, self._coding.stored_nbytes(absent), is_ahead)

    def begin(self) -> tuple[Piece, bool, int, int] | None:
        """Begin what is next. Where that ends a piece: (what, whether it was submitted ahead, its begin, its end)."""
        if self._disk.next_ns <= self._decoders.next_ns:
            self._read()
            return None
        piece, begin, end = self._decoders.begin()
        under_way = self._under_way[piece]
        if under_way.begin_ns < 0:
            under_way.begin_ns = begin
        under_way.end_ns = max(under_way.end_ns, end)
        under_way.jobs_left -= 1
        if under_way.jobs_left or under_way.to_read_nbytes:
            return None
        del self._under_way[piece]
        self.decoded_nbytes += len(under_way.segments) * self._segment_nbytes[piece.layer]
        self.held_nbytes += under_way.held_nbytes
        for segment in under_way.segments:
            self.tier.end(piece.layer, piece.expert, segment)
        return piece, under_way.is_ahead, under_way.begin_ns, under_way.end_ns

    def withdraw(self, layer: int, experts: Collection[int] | None = None) -> list[Piece]:
        """Forget what was submitted ahead of this layer, or of these experts of it, and nothing of which has begun."""
        gone = [
            piece
            for piece, one in self._under_way.items()
            if one.is_ahead
            and one.begin_ns < 0
            and piece.layer == layer
            and (experts is None or piece.expert in experts)
        ]
        if not gone:
            return []
        are_gone = frozenset(gone).__contains__
        self._disk.withdraw_where(are_gone)
        self._decoders.withdraw_where(are_gone)
        for piece in gone:
            for segment in self._under_way.pop(piece).segments:
                self.tier.withdraw(layer, piece.expert, segment)
        return gone

    def busy_until_ns(self, now_ns: int) -> int:
        """When everything that waits has been served, if it could begin at once."""
        return max(self._disk.busy_until_ns(now_ns), self._decoders.busy_until_ns(now_ns))

    def _read(self) -> None:
        piece, _, begin, end = self._disk.begin()
        under_way = self._under_way[piece]
        if under_way.begin_ns < 0:
            under_way.begin_ns = begin
        nbytes, under_way.to_read_nbytes = under_way.to_read_nbytes, 0
        self.read_nbytes += self._coding.stored_nbytes(nbytes)
        self._decode(piece, under_way, nbytes, begin, end)
        if self._watcher is not None:
            self._watcher.moved(self._name, piece, begin, end)

    def _decode(self, piece: Piece, under_way: _UnderWay, nbytes: int, begin_ns: int, end_ns: int) -> None:
        """Cut so many bytes of weights, which are there one after the other between these times, into jobs."""
        costs = self._coding.costs
        num_jobs = max(1, min(NUM_READERS, nbytes // MIN_JOB_NBYTES))
        takes_ns = round(nbytes / num_jobs / costs.decode_nbytes_per_s * 1e9)
        for number in range(1, num_jobs + 1):
            self._decoders.submit(piece, begin_ns + (end_ns - begin_ns) * number // num_jobs, takes_ns)
        under_way.jobs_left += num_jobs
