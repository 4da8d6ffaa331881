"""Small map stores of known maps, and files that lie."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from expertly.core.headers import TensorSpec, safetensors_header
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.fmoe.store import NONE, MapStore
from expertly.policies.state.sealed import without_checksum

SHAPE = ModelShape((8, 6, 8), (2, 3, 3))
IDENTITY = "4" * 64


def add_random(
    store: MapStore, num_maps: int, seed: int, hidden_size: int | None = 5, first_request: int = 0, each: int = 4
) -> None:
    """So many maps, `each` of a request; layer 1 now and then does not run."""
    rng = np.random.default_rng(seed)
    shape = store.shape
    scores = rng.random((num_maps, shape.num_layers, shape.max_experts)).astype(np.float32) ** 3
    chosen = np.full((num_maps, shape.num_layers, shape.max_top_k), NONE, np.uint16)
    for layer, (num_experts, top_k) in enumerate(zip(shape.num_experts, shape.top_k, strict=True)):
        scores[:, layer, num_experts:] = 0
        chosen[:, layer, :top_k] = np.argsort(-scores[:, layer], axis=1)[:, :top_k]
    did_not_run = rng.random(num_maps) < 0.2
    scores /= scores.sum(axis=-1, keepdims=True)
    scores[did_not_run, 1] = 0
    chosen[did_not_run, 1] = NONE
    embedding = None if hidden_size is None else rng.standard_normal((num_maps, hidden_size)).astype(np.float32)
    store.add(scores, chosen, first_request + np.arange(num_maps) // each, embedding)


def make_store(num_maps: int = 15, capacity: int = 20, seed: int = 0, hidden_size: int | None = 5) -> MapStore:
    store = MapStore(SHAPE, capacity, semantic_weight=0.25, quota=0.5)
    if num_maps:
        add_random(store, num_maps, seed, hidden_size)
    return store


def assert_same(found: MapStore, expected: MapStore) -> None:
    """The same maps in the same places; requests are the same groups, under whatever numbers."""
    assert (found.shape, found.capacity) == (expected.shape, expected.capacity)
    assert (found.semantic_weight, found.quota) == (expected.semantic_weight, expected.quota)
    one, other = found.state(), expected.state()
    assert one.keys() == other.keys()
    for name in one.keys() - {"requests"}:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    np.testing.assert_array_equal(_groups(one["requests"]), _groups(other["requests"]))


def forged(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str | None]) -> Path:
    """A file of these tensors and this metadata, less what is None; its checksum is right where it has the digits 0."""
    names = {"int64": "I64", "int32": "I32", "uint16": "U16", "float16": "F16", "float32": "F32"}
    specs = [TensorSpec(name, names[str(array.dtype)], array.shape) for name, array in tensors.items()]
    blank = safetensors_header(specs, {key: value for key, value in metadata.items() if value is not None})
    data = b"".join(array.tobytes() for array in tensors.values())
    path.write_bytes(_sealed(blank, data))
    return path


def setting(name: str, place: Any, value: Any) -> Any:
    """What sets a number in a file's tensors."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[name][place] = value

    return change


def mutations(whole: bytes, num: int) -> Iterator[bytes]:
    """A file with one to three bytes changed, of its header and its tensors in turn, and the right checksum."""
    start = 8 + int.from_bytes(whole[:8], "little")
    used = len(whole[:start].rstrip())
    dice = random.Random(0)
    for number in range(num):
        changed = bytearray(whole)
        for _ in range(dice.choice((1, 1, 3))):
            if number % 2:
                changed[dice.randrange(start, len(whole))] = dice.randrange(256)
            else:
                changed[dice.randrange(8, used)] = dice.choice(b'0123456789"[]{},:.-eaF')
        blank, _ = without_checksum(bytes(changed[:start]))
        yield _sealed(blank, bytes(changed[start:]))


def _sealed(header: bytes, data: bytes) -> bytes:
    """With the right checksum in place of eight digits 0."""
    return header.replace(b'"checksum":"00000000"', b'"checksum":"%08x"' % zlib.crc32(header + data)) + data


def _groups(requests: np.ndarray) -> np.ndarray:
    return requests[:, None] == requests[None]
