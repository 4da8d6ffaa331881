"""Checksums of uncompressed experts, which find a flipped byte when it is first read.

An expert is F equal blocks of whole neurons, as many as it would have frames (`frames.frames_per_expert`). Beside the
file of a layer's experts lies a file of sums (`sums_name`): a safetensors file of `checksum` U64 [E, F], the xxh3_64 of
each block. Older stores have none; `pack --verify` adds them. xxhash releases the interpreter lock while it works.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

from expertly.core.errors import StoreError, TransferError
from expertly.core.geometry import LayerGeometry
from expertly.core.headers import TensorSpec, parse_safetensors_header, safetensors_header
from expertly.store.frames import frames_per_expert
from expertly.store.manifest import FileEntry
from expertly.store.reader import ExpertFile

Sums = tuple[tuple[int, ...], ...]
"""Checksums of a layer, by expert and block."""


def sums_name(layer: int) -> str:
    return f"experts-{layer:05d}.sums.safetensors"


class BlockSummer:
    """Makes the sums of a layer from the bytes of its experts in order, cut anywhere."""

    def __init__(self, layer: LayerGeometry, skip: int = 0) -> None:
        """`skip`: bytes before the first expert."""
        self._layer = layer
        self._num_blocks = frames_per_expert(layer)
        self._skip = skip
        self._left = self._block_nbytes = layer.expert_nbytes // self._num_blocks
        self._hash = xxhash.xxh3_64()
        self._checksums: list[int] = []

    def add(self, chunk: memoryview) -> None:
        dropped = min(self._skip, len(chunk))
        self._skip -= dropped
        chunk = chunk[dropped:]
        while len(chunk):
            taken = chunk[: self._left]
            self._hash.update(taken)
            self._left -= len(taken)
            chunk = chunk[len(taken) :]
            if not self._left:
                self._checksums.append(self._hash.intdigest())
                self._hash, self._left = xxhash.xxh3_64(), self._block_nbytes

    def file_bytes(self) -> bytes:
        """The contents of the file of sums, after all experts were added."""
        assert len(self._checksums) == self._layer.num_experts * self._num_blocks, "not the bytes of a layer"
        return safetensors_header([_spec(self._layer)]) + np.asarray(self._checksums, "<u8").tobytes()


def open_sums(folder: Path, number: int, layer: LayerGeometry, entry: FileEntry) -> Sums:
    """The sums of layer `number`; `entry` is the manifest's. Raises StoreError naming the damage."""
    path, spec = folder / sums_name(number), _spec(layer)
    raw = entry.read(path, len(safetensors_header([spec])) + spec.nbytes)
    header = raw[8 : 8 + int.from_bytes(raw[:8], "little")]
    info = parse_safetensors_header(path, header, StoreError, len(raw)).get(spec.name)
    if info is None or (info.dtype, info.shape) != (spec.dtype, spec.shape):
        wanted = f"no tensor {spec.name!r} of {spec.dtype} {list(spec.shape)}"
        raise StoreError(f"{path}: {wanted}: remove the store and pack again")
    checksums = np.frombuffer(raw, "<u8", info.nbytes // 8, info.begin).reshape(spec.shape)
    return tuple(map(tuple, checksums.tolist()))


def _spec(layer: LayerGeometry) -> TensorSpec:
    return TensorSpec("checksum", "U64", (layer.num_experts, frames_per_expert(layer)))


class FirstReads:
    """Compares each block of a layer with its sum when it is first read. Any thread may call."""

    def __init__(self, layer: int, file: ExpertFile, begin: int, expert_nbytes: int, segment_nbytes: int, sums: Sums):
        """`begin`: the offset of the first expert in the file; `segment_nbytes`: for messages, which name segments."""
        self._layer = layer
        self._file = file
        self._begin = begin
        self._expert_nbytes = expert_nbytes
        self._segment_nbytes = segment_nbytes
        self._sums = sums
        self.block_nbytes = expert_nbytes // len(sums[0])
        self.unchecked = {expert: bytearray(len(blocks)) for expert, blocks in enumerate(sums)}
        """Of experts with blocks to compare, by their places in the file: 1 for each block that has been."""

    def are_over(self, expert: int, first: int, nbytes: int) -> bool:
        """Whether all blocks of these `nbytes`, from byte `first` of an expert, have been compared. `expert`: its place
        in the file.
        """
        block = self.block_nbytes
        return self.unchecked.get(expert, b"").find(0, first // block, -(-(first + nbytes) // block)) < 0

    def check(self, expert: int, first: int, view: memoryview) -> int:
        """Compare the blocks of `view`, which was read from byte `first` of an expert. A block that is only partly in
        it is read again as a whole; returns the bytes of these reads. Raises TransferError naming file, layer, expert
        and segment where a block is damaged.
        """
        is_known, block, again_nbytes = self.unchecked.get(expert), self.block_nbytes, 0
        if is_known is None:
            return 0
        for number in range(first // block, -(-(first + len(view)) // block)):
            if is_known[number]:
                continue
            begin = number * block - first
            part = view[begin : begin + block]
            if begin < 0 or len(part) < block:
                part = memoryview(bytearray(block))
                self._file.read_into(self._begin + expert * self._expert_nbytes + number * block, [part])
                again_nbytes += block
            found, packed = xxhash.xxh3_64_intdigest(part), self._sums[expert][number]
            if found != packed:
                one, last = number * block // self._segment_nbytes, ((number + 1) * block - 1) // self._segment_nbytes
                segments = f"segment {one}" if one == last else f"segments {one} to {last}"
                raise TransferError(
                    f"{self._file.path}: layer {self._layer}, expert {expert}, {segments}: checksum {found:016x}, but "
                    f"it was packed with {packed:016x}: damaged; remove the store and pack again"
                )
            is_known[number] = 1
        if 0 not in is_known:
            self.unchecked.pop(expert, None)
        return again_nbytes
