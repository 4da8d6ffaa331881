"""Where the frames of a layer's compressed experts lie: read as hostile input, checked before anything is believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertly.core.errors import StoreError
from expertly.core.geometry import PAGE_NBYTES, LayerGeometry
from expertly.core.headers import TensorSpec, parse_safetensors_header, safetensors_header

MAX_FRAMES = 16
MIN_FRAME_NBYTES = 16 << 10
MAX_INDEX_NBYTES = 256 << 20
"""Of a layer: ten million frames. Nothing longer is read."""


def frames_per_expert(layer: LayerGeometry) -> int:
    """F: the most frames, of whole neurons and all equal, up to 16, that decode to at least 16 KiB each; else 1."""
    counts = (n for n in range(MAX_FRAMES, 1, -1) if not layer.intermediate_size % n)
    return next((n for n in counts if layer.expert_nbytes // n >= MIN_FRAME_NBYTES), 1)


@dataclass(frozen=True, slots=True, eq=False)
class FrameIndex:
    """The frames of one layer's experts. Frames of an expert follow one another, and experts follow in order, from
    offset 0 of `path`, which is padded at its end to a multiple of 4096.

    A frame is a plane for each byte of a weight, the highest first. A plane that is stored in as many bytes as it
    decodes to is stored as it is; a shorter one is a zstd frame.
    """

    path: Path  # of the frames
    num_experts: int  # E
    num_frames: int  # F, of an expert
    num_planes: int  # bytes of a weight
    frame_nbytes: int  # decoded
    begin: NDArray[np.uint64]  # [E * F + 1] offsets in the file; the last is the end of the last frame
    plane_nbytes: NDArray[np.uint32]  # [E * F, planes], as stored
    checksum: NDArray[np.uint64]  # [E * F] xxh3_64 of a frame's stored bytes

    @property
    def stored_nbytes(self) -> int:
        """Of all frames."""
        return int(self.begin[-1])

    @property
    def file_nbytes(self) -> int:
        """Of the frames and the padding after them."""
        return padded(self.stored_nbytes)

    def extent(self, expert: int, first: int, count: int) -> tuple[int, int]:
        """(offset in the file, stored bytes) of the `count` frames of an expert that begin at frame `first`."""
        assert 0 <= expert < self.num_experts and first >= 0 and count >= 0 and first + count <= self.num_frames
        frame = expert * self.num_frames + first
        begin = int(self.begin[frame])
        return begin, int(self.begin[frame + count]) - begin

    def frame_extent(self, expert: int, frame: int) -> tuple[int, int]:
        """(offset in the file, stored bytes) of one frame."""
        return self.extent(expert, frame, 1)

    def planes_of(self, expert: int, frame: int) -> tuple[list[int], int]:
        """(stored bytes of each plane, checksum) of a frame."""
        row = expert * self.num_frames + frame
        return self.plane_nbytes[row].tolist(), int(self.checksum[row])


def padded(nbytes: int) -> int:
    """Up to a multiple of 4096, so that a direct read may cover the last frame."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def index_bytes(
    layer: LayerGeometry, num_frames: int, plane_nbytes: Sequence[Sequence[int]], checksums: Sequence[int]
) -> bytes:
    """The file of an index: a safetensors file of `begin` U64 [E, F], `nbytes` U32 [E, F, planes] and `checksum` U64
    [E, F], of the frames in their order.
    """
    lengths = np.asarray(plane_nbytes, "<u4")
    ends = np.cumsum(lengths.sum(axis=1, dtype=np.uint64), dtype=np.uint64)
    begin = np.concatenate([np.zeros(1, np.uint64), ends[:-1]])
    arrays = (begin.astype("<u8"), lengths, np.asarray(checksums, "<u8"))
    return safetensors_header(_specs(layer, num_frames)) + b"".join(array.tobytes() for array in arrays)


def parse_index(path: Path, raw: bytes, frames_path: Path, layer: LayerGeometry) -> FrameIndex:
    """The index in `raw`, which was read from `path`, of the frames in `frames_path`.

    Raises StoreError naming the file, the field, its value and what is accepted where the index does not describe
    frames that lie one after another without gap or overlap and hold all of the layer's experts.
    """
    header = raw[8 : 8 + int.from_bytes(raw[:8], "little")]
    infos = parse_safetensors_header(path, header, StoreError, len(raw))
    shape = infos["begin"].shape if "begin" in infos else ()
    num_frames = shape[1] if len(shape) == 2 else 0
    if not 1 <= num_frames <= MAX_FRAMES or layer.intermediate_size % num_frames:
        raise StoreError(
            f"{path}: begin: shape {list(shape)}: must be {layer.num_experts} experts x frames of an expert, from 1 to "
            f"{MAX_FRAMES} that divide {layer.intermediate_size} neurons"
        )
    specs = _specs(layer, num_frames)
    for spec in specs:
        info = infos.get(spec.name)
        if info is None or (info.dtype, info.shape) != (spec.dtype, spec.shape):
            found = "no such tensor" if info is None else f"{info.dtype} {list(info.shape)}"
            raise StoreError(f"{path}: tensor {spec.name!r}: {found}; must be {spec.dtype} {list(spec.shape)}")
    frame_nbytes = layer.expert_nbytes // num_frames
    num = layer.num_experts * num_frames
    begin = np.frombuffer(raw, np.uint64, num, infos["begin"].begin)
    lengths = np.frombuffer(raw, np.uint32, num * layer.itemsize, infos["nbytes"].begin).reshape(num, -1)
    checksum = np.frombuffer(raw, np.uint64, num, infos["checksum"].begin)
    _check(path, begin, lengths, frame_nbytes // layer.itemsize)
    end = int(begin[-1]) + int(lengths[-1].sum(dtype=np.uint64))
    return FrameIndex(
        frames_path,
        layer.num_experts,
        num_frames,
        layer.itemsize,
        frame_nbytes,
        np.append(begin, np.uint64(end)),
        lengths,
        checksum,
    )


def _check(path: Path, begin: NDArray[np.uint64], lengths: NDArray[np.uint32], plane_nbytes: int) -> None:
    is_wrong = (lengths < 1) | (lengths > plane_nbytes)
    if is_wrong.any():
        frame, plane = map(int, np.argwhere(is_wrong)[0])
        raise StoreError(
            f"{path}: nbytes of frame {frame}, plane {plane}: {int(lengths[frame, plane])}: must be from 1 to "
            f"{plane_nbytes}"
        )
    ends = np.cumsum(lengths.sum(axis=1, dtype=np.uint64), dtype=np.uint64)  # cannot overflow: MAX_INDEX_NBYTES
    expected = np.concatenate([np.zeros(1, np.uint64), ends[:-1]])
    if (begin != expected).any():
        frame = int(np.flatnonzero(begin != expected)[0])
        what = "overlaps" if begin[frame] < expected[frame] else "leaves a gap after"
        raise StoreError(
            f"{path}: begin of frame {frame}: {int(begin[frame])}: {what} the frame before, which ends at "
            f"{int(expected[frame])}"
        )


def _specs(layer: LayerGeometry, num_frames: int) -> list[TensorSpec]:
    frames = (layer.num_experts, num_frames)
    return [
        TensorSpec("begin", "U64", frames),
        TensorSpec("nbytes", "U32", (*frames, layer.itemsize)),
        TensorSpec("checksum", "U64", frames),
    ]
