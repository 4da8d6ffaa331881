"""Small stores, checkpoints and safetensors files of known bytes, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from expertly.core.geometry import LayerGeometry
from expertly.core.headers import TensorSpec
from expertly.store.checkpoint import Bytes
from expertly.store.manifest import Manifest
from expertly.store.packed import PackedStore
from expertly.store.writer import Progress, StoreWriter

LAYER = LayerGeometry(
    num_experts=4, top_k=2, hidden_size=64, intermediate_size=32, num_matrices=3, itemsize=2
)  # an expert is three pages
PLAN = Manifest("0" * 64, "/somewhere", "toy", "bfloat16", (LAYER, replace(LAYER, num_experts=2)), ("a.x", "b.x"), {})
DENSE = (TensorSpec("embed.weight", "F32", (10, 8)), TensorSpec("norm.weight", "BF16", (8,)))


def expert_bytes(layer: int, expert: int, plan: Manifest = PLAN) -> Bytes:
    geometry = plan.layers[layer]
    return np.random.default_rng([layer, expert]).integers(0, 256, geometry.expert_nbytes, np.uint8)


def experts_of(layer: int, plan: Manifest = PLAN) -> Iterator[Bytes]:
    return (expert_bytes(layer, expert, plan) for expert in range(plan.layers[layer].num_experts))


def dense_chunks(spec: TensorSpec) -> Iterator[Bytes]:
    yield np.full(spec.nbytes, len(spec.name), np.uint8)


def fill(writer: StoreWriter, plan: Manifest = PLAN) -> PackedStore:
    for layer in range(len(plan.layers)):
        writer.write_layer(layer, experts_of(layer, plan))
    writer.write_dense(chunk for spec in DENSE for chunk in dense_chunks(spec))
    writer.write_file("config.json", b'{"model_type": "toy"}')
    return writer.finish()


def write_store(
    folder: Path, plan: Manifest = PLAN, progress: Progress | None = None, extras: Path | None = None
) -> PackedStore:
    with StoreWriter(folder, plan, DENSE, progress) as writer:
        if extras is not None:
            writer.copy_extras(extras)
        return fill(writer, plan)


def stored_experts(store: PackedStore) -> Iterator[bytes]:
    """The bytes of all experts of a store, in order."""
    for (path, offset), geometry in zip(store.extents, store.manifest.layers, strict=True):
        raw, nbytes = path.read_bytes()[offset:], geometry.expert_nbytes
        yield from (raw[e * nbytes : (e + 1) * nbytes] for e in range(geometry.num_experts))


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
