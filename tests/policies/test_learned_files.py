"""The file of a predictor's weights: what comes back, and that anything else is refused."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from expertly.core.errors import StoreError
from expertly.core.geometry import LayerGeometry, ModelShape
from expertly.core.headers import TensorSpec, safetensors_header
from expertly.policies.learned import VERSION, read_learned, save_learned
from expertly.policies.promoe import LearnedWeights
from tests.store.mounts import tiny_disk
from tests.weights import random_weights

SHAPE = ModelShape((8, 6, 8), (2, 3, 3))
IDENTITY = "4" * 64
LAYERS = [LayerGeometry(*sizes, 1, 1, 2, 1) for sizes in zip(SHAPE.num_experts, SHAPE.top_k, strict=True)]


class OtherWeights(LearnedWeights):
    kind = "other"


def weights() -> LearnedWeights:
    return random_weights(LAYERS, 7, 3)


def saved(folder: Path, learned: LearnedWeights) -> Path:
    save_learned(folder / "a.learned", learned, IDENTITY, {"source": "a test", "tokens": 3})
    return folder / "a.learned"


def refusal(path: Path, kind: type[LearnedWeights] = LearnedWeights, identity: str | None = IDENTITY) -> str:
    with pytest.raises(StoreError) as caught:
        read_learned(path, kind, identity=identity)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 600
    return message


def assert_same(state: LearnedWeights, expected: LearnedWeights) -> None:
    arrays, wanted = state.state(), expected.state()
    assert arrays.keys() == wanted.keys() and state.shape == expected.shape
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)


def forged(path: Path, change: Any = None, **texts: str | None) -> Path:
    """A file of weights with tensors that `change` changes and other texts in its header, less what is None."""
    learned = weights()
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


# -- what comes back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [LAYERS, LAYERS[:1]], ids=len)
def test_saved_weights_are_read_back_also_by_the_safetensors_library(
    tmp_path: Path, layers: list[LayerGeometry]
) -> None:
    learned = random_weights(layers, 7, 3)
    path = saved(tmp_path, learned)
    file = read_learned(path, LearnedWeights, identity=IDENTITY)
    assert_same(file.learned, learned)
    assert (file.identity, file.about) == (IDENTITY, {"source": "a test", "tokens": 3})
    assert [file.name for file in tmp_path.iterdir()] == ["a.learned"]
    state, tensors = learned.state(), load_file(path)
    assert tensors.keys() == state.keys()
    for tensor, array in tensors.items():
        np.testing.assert_array_equal(array, state[tensor])


# -- what is refused -----------------------------------------------------------------------------------------------


def test_another_kind_or_model_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, weights())
    message = refusal(path, identity="5" * 64)
    assert "identity='4444" in message and "another model" in message and "accepted: '5555" in message
    message = refusal(path, OtherWeights)
    assert "format='expertly-predictor'" in message and "accepted: 'expertly-other'" in message
    assert read_learned(path, OtherWeights, LearnedWeights).identity == IDENTITY
    save_learned(path, weights(), "trace:toy")
    assert "a trace whose model was not named (--model)" in refusal(path)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "absent")
    (tmp_path / "huge").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    assert "header length 1099511627776: more than" in refusal(tmp_path / "huge")
    with (tmp_path / "large").open("wb") as file:
        file.truncate((1 << 36) + 1)
    assert "68719476737 bytes; accepted: 68719476736" in refusal(tmp_path / "large")
    assert "a folder; must be a file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "a pipe; must be a file" in refusal(tmp_path / "pipe"), "nobody writes into it"


def shape(num_experts: list[Any], top_k: list[Any]) -> dict[str, str | None]:
    return {"shape": json.dumps({"num_experts": num_experts, "top_k": top_k})}


BAD_HEADERS: dict[str, tuple[dict[str, str | None], str]] = {
    "format": ({"format": "pt"}, "format='pt'.*accepted: 'expertly-"),
    "no format": ({"format": None}, "format=None"),
    "version": ({"version": "1"}, "version='1': accepted: 2"),
    "no identity": ({"identity": ""}, "identity=''"),
    "no shape": ({"shape": None}, "shape: not JSON"),
    "shape": ({"shape": "[]"}, "shape: .*must be an object"),
    "shape lists": (shape([8, 6, 8], [2, 3]), "model shape: .*must be as many"),
    "shape of nothing": (shape([], []), "model shape: .*1 to 4096 layers"),
    "shape numbers": (shape([8, 6, True], [2, 3, 1]), r"shape: num_experts\[2\]=True: must be a valid integer"),
    "shape below 0": (shape([8, 6, -8], [2, 3, 1]), r"num_experts=\[8, 6, -8\], top_k=\[2, 3, 1\]: must be"),
    "shape top-k": (shape([8, 6, 8], [2, 7, 3]), r"top_k=\[2, 7, 3\]: must be 1 <= top_k <= experts"),
    "about": ({"about": "3"}, "about: .*must be an object|about: .*valid dictionary"),
    "about deep": ({"about": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"}, "about"),
    "about long": ({"about": json.dumps({"a": "x" * 5000})}, "about: a: 5000 characters; accepted: 4096"),
    "experts": (shape([8, 6, 60000], [2, 3, 3]), r"tensor 'out': .*accepted: F16 \[3, 60000, 3\]"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_header_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    texts, expected = BAD_HEADERS[name]
    message = refusal(forged(tmp_path / "a.learned", **texts), identity=None)
    assert re.search(expected, message), (expected, message)


BAD_TENSORS: dict[str, tuple[Any, str]] = {
    "NaN": (setting("bias", (0, 1), np.nan), r"tensor 'bias': \[0, 1\]: nan"),
    "twice": (setting("target", 1, 1), r"network 1: of layers \(0, 1\): twice, or of no use"),
    "of no use": (setting("source", 2, 2), r"network 2: of layers \(2, 2\)"),
    "no hidden": (lambda t: t.pop("hidden"), "tensor 'hidden'"),
    "missing": (lambda t: t.pop("direct"), "tensor 'direct': missing"),
    "starts": (setting("starts", 1, 2), "tensor 'starts': .*must not be behind"),
    "few starts": (lambda t: t.update(starts=t["starts"][1:]), r"'starts': I32 \[2\]; accepted: I32 \[3\]"),
    "no distances": (lambda t: t.update(distances=t["distances"][:0]), r"accepted: I32 \[1 to 64\]"),
    "distances": (lambda t: t.update(distances=np.ones(99, np.int32)), r"accepted: I32 \[1 to 64\]"),
    "infinite": (setting("out", (0, 0, 0), np.inf), r"tensor 'out': \[0, 0, 0\]: inf"),
    "unknown": (lambda t: t.update(more=t["bias"]), "tensor 'more': unknown"),
    "dtype": (lambda t: t.update(bias=t["bias"].astype(np.float32)), "tensor 'bias': F32 .*accepted: F16"),
    "dimensions": (lambda t: t.update(bias=t["bias"][0]), "tensor 'bias': F16 .*accepted: F16"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_numbers_that_nobody_learns_are_refused(tmp_path: Path, name: str) -> None:
    """And what does not lie is accepted, so that the refusals are for what they say."""
    change, expected = BAD_TENSORS[name]
    message = refusal(forged(tmp_path / "a.learned", change))
    assert re.search(expected, message), (expected, message)
    assert_same(read_learned(forged(tmp_path / "a.learned"), LearnedWeights, identity=IDENTITY).learned, weights())


def test_a_network_that_is_missing_is_seen(tmp_path: Path) -> None:
    fewer = {pair: mlp for pair, mlp in weights().mlps.items() if pair != (1, 2)}
    path = saved(tmp_path, replace(weights(), mlps=fewer))
    assert "tensor 'distances': 1: a network for it is missing" in refusal(path)


@pytest.mark.filterwarnings("error")
def test_no_mutation_crashes(tmp_path: Path) -> None:
    """Whatever bytes change: the file is refused, or what is loaded can be saved."""
    path = saved(tmp_path, weights())
    num_loaded = 0
    for changed in mutations(path.read_bytes(), 200):
        path.write_bytes(changed)
        try:
            loaded = read_learned(path, LearnedWeights).learned
        except StoreError:
            continue
        num_loaded += 1
        save_learned(path, loaded, IDENTITY)
    assert 10 < num_loaded < 175


# -- how it is written ---------------------------------------------------------------------------------------------


def test_a_file_stays_where_what_is_to_replace_it_cannot_be_written(tmp_path: Path) -> None:
    """Numbers that nobody learns, a full disk, a folder that is not there."""
    spoiled = weights()
    next(iter(spoiled.mlps.values())).bias[0] = np.nan
    with tiny_disk(tmp_path) as disk:
        path = saved(disk, weights())
        with pytest.raises(StoreError, match=r"a\.learned: tensor 'bias': .*nan"):
            save_learned(path, spoiled, IDENTITY)
        with pytest.raises(StoreError, match="the disk is full"):
            save_learned(path, random_weights(LAYERS, 1 << 17, 8), IDENTITY)
        assert_same(read_learned(path, LearnedWeights).learned, weights())
        assert [file.name for file in disk.iterdir()] == ["a.learned"]
    with pytest.raises(StoreError, match=r"absent: writing a\.weights failed: No such file"):
        save_learned(tmp_path / "absent" / "a.weights", weights(), IDENTITY)
