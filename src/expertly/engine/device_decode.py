"""Decoding on the device: stored bytes cross the link, and what they decompress to is joined into the slot there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from expertly.core.geometry import Geometry
from expertly.engine.frame_extents import SegmentFrames


class DeviceDecoder(Protocol):
    """Many zstd frames at a time, in device memory."""

    def decompress(self, stored: Sequence[torch.Tensor], planes: Sequence[torch.Tensor]) -> None:
        """Queue, on the copy stream: each of `stored`, the bytes of a zstd frame, decompresses to exactly the bytes of
        the plane of the same place. All planes are of one size; frames begin at any address.
        """


@dataclass(slots=True)
class _Move:
    """Bytes that become one byte each of weights that follow one another."""

    plane: int  # 0 is the highest byte
    buffer: torch.Tensor
    begin: int
    count: int
    first: int  # weight of the segment

    def goes_on(self, other: _Move) -> bool:
        return (self.plane, self.begin + self.count, self.first + self.count) == (
            other.plane,
            other.begin,
            other.first,
        ) and self.buffer is other.buffer


class Unpacker:
    """Makes weights of segments as they are stored: copy, decompress, join. All of it is queued on one stream, so the
    memory between these steps is used again by the next segment.
    """

    def __init__(self, frames: SegmentFrames, geometry: Geometry, decoder: DeviceDecoder, device: torch.device) -> None:
        self._frames = frames
        self._decoder = decoder
        self._staging = torch.empty(max(frames.slot_nbytes()), dtype=torch.uint8, device=device)
        planes_nbytes = max(_most_planes_nbytes(frames, geometry, layer) for layer in range(geometry.num_layers))
        self._planes = torch.empty(planes_nbytes, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """Device memory beside the slots; what the decoder takes comes on top."""
        return self._staging.numel() + self._planes.numel()

    def link_nbytes(self, layer: int, expert: int, segment: int) -> int:
        """That cross the link for a segment."""
        return self._frames.of(layer, expert, segment).cover_nbytes

    def unpack(self, layer: int, expert: int, segment: int, cover: torch.Tensor, target: torch.Tensor) -> None:
        """Queue what makes the segment's weights: `target`, bytes on the device, of `cover`, which begins with the
        pages of the file that its frames lie in. Those frames have been checked.
        """
        frames = self._frames.of(layer, expert, segment)
        index, itemsize = frames.index, frames.index.num_planes
        plane_nbytes = index.frame_nbytes // itemsize
        self._staging[: frames.cover_nbytes].copy_(cover[: frames.cover_nbytes], non_blocking=True)
        stored: list[torch.Tensor] = []
        planes: list[torch.Tensor] = []
        moves: list[_Move] = []
        for plane in range(itemsize):
            for number in range(frames.count):
                part = frames.part(number, 1)
                lengths, _ = index.planes_of(frames.expert, part.first)
                offset, _ = index.extent(frames.expert, part.first)
                buffer, begin = self._staging, offset - frames.cover_begin + sum(lengths[:plane])
                if lengths[plane] < plane_nbytes:
                    stored.append(self._staging[begin : begin + lengths[plane]])
                    buffer, begin = self._planes, len(planes) * plane_nbytes
                    planes.append(self._planes[begin : begin + plane_nbytes])
                skip = (part.first_byte - part.first * index.frame_nbytes) // itemsize
                first = (part.first_byte - frames.first_byte) // itemsize
                move = _Move(plane, buffer, begin + skip, part.num_bytes // itemsize, first)
                if moves and moves[-1].goes_on(move):
                    moves[-1].count += move.count
                else:
                    moves.append(move)
        if stored:
            self._decoder.decompress(stored, planes)
        weights = target.view(-1, itemsize)  # little-endian: the highest byte is the last
        for move in moves:
            wanted = move.buffer[move.begin : move.begin + move.count]
            weights[move.first : move.first + move.count, itemsize - 1 - move.plane].copy_(wanted)


def _most_planes_nbytes(frames: SegmentFrames, geometry: Geometry, layer: int) -> int:
    """Bytes of all planes of a segment that are compressed, decompressed, at most."""
    parts = [frames.of(layer, 0, segment) for segment in range(geometry.segments_per_expert)]
    index = parts[0].index
    plane_nbytes = index.frame_nbytes // index.num_planes
    of_a_frame = int((index.plane_nbytes < plane_nbytes).sum(axis=1).max())
    return max(1, max(part.count for part in parts) * of_a_frame * plane_nbytes)
