"""A file of what was learned, of every kind: what comes back, and that anything else is refused."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from expertly.core.errors import StoreError
from expertly.core.geometry import LayerGeometry
from expertly.policies.fmoe import MapStore
from expertly.policies.learned import LearnedState, ModelShape, read_learned, save_learned
from expertly.policies.moe_infinity import Matrices
from expertly.policies.promoe import LearnedWeights
from expertly.policies.reuse import ReuseModel
from tests.policies.learned_builders import (
    IDENTITY,
    SHAPE,
    add_random,
    assert_same_state,
    forged,
    fresh,
    make_matrices,
    make_store,
    mutations,
    setting,
    taught,
)
from tests.scheduler.drive import one_token
from tests.store.mounts import tiny_disk
from tests.weights import random_weights

LAYERS = [LayerGeometry(*sizes, 1, 1, 2, 1) for sizes in zip(SHAPE.num_experts, SHAPE.top_k, strict=True)]


def weights() -> LearnedWeights:
    return random_weights(LAYERS, 7, 3)


KINDS: dict[str, Callable[[], LearnedState]] = {
    "maps": make_store,
    "maps without embeddings": lambda: make_store(hidden_size=None),
    "matrices": make_matrices,
    "reuse": taught,
    "predictor": weights,
}
MORE: dict[str, Callable[[], LearnedState]] = {
    "full maps": lambda: make_store(60),
    "one map": lambda: make_store(1, capacity=1),
    "no map": lambda: make_store(0),
    "maps of one layer": lambda: MapStore(ModelShape((4,), (4,)), 7, semantic_weight=1.0, quota=1.0),
    "no matrix": lambda: make_matrices(0, 0),
    "full matrices": lambda: make_matrices(20, 20),
    "nothing learned of reuse": lambda: taught(0),
    "weights of one layer": lambda: random_weights(LAYERS[:1]),
}
WHILE_RUNNING = ["maps", "matrices", "reuse"]


def saved(folder: Path, learned: LearnedState) -> Path:
    save_learned(folder / "a.learned", learned, IDENTITY, {"source": "a test", "tokens": 3})
    return folder / "a.learned"


def refusal(path: Path, *accepted: Any, identity: str | None = IDENTITY) -> str:
    with pytest.raises(StoreError) as caught:
        read_learned(path, *accepted, identity=identity)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 600
    return message


# -- what comes back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*KINDS, *MORE])
def test_a_saved_state_is_read_back_also_by_the_safetensors_library(tmp_path: Path, name: str) -> None:
    learned = (KINDS | MORE)[name]()
    path = saved(tmp_path, learned)
    file = read_learned(path, fresh(learned), identity=IDENTITY)
    assert_same_state(file.learned, learned)
    assert file.learned.num_learned == learned.num_learned
    assert (file.identity, file.about) == (IDENTITY, {"source": "a test", "tokens": 3})
    assert [file.name for file in tmp_path.iterdir()] == ["a.learned"]
    state, tensors = learned.state(), load_file(path)
    assert tensors.keys() == state.keys()
    for tensor, array in tensors.items():
        np.testing.assert_array_equal(array.astype(state[tensor].dtype), state[tensor])


def test_learning_continues_from_a_file_as_without_it(tmp_path: Path) -> None:
    store = make_store(60)
    other = read_learned(saved(tmp_path, store), fresh(store)).learned
    for seed in range(3):
        for maps in (store, other):
            add_random(maps, 4, seed, first_request=1000 + seed)
        assert_same_state(other, store)
    model = taught(200)
    again = read_learned(saved(tmp_path, model), fresh(model)).learned
    for reuse in (model, again):
        for layer in range(len(LAYERS)):
            reuse.observe(one_token(layer, [1, 2]))
    assert again.num_learned == model.num_learned == 201


def test_requests_of_a_file_are_none_of_a_running_model(tmp_path: Path) -> None:
    store = make_store()
    loaded = read_learned(saved(tmp_path, store), fresh(store)).learned
    assert set(loaded.state()["requests"].tolist()) == {-1, -2, -3, -4}
    of_first = [maps["maps"][:, maps["requests"] == n] for maps, n in ((store.state(), 0), (loaded.state(), -1))]
    np.testing.assert_array_equal(*of_first)


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_another_kind_or_model_is_refused(tmp_path: Path, name: str) -> None:
    learned = KINDS[name]()
    path = saved(tmp_path, learned)
    message = refusal(path, fresh(learned), identity="5" * 64)
    assert "identity='4444" in message and "another model" in message and "accepted: '5555" in message
    if not isinstance(learned, LearnedWeights):  # which are made for any model
        smaller = {"maps": MapStore, "matrices": Matrices}.get(learned.kind, ReuseModel)
        message = refusal(path, smaller(ModelShape((8, 6), (2, 3))))
        assert "shape: of 3 layers of 6 to 8 experts" in message and "accepted: 2 layers" in message
    for wrong in (make_store(0), make_matrices(0, 0), taught(0), LearnedWeights):
        if wrong.kind != learned.kind:
            message = refusal(path, wrong)
            assert f"format='expertly-{learned.kind}'" in message and f"accepted: 'expertly-{wrong.kind}'" in message
            assert read_learned(path, wrong, fresh(learned)).identity == IDENTITY
    save_learned(path, learned, "trace:toy")
    assert "a trace whose model was not named (--model)" in refusal(path, fresh(learned))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "absent", MapStore)
    (tmp_path / "huge").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    assert "header length 1099511627776: more than" in refusal(tmp_path / "huge", MapStore)
    with (tmp_path / "large").open("wb") as file:
        file.truncate((1 << 36) + 1)
    assert "68719476737 bytes; accepted: 68719476736" in refusal(tmp_path / "large", MapStore)
    assert "a folder; must be a file" in refusal(tmp_path, MapStore)
    os.mkfifo(tmp_path / "pipe")
    assert "a pipe; must be a file" in refusal(tmp_path / "pipe", MapStore), "nobody writes into it"


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
}
OF_A_KIND = {
    **dict.fromkeys(("maps", "matrices"), (shape([8, 6], [2, 3]), "accepted: 3 layers")),
    "predictor": (shape([8, 6, 60000], [2, 3, 3]), r"tensor 'out': .*accepted: F16 \[3, 60000, 3\]"),
}


@pytest.mark.parametrize("kind", ["maps", "matrices", "reuse", "predictor"])
def test_a_header_that_lies_is_refused(tmp_path: Path, kind: str) -> None:
    learned, path = KINDS[kind](), tmp_path / "a.learned"
    for texts, expected in [*BAD_HEADERS.values(), *([OF_A_KIND[kind]] if kind in OF_A_KIND else [])]:
        forged(path, learned, **texts)
        message = refusal(path, fresh(learned), identity=None)
        assert re.search(expected, message), (expected, message)


@pytest.mark.parametrize("kind", [MapStore, Matrices])
def test_a_small_file_does_not_take_all_memory(tmp_path: Path, kind: Any) -> None:
    path = forged(tmp_path / "a.learned", kind(ModelShape((8,), (1,)), 10), **shape([65000] * 4096, [1] * 4096))
    assert re.search("capacity=[0-9]+: [a-z]+ of [0-9]+ bytes; at most", refusal(path, kind, identity=None))


def test_more_than_the_policy_has_room_for_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, make_store())
    assert "tensor 'born': I64 [15]; accepted: I64 [0 to 14]" in refusal(path, MapStore(SHAPE, 14))
    path = saved(tmp_path, make_matrices())
    assert "tensor 'decode_born': I64 [6]; accepted: I64 [0 to 5]" in refusal(path, Matrices(SHAPE, 5))


BAD_TENSORS: dict[str, dict[str, tuple[Any, str]]] = {
    "maps": {
        "NaN": (setting("maps", (1, 3, 2), np.nan), r"tensor 'maps': \[1, 3, 2\]: nan; accepted: 0 to 1.001"),
        "infinite": (setting("maps", (0, 0, 0), np.inf), r"\[0, 0, 0\]: inf"),
        "below 0": (setting("maps", (2, 14, 7), -0.25), r"\[2, 14, 7\]: -0.25"),
        "born before": (setting("born", 1, -4), r"tensor 'born': \[1\]: -4"),
        "born late": (setting("born", 1, (1 << 63) - 1), r"tensor 'born': \[1\]: 9223372036854775807"),
        "long embedding": (setting("embeddings", (4, 0), 30), r"tensor 'embeddings': \[4, 0\]: 30"),
        "short": (lambda t: t.update(requests=t["requests"][1:]), r"'requests': I64 \[14\]; accepted: I64 \[15\]"),
        "missing": (lambda t: t.pop("requests"), "tensor 'requests': missing"),
        "unknown": (lambda t: t.update(more=t["born"]), "tensor 'more': unknown"),
        "dtype": (lambda t: t.update(maps=t["maps"].astype(np.float16)), "tensor 'maps': F16 .*accepted: F32"),
        "dimensions": (lambda t: t.update(maps=t["maps"][0]), "tensor 'maps': F32 .*accepted: F32"),
        "no embedding": (lambda t: t.update(embeddings=t["embeddings"][:, :0]), r"F32 \[15, 0\]; .* 1 to 1048576"),
    },
    "matrices": {
        "below 0": (setting("decode", (2, 1, 3), -1), r"'decode': \[2, 1, 3\]: -1; accepted: 0 to"),
        "too many": (setting("prefill", (0, 0, 0), 1 << 25), r"\[0, 0, 0\]: 33554432; accepted: 0 to"),
        "born before": (setting("prefill_born", 1, -4), "tensor 'prefill_born'"),
        "short": (lambda t: t.update(decode=t["decode"][1:]), r"'decode': I32 .*accepted: I32 \[6, 3, 8\]"),
        "missing": (lambda t: t.pop("prefill"), "tensor 'prefill': missing"),
    },
    "reuse": {
        "NaN": (setting("weights", 7, np.nan), r"tensor 'weights': \[7\]: nan; accepted: -1e"),
        "far too large": (setting("weights", 9, -3e6), r"tensor 'weights': \[9\]: -3000000"),
        "no share": (setting("mean", 2, 1.5), r"tensor 'mean': \[2\]: 1.5; accepted: 0 to 1"),
        "tokens": (setting("tokens", 1, -4), r"tensor 'tokens': \[1\]: -4; accepted: 0 to"),
        "too many tokens": (setting("tokens", 1, 1 << 60), r"tensor 'tokens': \[1\]: 1152921504606846976"),
        "short": (lambda t: t.update(weights=t["weights"][1:]), r"'weights': F32 .*accepted: F32 \[484\]"),
        "missing": (lambda t: t.pop("mean"), "tensor 'mean': missing"),
    },
    "predictor": {
        "NaN": (setting("bias", (0, 1), np.nan), r"tensor 'bias': \[0, 1\]: nan"),
        "twice": (setting("target", 1, 1), r"network 1: of layers \(0, 1\): twice, or of no use"),
        "of no use": (setting("source", 2, 2), r"network 2: of layers \(2, 2\)"),
        "no hidden": (lambda t: t.pop("hidden"), "tensor 'hidden'"),
        "missing": (lambda t: t.pop("direct"), "tensor 'direct': missing"),
        "starts": (setting("starts", 1, 2), "tensor 'starts': .*must not be behind"),
        "few starts": (lambda t: t.update(starts=t["starts"][1:]), r"'starts': I32 \[2\]; accepted: I32 \[3\]"),
        "no distances": (lambda t: t.update(distances=t["distances"][:0]), r"accepted: I32 \[1 to 64\]"),
        "distances": (lambda t: t.update(distances=np.ones(99, np.int32)), r"accepted: I32 \[1 to 64\]"),
    },
}


@pytest.mark.parametrize("kind", BAD_TENSORS)
def test_numbers_that_nobody_learns_are_refused(tmp_path: Path, kind: str) -> None:
    """And what does not lie is accepted, so that the refusals are for what they say."""
    learned, path = KINDS[kind](), tmp_path / "a.learned"
    for change, expected in BAD_TENSORS[kind].values():
        message = refusal(forged(path, learned, change), fresh(learned))
        assert re.search(expected, message), (expected, message)
    assert_same_state(read_learned(forged(path, learned), fresh(learned), identity=IDENTITY).learned, learned)


def test_a_network_that_is_missing_is_seen(tmp_path: Path) -> None:
    fewer = {pair: mlp for pair, mlp in weights().mlps.items() if pair != (1, 2)}
    path = saved(tmp_path, replace(weights(), mlps=fewer))
    assert "tensor 'distances': 1: a network for it is missing" in refusal(path, LearnedWeights)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", WHILE_RUNNING)
def test_no_mutation_crashes(tmp_path: Path, name: str) -> None:
    """Whatever bytes change: the file is refused, or what is loaded can be used and saved."""
    learned = KINDS[name]()
    path = saved(tmp_path, learned)
    num_loaded = 0
    for number, changed in enumerate(mutations(path.read_bytes(), 200)):
        path.write_bytes(changed)
        try:
            loaded = read_learned(path, fresh(learned)).learned
        except StoreError:
            continue
        num_loaded += 1
        if isinstance(loaded, MapStore):
            add_random(loaded, 3, number, None, first_request=100)
        elif isinstance(loaded, Matrices):
            for counts in np.random.default_rng(number).integers(0, 9, (3, *loaded.decode.total.shape)):
                counts[:, min(loaded.shape.num_experts) :] = 0
                loaded.decode.add(counts)
        else:
            for layer in [*range(len(LAYERS))] * 5:
                loaded.observe(one_token(layer, [1, 2]))
            assert np.isfinite(loaded.worth()).all()
        save_learned(path, loaded, IDENTITY)
    assert 10 < num_loaded < 175


# -- how it is written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHILE_RUNNING)
def test_numbers_that_nobody_learns_are_not_saved(tmp_path: Path, name: str) -> None:
    learned: Any = KINDS[name]()
    path = saved(tmp_path, learned)
    before = path.read_bytes()
    spoiled = {"maps": "maps", "matrices": "decode.columns", "reuse": "_mean"}[name].split(".")
    array = learned
    for attribute in spoiled:
        array = getattr(array, attribute)
    array.flat[0] = np.nan
    with pytest.raises(StoreError, match=r"a\.learned: tensor '(maps|decode|mean)': .*nan"):
        save_learned(path, learned, IDENTITY)
    assert path.read_bytes() == before


def test_a_disk_that_is_full_or_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with tiny_disk(tmp_path) as disk:
        path = saved(disk, make_store())
        with pytest.raises(StoreError, match="the disk is full"):
            save_learned(path, make_store(3000, 3000), IDENTITY)
        assert_same_state(read_learned(path, MapStore).learned, make_store())
        assert [file.name for file in disk.iterdir()] == ["a.learned"]
    with pytest.raises(StoreError, match=r"absent: writing a\.maps failed: No such file"):
        save_learned(tmp_path / "absent" / "a.maps", make_store(), IDENTITY)
