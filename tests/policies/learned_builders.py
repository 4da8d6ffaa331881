"""Small things that were learned, of every kind; their files, and files that lie."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from expertly.core.headers import TensorSpec, safetensors_header
from expertly.policies.fmoe import MapStore
from expertly.policies.learned import VERSION, LearnedState, ModelShape, save_learned
from expertly.policies.moe_infinity import Matrices
from expertly.policies.reuse import ReuseModel
from tests.scheduler.drive import one_token

SHAPE = ModelShape((8, 6, 8), (2, 3, 3))
IDENTITY = "4" * 64


def add_random(
    store: MapStore, num_maps: int, seed: int, hidden_size: int | None = 5, first_request: int = 0, each: int = 4
) -> None:
    """So many maps, `each` of a request; layer 1 now and then does not run."""
    dice, shape = np.random.default_rng(seed), store.shape
    scores = dice.random((num_maps, shape.num_layers, shape.max_experts)).astype(np.float32) ** 3
    for layer, num_experts in enumerate(shape.num_experts):
        scores[:, layer, num_experts:] = 0
    did_not_run = dice.random(num_maps) < 0.2
    scores /= scores.sum(axis=-1, keepdims=True)
    scores[did_not_run, 1] = 0
    embedding = None if hidden_size is None else dice.standard_normal((num_maps, hidden_size)).astype(np.float32)
    store.add(scores, first_request + np.arange(num_maps) // each, embedding)


def make_store(num_maps: int = 15, capacity: int = 20, seed: int = 0, hidden_size: int | None = 5) -> MapStore:
    store = MapStore(SHAPE, capacity, semantic_weight=0.25, quota=0.5)
    if num_maps:
        add_random(store, num_maps, seed, hidden_size)
    return store


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
    dice, model = random.Random(seed), ReuseModel(SHAPE)
    chosen = [dice.sample(range(num), k) for num, k in zip(SHAPE.num_experts, SHAPE.top_k, strict=True)]
    for _ in range(num_tokens):
        for number, num in enumerate(SHAPE.num_experts):
            rest = [expert for expert in range(num) if expert not in chosen[number]]
            chosen[number] = [*chosen[number][1:], dice.choice(rest)]
            model.observe(one_token(number, chosen[number]))
    return model


def fresh(learned: LearnedState) -> Any:
    """What a file of `learned` is read into: nothing has been learned yet."""
    if isinstance(learned, MapStore):
        return MapStore(learned.shape, learned.capacity, semantic_weight=learned.semantic_weight, quota=0.5)
    if isinstance(learned, Matrices):
        return Matrices(learned.shape, learned.capacity)
    return ReuseModel(learned.shape) if isinstance(learned, ReuseModel) else type(learned)


def assert_same_state(state: LearnedState, expected: LearnedState) -> None:
    """The same numbers in the same places; requests are the same groups, under whatever numbers."""
    arrays, wanted = state.state(), expected.state()
    assert arrays.keys() == wanted.keys() and state.shape == expected.shape
    for name, array in arrays.items():
        if name == "requests":
            np.testing.assert_array_equal(array[:, None] == array, wanted[name][:, None] == wanted[name])
        else:
            np.testing.assert_array_equal(array, wanted[name], err_msg=name)


def forged(path: Path, learned: LearnedState, change: Any = None, **texts: str | None) -> Path:
    """A file of what was learned with tensors that `change` changes and other texts in its header, less what is
    None.
    """
    path.unlink(missing_ok=True)
    save_learned(path, learned, IDENTITY)
    tensors = {name: array.copy() for name, array in load_file(path).items()}
    tensors = {name: tensors[name] for name in learned.tensors if name in tensors}
    if change is not None:
        change(tensors)
    metadata: dict[str, str | None] = {
        "format": f"expertly-{learned.kind}",
        "version": str(VERSION),
        "identity": IDENTITY,
        "shape": json.dumps({"num_experts": learned.shape.num_experts, "top_k": learned.shape.top_k}),
        "about": "{}",
    }
    metadata |= texts
    names = {"int64": "I64", "int32": "I32", "float16": "F16", "float32": "F32"}
    specs = [TensorSpec(name, names[str(array.dtype)], array.shape) for name, array in tensors.items()]
    header = safetensors_header(specs, {key: text for key, text in metadata.items() if text is not None})
    path.write_bytes(header + b"".join(array.tobytes() for array in tensors.values()))
    return path


def setting(name: str, place: Any, value: Any) -> Any:
    """What sets a number in a file's tensors."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[name][place] = value

    return change


def mutations(whole: bytes, num: int) -> Iterator[bytes]:
    """A file with one to three bytes changed, of its header and its tensors in turn."""
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
        yield bytes(changed)
