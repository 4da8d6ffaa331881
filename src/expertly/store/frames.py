"""The lossless codec `planes`: experts as frames of byte planes, and back, bit for bit.

An expert is cut into F equal frames of whole neurons, compressed independently, so that a segment can be read and
decoded alone. A frame has one plane for each byte of a weight, the highest byte first: exponents lie together and
compress well. A plane is a zstd frame, or uncompressed if its stored and decoded lengths are equal. The frames of a
layer are one file (`planes_name`): expert after expert from offset 0, padded at the end to a multiple of 4096. Beside
it lies their index (`index_name`): a safetensors file of `begin` U64 [E, F], `nbytes` U32 [E, F, planes] and `checksum`
U64 [E, F]. Both are read as hostile input.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from expertly.core.errors import StoreError, TransferError
from expertly.core.geometry import PAGE_NBYTES, LayerGeometry
from expertly.core.headers import TensorSpec, parse_safetensors_header, safetensors_header
from expertly.store.checkpoint import Bytes
from expertly.store.manifest import FileEntry
from expertly.store.reader import ExpertFile

MAX_FRAMES = 16
MIN_FRAME_NBYTES = 16 << 10
MAX_INDEX_NBYTES = 256 << 20
"""Of a layer's index: ten million frames. A longer one is refused unread."""

JOIN_VERSION = 1
"""The version of the interface of store/join.c, which has the same number."""

Plane = NDArray[np.uint8]
Join = Callable[[Sequence[Plane], memoryview], None]
"""(planes of n bytes each, the highest first; out): writes n words of as many bytes as there are planes."""


def planes_name(layer: int) -> str:
    return f"experts-{layer:05d}.planes"


def index_name(layer: int) -> str:
    return f"experts-{layer:05d}.frames.safetensors"


def frames_per_expert(layer: LayerGeometry) -> int:
    """F: the largest number, up to 16, of equal frames of whole neurons (or blocks) with at least
    16 KiB each; else 1.
    """
    counts = (n for n in range(MAX_FRAMES, 1, -1) if not layer.num_blocks % n)
    return next((n for n in counts if layer.expert_nbytes // n >= MIN_FRAME_NBYTES), 1)


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of 4096, so that a direct read can cover the last frame."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


@dataclass(frozen=True, slots=True, eq=False)
class FrameIndex:
    """Where the frames of a layer's experts lie."""

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
        return int(self.begin[-1])

    @property
    def file_nbytes(self) -> int:
        return padded(self.stored_nbytes)

    def extent(self, expert: int, first: int, count: int = 1) -> tuple[int, int]:
        """(offset in the file, stored bytes) of the `count` frames of an expert that begin at frame `first`."""
        assert 0 <= expert < self.num_experts and first >= 0 and count >= 0 and first + count <= self.num_frames
        frame = expert * self.num_frames + first
        begin = int(self.begin[frame])
        return begin, int(self.begin[frame + count]) - begin


def index_bytes(
    layer: LayerGeometry, num_frames: int, plane_nbytes: Sequence[Sequence[int]], checksums: Sequence[int]
) -> bytes:
    """The contents of an index file, from the frames' lengths and checksums in order."""
    lengths = np.asarray(plane_nbytes, "<u4")
    arrays = (frame_ends(lengths)[:-1].astype("<u8"), lengths, np.asarray(checksums, "<u8"))
    return safetensors_header(_specs(layer, num_frames)) + b"".join(array.tobytes() for array in arrays)


def open_index(folder: Path, number: int, layer: LayerGeometry, entry: FileEntry) -> FrameIndex:
    """The index of layer `number`; `entry` is the manifest's. Raises StoreError naming the damage."""
    path, frames_path = folder / index_name(number), folder / planes_name(number)
    raw = entry.read(path, MAX_INDEX_NBYTES)
    try:
        found = parse_index(path, raw, frames_path, layer)
        if frames_path.stat().st_size != found.file_nbytes:
            raise StoreError(f"{path}: describes {found.file_nbytes} bytes, but {frames_path.name} has another length")
        return found
    except StoreError as error:
        raise StoreError(f"{error}: remove the store and pack again") from None


def parse_index(path: Path, raw: bytes, frames_path: Path, layer: LayerGeometry) -> FrameIndex:
    """The index in `raw`, which was read from `path`, of the frames in `frames_path`.

    Raises StoreError naming the file, the field, its value and what is accepted, unless the index describes frames of
    all experts of the layer without gap or overlap.
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
    for spec in _specs(layer, num_frames):
        info = infos.get(spec.name)
        if info is None or (info.dtype, info.shape) != (spec.dtype, spec.shape):
            found = "no such tensor" if info is None else f"{info.dtype} {list(info.shape)}"
            raise StoreError(f"{path}: tensor {spec.name!r}: {found}; must be {spec.dtype} {list(spec.shape)}")
    frame_nbytes = layer.expert_nbytes // num_frames
    num, itemsize = layer.num_experts * num_frames, layer.itemsize
    begin = np.frombuffer(raw, np.uint64, num, infos["begin"].begin)
    lengths = np.frombuffer(raw, np.uint32, num * itemsize, infos["nbytes"].begin).reshape(num, -1)
    checksum = np.frombuffer(raw, np.uint64, num, infos["checksum"].begin)
    plane_nbytes = frame_nbytes // itemsize
    for frame, plane in np.argwhere((lengths < 1) | (lengths > plane_nbytes)):
        value = lengths[frame, plane]
        raise StoreError(f"{path}: nbytes of frame {frame}, plane {plane}: {value}: must be from 1 to {plane_nbytes}")
    ends = frame_ends(lengths)
    for frame in np.flatnonzero(begin != ends[:-1]):
        what = "overlaps" if begin[frame] < ends[frame] else "leaves a gap after"
        raise StoreError(
            f"{path}: begin of frame {frame}: {begin[frame]}: {what} the frame before, which ends at {ends[frame]}"
        )
    return FrameIndex(frames_path, layer.num_experts, num_frames, itemsize, frame_nbytes, ends, lengths, checksum)


def frame_ends(lengths: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """[E * F + 1]: where each frame begins, and the last ends. MAX_INDEX_NBYTES prevents an overflow."""
    return np.concatenate([np.zeros(1, np.uint64), np.cumsum(lengths.sum(axis=1, dtype=np.uint64), dtype=np.uint64)])


def _specs(layer: LayerGeometry, num_frames: int) -> list[TensorSpec]:
    frames = (layer.num_experts, num_frames)
    return [
        TensorSpec("begin", "U64", frames),
        TensorSpec("nbytes", "U32", (*frames, layer.itemsize)),
        TensorSpec("checksum", "U64", frames),
    ]


class EncodedFrame(NamedTuple):
    """A stored frame: its planes one after the other."""

    stored: bytes
    plane_nbytes: tuple[int, ...]
    checksum: int  # xxh3_64 of `stored`


def zstd_parameters() -> zstandard.ZstdCompressionParameters:
    """zstd's settings for stores: Huffman codes, and matches of at least 7 bytes only. Exponents repeat by chance:
    level 1's short matches save nothing and halve the speed of decompression. A constant plane is still one long match.
    """
    return zstandard.ZstdCompressionParameters.from_level(
        1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, write_checksum=False, write_content_size=True
    )


class FrameEncoder:
    """Cuts experts into frames of `frame_nbytes` bytes; a weight has `itemsize` bytes. Not shared between threads."""

    def __init__(self, frame_nbytes: int, itemsize: int) -> None:
        assert frame_nbytes > 0 and not frame_nbytes % itemsize
        self._frame_nbytes = frame_nbytes
        self._itemsize = itemsize
        self._compressor = zstandard.ZstdCompressor(compression_params=zstd_parameters())

    def encode(self, chunks: Iterable[Bytes]) -> Iterator[EncodedFrame]:
        """The frames of `chunks`, which add up to whole frames but may be cut anywhere."""
        frame = np.empty(self._frame_nbytes, np.uint8)
        filled = 0
        for chunk in chunks:
            left = np.frombuffer(chunk.data.cast("B") if chunk.nbytes else b"", np.uint8)
            while len(left):
                taken = left[: self._frame_nbytes - filled]
                frame[filled : filled + len(taken)] = taken
                filled += len(taken)
                left = left[len(taken) :]
                if filled == self._frame_nbytes:
                    yield self._encode(frame)
                    filled = 0
        assert not filled, f"{filled} bytes are not a whole frame"

    def _encode(self, frame: NDArray[np.uint8]) -> EncodedFrame:
        weights = frame.reshape(-1, self._itemsize)  # little-endian: the highest byte is the last
        planes = [self._plane(weights[:, byte].tobytes()) for byte in reversed(range(self._itemsize))]
        stored = b"".join(planes)
        return EncodedFrame(stored, tuple(map(len, planes)), xxhash.xxh3_64_intdigest(stored))

    def _plane(self, raw: bytes) -> bytes:
        """Compressed if that saves at least a sixteenth: less is not worth the time of decompression."""
        compressed = self._compressor.compress(raw)
        return compressed if len(compressed) * 16 <= len(raw) * 15 else raw


class FrameDecoder:
    """Decodes frames. It has buffers of its own: use one for each thread.

    zstd, NumPy and compiled code release the interpreter lock while they work.
    """

    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor()
        self._planes: list[Plane] = []  # reused: decompressing into new memory takes a third longer
        self._join = compiled_join() or numpy_join

    def decode(
        self, index: FrameIndex, expert: int, frame: int, stored: memoryview, out: memoryview, skip: int = 0
    ) -> None:
        """Write bytes `skip` to `skip + len(out)` of the decoded frame to `out`, both multiples of a weight's bytes.

        `stored`: the bytes of `index.extent(expert, frame)`. Length, checksum and the sizes that zstd frames state are
        verified, and all planes decompressed, before a byte is written to `out`. Raises TransferError naming file,
        expert and frame, and then has written nothing.
        """
        itemsize, plane_nbytes = index.num_planes, index.frame_nbytes // index.num_planes
        assert not skip % itemsize and not len(out) % itemsize and 0 <= skip <= skip + len(out) <= index.frame_nbytes
        first, count = skip // itemsize, len(out) // itemsize
        row = expert * index.num_frames + frame
        lengths, checksum = index.plane_nbytes[row].tolist(), int(index.checksum[row])
        try:
            if len(stored) != sum(lengths):
                raise ValueError(f"{len(stored)} bytes, but {sum(lengths)} are in the index")
            found = xxhash.xxh3_64_intdigest(stored)
            if found != checksum:
                raise ValueError(f"checksum {found:016x}, but {checksum:016x} is in the index")
            planes, begin = [], 0
            for number, length in enumerate(lengths):
                plane = self._plane(number, stored[begin : begin + length], plane_nbytes)
                planes.append(plane[first : first + count])
                begin += length
        except (zstandard.ZstdError, ValueError) as error:
            where = f"{index.path}: frame {frame} of expert {expert}"
            raise TransferError(f"{where}: {error}: damaged; remove the store and pack again") from None
        self._join(planes, out)

    def _plane(self, number: int, stored: memoryview, nbytes: int) -> Plane:
        if len(stored) == nbytes:
            return np.frombuffer(stored, np.uint8)
        stated = zstandard.get_frame_parameters(stored)
        # zstd allocates the window, so it must not be larger than the plane.
        if stated.content_size != nbytes or stated.window_size > max(nbytes, 1 << 10) or stated.dict_id:
            raise ValueError(
                f"a zstd frame of {stated.content_size} bytes (window {stated.window_size}, dictionary "
                f"{stated.dict_id}); must be of {nbytes}"
            )
        while len(self._planes) <= number:
            self._planes.append(np.empty(0, np.uint8))
        if len(self._planes[number]) < nbytes:
            self._planes[number] = np.empty(nbytes, np.uint8)
        plane = self._planes[number][:nbytes]
        count = self._decompressor.stream_reader(stored).readinto(plane)
        if count != nbytes:
            raise ValueError(f"a zstd frame of {nbytes} bytes ends after {count}")
        return plane


def numpy_join(planes: Sequence[Plane], out: memoryview) -> None:
    """Joins planes word by word: storing single bytes takes twice as long."""
    words = np.frombuffer(out, f"u{len(planes)}")
    np.left_shift(planes[0], 8, out=words, dtype=words.dtype, casting="unsafe")
    for plane in planes[1:-1]:
        np.add(words, plane, out=words)
        np.left_shift(words, 8, out=words)
    np.add(words, planes[-1], out=words)


@cache
def compiled_join(folder: Path = Path(__file__).parent) -> Join | None:
    """`numpy_join` in C, in one pass, for 2 or 4 planes; threads may call it in parallel. None where it was not
    compiled when expertly was installed, or is of another version.
    """
    for path in sorted(folder.glob("_join*.so")):
        try:
            library = ctypes.CDLL(str(path))
            if library.expertly_join_version() != JOIN_VERSION:
                continue
            functions = {2: library.expertly_join_two, 4: library.expertly_join_four}
        except (OSError, AttributeError):
            continue
        for num_planes, function in functions.items():
            function.argtypes = (*(num_planes + 1) * (ctypes.c_void_p,), ctypes.c_size_t)
            function.restype = None
        return partial(_call_join, functions)
    return None


def _call_join(functions: Mapping[int, Callable[..., None]], planes: Sequence[Plane], out: memoryview) -> None:
    words = np.frombuffer(out, np.uint8)
    count = len(words) // len(planes)
    assert all(plane.flags.c_contiguous and len(plane) == count for plane in planes)
    functions[len(planes)](*(plane.ctypes.data for plane in planes), words.ctypes.data, count)


def read_frames(file: ExpertFile, index: FrameIndex, experts: Iterable[int]) -> Iterator[tuple[memoryview, Bytes]]:
    """(stored, decoded) bytes of each frame of `experts`; the decoded bytes are valid until the next frame. Raises
    TransferError where a frame is damaged or cannot be read.
    """
    decoder, out = FrameDecoder(), np.empty(index.frame_nbytes, np.uint8)
    for expert in experts:
        for frame in range(index.num_frames):
            offset, nbytes = index.extent(expert, frame)
            stored = memoryview(bytearray(nbytes))
            file.read_into(offset, [stored])
            decoder.decode(index, expert, frame, stored, out.data)
            yield stored, out


def checked_chunks(index: FrameIndex) -> Iterator[memoryview]:
    """All bytes of the file of frames, in order. Decodes each frame, and raises StoreError naming the first that is
    damaged.
    """
    with contextlib.closing(ExpertFile(index.path)) as file:
        try:
            for stored, _ in read_frames(file, index, range(index.num_experts)):
                yield stored
            padding = memoryview(bytearray(index.file_nbytes - index.stored_nbytes))
            file.read_into(index.stored_nbytes, [padding])
            yield padding
        except TransferError as error:
            raise StoreError(str(error)) from None
