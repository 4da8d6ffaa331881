"""Weights that compress in every way weights can, and frames of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertly.core.geometry import LayerGeometry
from expertly.store.checkpoint import Bytes
from expertly.store.frames import FrameEncoder, FrameIndex, frames_per_expert, index_bytes, parse_index
from expertly.store.manifest import Manifest
from expertly.store.packed import PackedStore
from expertly.store.writer import Progress, StoreWriter
from tests.store.builders import DENSE, dense_chunks

KINDS = ("normal", "constant", "zeros", "nan", "random bits", "trained and padded")
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}

LAYER = LayerGeometry(4, 2, hidden_size=64, intermediate_size=176, num_matrices=3, itemsize=2)  # 4 frames of 16.5 KiB
PLAN = Manifest(
    "0" * 64,
    "/somewhere",
    "toy",
    "bfloat16",
    (LAYER, replace(LAYER, num_experts=2, intermediate_size=215)),  # of 2 x 5 frames
    ("a.x", "b.x"),
    {},
    codec="planes",
)


def weights(kind: str, dtype: str, count: int, seed: int = 0) -> NDArray[np.uint8]:
    """Bytes of `count` weights; those of no kind but "random bits" and "nan" are numbers."""
    dice = np.random.default_rng(seed)
    if kind == "random bits":
        return dice.integers(0, 256, count * DTYPES[dtype], np.uint8)
    values = (dice.standard_normal(count) * 0.02).astype(np.float32)
    if kind == "constant":
        values[:] = -0.75
    elif kind == "zeros":
        values[:] = 0
    elif kind == "trained and padded":
        values[count // 3 :: 2] = 0
    bits = values.view(np.uint32)
    if kind == "nan":  # quiet and signalling, of either sign and any payload, and infinities
        bits[::7] = 0x7F800000 | dice.integers(0, 1 << 23, len(bits[::7]), np.uint32)
        bits[::14] |= np.uint32(1 << 31)
    if dtype == "float32":
        return bits.view(np.uint8)
    if dtype == "bfloat16":
        return (bits >> 16).astype(np.uint16).view(np.uint8)
    with np.errstate(invalid="ignore"):
        return values.astype(np.float16).view(np.uint8)


def encoded(layer: LayerGeometry, raw: NDArray[np.uint8], folder: Path) -> tuple[FrameIndex, list[bytes]]:
    """The index and the stored frames of a layer's experts."""
    num_frames = frames_per_expert(layer)
    frames = list(FrameEncoder(layer.expert_nbytes // num_frames, layer.itemsize).encode([raw]))
    index = index_bytes(layer, num_frames, [[*map(len, f.planes)] for f in frames], [f.checksum for f in frames])
    return parse_index(folder / "index", index, folder / "frames", layer), [b"".join(f.planes) for f in frames]


def expert_weights(layer: int, expert: int) -> Bytes:
    geometry = PLAN.layers[layer]
    return weights("normal", "bfloat16", geometry.expert_nbytes // 2, seed=100 * layer + expert)


def fill_planes(writer: StoreWriter) -> PackedStore:
    for layer, geometry in enumerate(PLAN.layers):
        if not writer.is_layer_done(layer):
            writer.write_layer(layer, (expert_weights(layer, expert) for expert in range(geometry.num_experts)))
    if not writer.is_done("dense.safetensors"):
        writer.write_dense(dense_chunks)
    writer.write_file("config.json", b'{"model_type": "toy"}')
    return writer.finish()


def write_planes(folder: Path, progress: Progress | None = None) -> PackedStore:
    with StoreWriter(folder, PLAN, DENSE, progress) as writer:
        return fill_planes(writer)
