"""Small things that were learned, of every kind; their files, and files that lie."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from expertly.core.headers import TensorSpec, safetensors_header
from expertly.policies.eviction.reuse import ReuseModel
from expertly.policies.learned import (
    NO_CHECKSUM,
    LearnedState,
    ModelShape,
    Snapshot,
    read_learned,
    save_learned,
    without_checksum,
)
from expertly.policies.predictor.eam.matrices import Matrices
from expertly.policies.predictor.fmoe.store import NONE, MapStore
from tests.scheduler.drive import one_token

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


def load_maps(path: str | Path, identity: str | None = None, shape: ModelShape | None = None) -> MapStore:
    return read_learned(Path(path), MapStore, identity=identity, shape=shape).learned


def make_matrices(prefill: int = 4, decode: int = 6, capacity: int = 8, seed: int = 0) -> Matrices:
    """Of 3 layers of 8, 6 and 8 experts."""
    dice, matrices = np.random.default_rng(seed), Matrices(SHAPE, capacity)
    for collection, num in ((matrices.prefill, prefill), (matrices.decode, decode)):
        for _ in range(num):
            counts = dice.integers(0, 30, (3, 8))
            counts[1, 6:] = 0
            collection.add(counts)
    return matrices


def taught(num_tokens: int = 60, seed: int = 0) -> ReuseModel:
    """By so many tokens, each of which needs what the one before needed, but for one expert of each layer."""
    geometry = SHAPE.geometry()
    dice, model = random.Random(seed), ReuseModel(geometry)
    chosen = [dice.sample(range(layer.num_experts), layer.top_k) for layer in geometry.layers]
    for _ in range(num_tokens):
        for number, layer in enumerate(geometry.layers):
            others = [expert for expert in range(layer.num_experts) if expert not in chosen[number]]
            chosen[number] = [*chosen[number][1:], dice.choice(others)]
            model.observe(one_token(number, chosen[number]))
    return model


def assert_same_state(found: LearnedState, expected: LearnedState) -> None:
    """The same numbers, for whatever requests."""
    one, other = found.state(), expected.state()
    assert one is not None and other is not None and one.keys() == other.keys()
    assert (found.shape, found.settings()) == (expected.shape, expected.settings())
    for name in one.keys() - {"requests"}:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def forged_as(path: Path, learned: LearnedState, change: Any = None, **texts: str | None) -> Path:
    """A file of what was learned with tensors that `change` changes and other texts in its header."""
    save_learned(path, learned, IDENTITY)
    tensors = load_file(path)
    tensors = {name: tensors[name].copy() for name in learned.schema if name in tensors}
    if change is not None:
        change(tensors)
    shot = Snapshot.of(learned)
    assert shot is not None
    said: dict[str, str | None] = {
        "format": f"expertly-{learned.kind}", "version": "1", "checksum": NO_CHECKSUM,
        "identity": IDENTITY, "about": "{}", **shot.texts,
    }  # fmt: skip
    return forged(path, tensors, said | texts)


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
