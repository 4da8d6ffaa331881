"""Checksums of experts, which find a flipped byte when it is first read, or soon after it was flipped.

An expert is B equal blocks of whole neurons (`blocks_per_expert`). Beside the file of a layer's experts lies a file of
sums (`sums_name`): a safetensors file of `checksum` U64 [E, B], the xxh3_64 of each block.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

from expertly.core.errors import StoreError
from expertly.core.geometry import LayerGeometry
from expertly.core.headers import TensorSpec, parse_safetensors_header, safetensors_header
from expertly.core.untrusted import Bounds, read_file
from expertly.store.manifest import MANIFEST_NAME, PACK_AGAIN, FileEntry

Sums = tuple[tuple[int, ...], ...]
"""Checksums of a layer, by expert and block."""

CHECK_EVERY = 64
"""Of so many reads of a block that follow each other, at least one is compared with its checksum."""

_MAX_BLOCKS = 16
_MIN_BLOCK_NBYTES = 16 << 10


def blocks_per_expert(layer: LayerGeometry) -> int:
    """B: the most, up to 16, equal blocks of whole neurons (or a format's blocks) of 16 KiB or more; else 1."""
    counts = (n for n in range(_MAX_BLOCKS, 1, -1) if not layer.num_blocks % n)
    return next((n for n in counts if layer.expert_nbytes // n >= _MIN_BLOCK_NBYTES), 1)


def sums_name(layer: int) -> str:
    return f"experts-{layer:05d}.sums.safetensors"


class BlockSummer:
    """Makes the sums of a layer from the bytes of its experts in order, cut anywhere."""

    def __init__(self, layer: LayerGeometry) -> None:
        self._spec = _spec(layer)
        self._left = self._block_nbytes = layer.expert_nbytes // blocks_per_expert(layer)
        self._hash = xxhash.xxh3_64()
        self._checksums: list[int] = []

    def add(self, chunk: memoryview) -> None:
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
        assert 8 * len(self._checksums) == self._spec.nbytes, "not the bytes of a layer"
        return safetensors_header([self._spec]) + np.asarray(self._checksums, "<u8").tobytes()


def open_sums(folder: Path, number: int, layer: LayerGeometry, entry: FileEntry) -> Sums:
    """The sums of layer `number`; `entry` is the manifest's. Raises StoreError naming the damage."""
    path, spec = folder / sums_name(number), _spec(layer)
    most = len(safetensors_header([spec])) + spec.nbytes
    raw = read_file(path, Bounds(most), StoreError)
    if len(raw) != entry.nbytes or xxhash.xxh3_64_intdigest(raw) != entry.checksum:
        raise StoreError(f"{path}: its checksum is not that of {MANIFEST_NAME}: damaged{PACK_AGAIN}")
    header = raw[8 : 8 + int.from_bytes(raw[:8], "little")]
    info = parse_safetensors_header(path, header, StoreError, len(raw)).get(spec.name)
    if info is None or (info.dtype, info.shape) != (spec.dtype, spec.shape):
        raise StoreError(f"{path}: no tensor {spec.name!r} of {spec.dtype} {list(spec.shape)}{PACK_AGAIN}")
    checksums = np.frombuffer(raw, "<u8", info.nbytes // 8, info.begin).reshape(spec.shape)
    return tuple(map(tuple, checksums.tolist()))


def _spec(layer: LayerGeometry) -> TensorSpec:
    return TensorSpec("checksum", "U64", (layer.num_experts, blocks_per_expert(layer)))
