"""Frames: a part of an expert as byte planes, each as it is or as a zstd frame, and back, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from expertly.core.errors import TransferError
from expertly.store.checkpoint import Bytes
from expertly.store.frame_index import FrameIndex
from expertly.store.join import compiled_join

_T = TypeVar("_T", np.uint8, np.uint16)

MIN_MATCH = 7
HASH_LOG = 6
"""Of zstd at level 1: Huffman codes, and hardly a match. A plane of exponents repeats by chance only: what level 1
finds in it by itself is short, saves nothing and halves the speed of decompressing. Constant planes are still one long
match.
"""


class EncodedFrame(NamedTuple):
    """A frame as it is stored, its planes one after the other."""

    planes: tuple[bytes, ...]
    checksum: int  # xxh3_64 of all stored bytes

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.planes))


def zstd_parameters() -> zstandard.ZstdCompressionParameters:
    """Those that stores are made with."""
    return zstandard.ZstdCompressionParameters.from_level(
        1,
        strategy=zstandard.STRATEGY_FAST,
        min_match=MIN_MATCH,
        hash_log=HASH_LOG,
        write_checksum=False,
        write_content_size=True,
    )


class FrameEncoder:
    """Cuts experts into frames of `frame_nbytes` bytes of weights of `itemsize` bytes. Not shared between threads."""

    def __init__(
        self, frame_nbytes: int, itemsize: int, parameters: zstandard.ZstdCompressionParameters | None = None
    ) -> None:
        """`parameters`: instead of those that stores are made with."""
        assert frame_nbytes > 0 and not frame_nbytes % itemsize
        self._frame_nbytes = frame_nbytes
        self._itemsize = itemsize
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters or zstd_parameters())

    def encode(self, chunks: Iterable[Bytes]) -> Iterator[EncodedFrame]:
        """The frames of the bytes of `chunks`, which add up to whole frames but may be cut anywhere."""
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
        planes = tuple(self._plane(weights[:, byte].tobytes()) for byte in reversed(range(self._itemsize)))
        return EncodedFrame(planes, _checksum(planes))

    def _plane(self, raw: bytes) -> bytes:
        """Compressed where that saves a sixteenth: less is not worth the time that decompressing takes."""
        compressed = self._compressor.compress(raw)
        return compressed if len(compressed) * 16 <= len(raw) * 15 else raw


class FrameDecoder:
    """Makes weights of frames again. It has buffers of its own: one a thread, never shared between threads.

    zstd, NumPy and what is compiled let go of the interpreter lock while they work.
    """

    def __init__(self, is_compiled: bool = True) -> None:
        """`is_compiled`: planes are joined by what was compiled, where that is there; else by NumPy."""
        self._decompressor = zstandard.ZstdDecompressor()
        self._planes: list[NDArray[np.uint8]] = []  # decompressed into, and used again: new memory costs a third more
        self._halves: list[NDArray[np.uint16]] = []  # of weights of four bytes, where NumPy joins them
        self._compiled = compiled_join() if is_compiled else None

    @staticmethod
    def scratch_nbytes(frame_nbytes: int, num_planes: int) -> int:
        """Of memory that one decoder holds in the end, at most."""
        return frame_nbytes * (2 if num_planes == 4 else 1)

    def decode(
        self, index: FrameIndex, expert: int, frame: int, stored: memoryview, out: memoryview, skip: int = 0
    ) -> None:
        """Write bytes `skip` to `skip + len(out)` of the decoded frame to `out`, both multiples of a weight's bytes.

        `stored`: the bytes of `index.frame_extent(expert, frame)`. Length, checksum and the sizes that zstd frames
        state are verified, and all planes decompressed, before a byte is written to `out`. Raises TransferError naming
        file, expert and frame, and then has written nothing.
        """
        itemsize = index.num_planes
        assert not skip % itemsize and not len(out) % itemsize and 0 <= skip <= skip + len(out) <= index.frame_nbytes
        first, count = skip // itemsize, len(out) // itemsize
        planes = []
        begin = 0
        for number, length in enumerate(_check_frame(index, expert, frame, stored)):
            try:
                plane = self._plane(number, stored[begin : begin + length], index.frame_nbytes // itemsize)
            except (zstandard.ZstdError, ValueError) as error:
                raise _damaged(index, expert, frame, str(error)) from None
            planes.append(plane[first : first + count])
            begin += length
        self._join(planes, out)

    def _plane(self, number: int, stored: memoryview, nbytes: int) -> NDArray[np.uint8]:
        if len(stored) == nbytes:
            return np.frombuffer(stored, np.uint8)
        plane = _at_least(self._planes, number, nbytes, np.uint8)
        count = self._decompressor.stream_reader(stored).readinto(plane)
        if count != nbytes:
            raise ValueError(f"a zstd frame of {nbytes} bytes ends after {count}")
        return plane

    def _join(self, planes: list[NDArray[np.uint8]], out: memoryview) -> None:
        """Whole words are written: storing each byte on its own takes twice as long."""
        if self._compiled is not None:
            self._compiled(planes, out)
            return
        if len(planes) == 2:
            _join_words(planes[0], planes[1], np.frombuffer(out, np.uint16))
            return
        assert len(planes) == 4, f"weights of {len(planes)} bytes"
        high, low = (_at_least(self._halves, number, len(planes[0]), np.uint16) for number in range(2))
        _join_words(planes[0], planes[1], high)
        _join_words(planes[2], planes[3], low)
        words = np.frombuffer(out, np.uint32)
        np.multiply(high, 1 << 16, out=words, dtype=np.uint32, casting="unsafe")
        np.add(words, low, out=words)


def _check_frame(index: FrameIndex, expert: int, frame: int, stored: memoryview) -> list[int]:
    """The stored bytes of each plane of a frame; `stored` is all of them. Raises TransferError naming file, expert and
    frame where length, checksum or what zstd frames state is not what it must be.
    """
    lengths, checksum = index.planes_of(expert, frame)
    if len(stored) != sum(lengths):
        raise _damaged(index, expert, frame, f"{len(stored)} bytes, but {sum(lengths)} are in the index")
    found = xxhash.xxh3_64_intdigest(stored)
    if found != checksum:
        raise _damaged(index, expert, frame, f"checksum {found:016x}, but {checksum:016x} is in the index")
    begin = 0
    for length in lengths:
        try:
            _check_plane(stored[begin : begin + length], index.frame_nbytes // index.num_planes)
        except (zstandard.ZstdError, ValueError) as error:
            raise _damaged(index, expert, frame, str(error)) from None
        begin += length
    return lengths


def _check_plane(stored: memoryview, nbytes: int) -> None:
    """That a compressed plane states its size, and a window that is no larger: that is what decompressing allocates."""
    if len(stored) == nbytes:
        return
    stated = zstandard.get_frame_parameters(stored)
    if stated.content_size != nbytes or stated.window_size > max(nbytes, 1 << 10) or stated.dict_id:
        raise ValueError(
            f"a zstd frame of {stated.content_size} bytes (window {stated.window_size}, dictionary "
            f"{stated.dict_id}); must be of {nbytes}"
        )


def _at_least(arrays: list[NDArray[_T]], number: int, size: int, kind: type[_T]) -> NDArray[_T]:
    """`size` elements of the array of that number, which grows where it is too small."""
    while len(arrays) <= number:
        arrays.append(np.empty(0, kind))
    if len(arrays[number]) < size:
        arrays[number] = np.empty(size, kind)
    return arrays[number][:size]


def _join_words(high: NDArray[np.uint8], low: NDArray[np.uint8], out: NDArray[np.uint16]) -> None:
    np.multiply(high, 1 << 8, out=out, dtype=np.uint16, casting="unsafe")
    np.add(out, low, out=out)


def _checksum(parts: Iterable[bytes]) -> int:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def _damaged(index: FrameIndex, expert: int, frame: int, what: str) -> TransferError:
    return TransferError(
        f"{index.path}: frame {frame} of expert {expert}: {what}: damaged; remove the store and pack again"
    )
