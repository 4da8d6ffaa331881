"""Which frames segments are made of, where these lie in the file, and what of them is wanted."""

from __future__ import annotations

from dataclasses import dataclass

from expertly.core.geometry import PAGE_NBYTES, Geometry
from expertly.engine.reads import ExtentSource
from expertly.store.frames import FrameDecoder, FrameIndex, padded


@dataclass(frozen=True, slots=True, eq=False)
class FrameRange:
    """Frames of one expert that follow one another, and the range of its bytes that is wanted: it begins in the first
    of them and ends in the last.
    """

    index: FrameIndex
    expert: int  # its place in the file
    first: int
    count: int
    first_byte: int  # of the expert, decoded
    num_bytes: int

    def part(self, first: int, count: int) -> FrameRange:
        """`count` of these frames from the `first` of them, counted from 0, and what is wanted of these."""
        size = self.index.frame_nbytes
        first += self.first
        begin = max(self.first_byte, first * size)
        end = min(self.first_byte + self.num_bytes, (first + count) * size)
        return FrameRange(self.index, self.expert, first, count, begin, end - begin)

    @property
    def decoded_nbytes(self) -> int:
        """Of all frames, wanted or not."""
        return self.count * self.index.frame_nbytes

    @property
    def cover_begin(self) -> int:
        """Offset in the file of the first page that they lie in."""
        return self.index.extent(self.expert, self.first, self.count)[0] // PAGE_NBYTES * PAGE_NBYTES

    @property
    def cover_nbytes(self) -> int:
        """Bytes of the pages that they lie in."""
        offset, nbytes = self.index.extent(self.expert, self.first, self.count)
        return padded(offset + nbytes) - offset // PAGE_NBYTES * PAGE_NBYTES

    def decode(self, decoder: FrameDecoder, cover: memoryview, out: memoryview) -> None:
        """Make what is wanted of the bytes of those pages. Raises TransferError where a frame is damaged."""
        size = self.index.frame_nbytes
        done = 0
        for frame in range(self.first, self.first + self.count):
            offset, nbytes = self.index.extent(self.expert, frame)
            offset -= self.cover_begin
            skip = max(0, self.first_byte - frame * size)
            num = min(size - skip, self.num_bytes - done)
            decoder.decode(
                self.index, self.expert, frame, cover[offset : offset + nbytes], out[done : done + num], skip
            )
            done += num


class SegmentFrames:
    """The frames of each segment. Where P does not divide the frames of an expert, neighbours share a frame."""

    def __init__(self, store: ExtentSource, geometry: Geometry) -> None:
        self._geometry = geometry
        self._indexes: list[FrameIndex] = []
        self._places = [
            [store.expert_in_file(layer, expert) for expert in range(shape.num_experts)]
            for layer, shape in enumerate(geometry.layers)
        ]
        for layer in range(geometry.num_layers):
            index = store.frame_index(layer)
            assert index is not None, "all layers of a store have one codec"
            self._indexes.append(index)
        self.max_frame_nbytes = max(padded(index.frame_nbytes) + PAGE_NBYTES for index in self._indexes)
        """Bytes of the pages that a frame may lie in, at most."""

    def of(self, layer: int, expert: int, segment: int, num_segments: int = 1) -> FrameRange:
        """The frames of neighbouring segments."""
        index, nbytes = self._indexes[layer], self._geometry.segment_nbytes(layer)
        begin, end = segment * nbytes, (segment + num_segments) * nbytes
        first = begin // index.frame_nbytes
        count = -(-end // index.frame_nbytes) - first
        return FrameRange(index, self._places[layer][expert], first, count, begin, end - begin)
