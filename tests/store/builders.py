"""Small stores, frames, checkpoints and safetensors files of known bytes, without torch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertly.core.geometry import LayerGeometry
from expertly.core.headers import TensorSpec
from expertly.store.checkpoint import Bytes
from expertly.store.frames import FrameEncoder, FrameIndex, frames_per_expert, index_bytes, parse_index, read_frames
from expertly.store.manifest import Manifest
from expertly.store.packed import PackedStore
from expertly.store.reader import ExpertFile
from expertly.store.writer import Progress, StoreWriter

LAYER = LayerGeometry(
    num_experts=4, top_k=2, hidden_size=64, intermediate_size=32, num_matrices=3, itemsize=2
)  # an expert is three pages
PLAN = Manifest("0" * 64, "/somewhere", "toy", "bfloat16", (LAYER, replace(LAYER, num_experts=2)), ("a.x", "b.x"), {})
DENSE = (TensorSpec("embed.weight", "F32", (10, 8)), TensorSpec("norm.weight", "BF16", (8,)))

FRAMED = LayerGeometry(4, 2, hidden_size=64, intermediate_size=176, num_matrices=3, itemsize=2)  # 4 frames of 16.5 KiB
PLANES = replace(
    PLAN, layers=(FRAMED, replace(FRAMED, num_experts=2, intermediate_size=215)), codec="planes"
)  # the second layer: 2 experts of 5 frames
PLANS = {"none": PLAN, "planes": PLANES}

KINDS = ("normal", "constant", "zeros", "nan", "random bits", "trained and padded")
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}


def expert_bytes(layer: int, expert: int, plan: Manifest = PLAN) -> Bytes:
    geometry = plan.layers[layer]
    if plan.codec == "planes":
        return weights("normal", "bfloat16", geometry.expert_nbytes // 2, seed=100 * layer + expert)
    return np.random.default_rng([layer, expert]).integers(0, 256, geometry.expert_nbytes, np.uint8)


def experts_of(layer: int, plan: Manifest = PLAN) -> Iterator[Bytes]:
    return (expert_bytes(layer, expert, plan) for expert in range(plan.layers[layer].num_experts))


def dense_chunks(spec: TensorSpec) -> Iterator[Bytes]:
    yield np.full(spec.nbytes, len(spec.name), np.uint8)


def fill(writer: StoreWriter, plan: Manifest = PLAN) -> PackedStore:
    for layer in range(len(plan.layers)):
        if not writer.is_layer_done(layer):
            writer.write_layer(layer, experts_of(layer, plan))
    if not writer.is_done("dense.safetensors"):
        writer.write_dense(dense_chunks)
    writer.write_file("config.json", b'{"model_type": "toy"}')
    return writer.finish()


def write_store(
    folder: Path, plan: Manifest = PLAN, progress: Progress | None = None, extras: Path | None = None
) -> PackedStore:
    with StoreWriter(folder, plan, DENSE, progress) as writer:
        if extras is not None:
            writer.copy_extras(extras)
        return fill(writer, plan)


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
    index = index_bytes(layer, num_frames, [f.plane_nbytes for f in frames], [f.checksum for f in frames])
    return parse_index(folder / "index", index, folder / "frames", layer), [f.stored for f in frames]


def stored_experts(store: PackedStore) -> Iterator[bytes]:
    """The bytes of all experts of a store, decoded, in order."""
    for layer, geometry in enumerate(store.manifest.layers):
        (path, offset), index = store.extents[layer], store.layer_file(layer).frames
        if index is None:
            raw, nbytes = path.read_bytes()[offset:], geometry.expert_nbytes
            yield from (raw[e * nbytes : (e + 1) * nbytes] for e in range(geometry.num_experts))
            continue
        with contextlib.closing(ExpertFile(path)) as file:
            for expert in range(geometry.num_experts):
                yield b"".join(bytes(decoded) for _, decoded in read_frames(file, index, [expert]))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def safetensors_bytes(header: Any, data: bytes = b"", nbytes: int | None = None) -> bytes:
    """A file with that header (JSON, or raw bytes) and header length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if nbytes is None else nbytes).to_bytes(8, "little") + raw + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    as_list = [list(value) if isinstance(value, tuple) else value for value in (shape, offsets)]
    return {"dtype": dtype, "shape": as_list[0], "data_offsets": as_list[1]}


def write_checkpoint(folder: Path, shards: int = 2, config: dict[str, Any] | None = None) -> Path:
    """A checkpoint of tensors t0, t1, ... of four bytes each, one a shard."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "toy"}))
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        header = {f"t{i}": entry("U8", (4,), (0, 4))}
        (folder / name).write_bytes(safetensors_bytes(header, bytes([i] * 4)))
        weight_map[f"t{i}"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
