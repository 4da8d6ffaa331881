"""A file of what was learned, of every kind: what comes back, and that anything else is refused."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from expertly.core.errors import StoreError
from expertly.policies.eviction.reuse import MEANING, ReuseModel
from expertly.policies.learned import LearnedState, ModelShape, read_learned, save_learned
from expertly.policies.predictor.eam.matrices import Matrices
from expertly.policies.predictor.fmoe.store import MapStore
from expertly.policies.predictor.learned import LearnedWeights
from tests.policies.learned_builders import (
    IDENTITY,
    SHAPE,
    add_random,
    assert_same,
    assert_same_state,
    forged_as,
    load_maps,
    make_matrices,
    make_store,
    mutations,
    setting,
    taught,
)
from tests.scheduler.drive import one_token
from tests.store.mounts import tiny_disk
from tests.weights import random_weights

LAYERS = SHAPE.geometry().layers


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


def saved(folder: Path, learned: LearnedState) -> Path:
    save_learned(folder / "a.learned", learned, IDENTITY, {"source": "a test", "tokens": 3})
    return folder / "a.learned"


def refusal(
    path: Path, kind: type[LearnedState], identity: str | None = IDENTITY, shape: ModelShape | None = SHAPE
) -> str:
    with pytest.raises(StoreError) as caught:
        read_learned(path, kind, identity=identity, shape=shape)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 600
    return message


@pytest.mark.parametrize("name", [*KINDS, *MORE])
def test_a_saved_state_is_read_back(tmp_path: Path, name: str) -> None:
    learned = (KINDS | MORE)[name]()
    path = saved(tmp_path, learned)
    found = read_learned(path, type(learned), identity=IDENTITY, shape=learned.shape)
    assert_same_state(found.learned, learned)
    assert found.learned.num_learned == learned.num_learned
    assert (found.header.identity, dict(found.header.about)) == (IDENTITY, {"source": "a test", "tokens": 3})
    assert (found.path, found.nbytes) == (path, path.stat().st_size)
    assert [file.name for file in tmp_path.iterdir()] == ["a.learned"]
    if name != "maps" and "map" not in name:  # whose requests are numbered anew
        whole = path.read_bytes()
        save_learned(path, found.learned, IDENTITY, found.header.about)
        assert path.read_bytes() == whole


@pytest.mark.parametrize("name", KINDS)
def test_the_safetensors_library_reads_it(tmp_path: Path, name: str) -> None:
    learned = KINDS[name]()
    state, tensors = learned.state(), load_file(saved(tmp_path, learned))
    assert state is not None and tensors.keys() == state.keys()
    for tensor, array in tensors.items():
        np.testing.assert_array_equal(array.astype(state[tensor].dtype), state[tensor])


def test_learning_continues_from_a_file_as_without_it(tmp_path: Path) -> None:
    store = make_store(60)
    other = load_maps(saved(tmp_path, store))
    for seed in range(3):
        add_random(store, 4, seed, first_request=1000 + seed)
        add_random(other, 4, seed, first_request=1000 + seed)
        assert_same(other, store)
    model = taught(200)
    again = read_learned(saved(tmp_path, model), ReuseModel).learned
    for one in (model, again):
        for layer in range(len(LAYERS)):
            one.observe(one_token(layer, [1, 2]))
    assert again.num_learned == model.num_learned == 201


def test_requests_of_a_file_are_none_of_a_running_model(tmp_path: Path) -> None:
    made, loaded = make_store(), load_maps(saved(tmp_path, make_store()))
    assert set(loaded.requests[: loaded.num_maps].tolist()) == {-1, -2, -3, -4}
    of_first = [
        store.chosen[: store.num_maps][store.requests[: store.num_maps] == n] for store, n in ((made, 0), (loaded, -1))
    ]
    np.testing.assert_array_equal(*of_first)
    assert_same(load_maps(saved(tmp_path, loaded)), loaded)


@pytest.mark.parametrize("name", KINDS)
def test_another_kind_or_model_is_refused(tmp_path: Path, name: str) -> None:
    learned = KINDS[name]()
    path, kind = saved(tmp_path, learned), type(learned)
    assert "identity='4444" in refusal(path, kind, "5" * 64) and "another model" in refusal(path, kind, "5" * 64)
    other = refusal(path, kind, shape=ModelShape((8, 6), (2, 3)))
    assert "shape: of 3 layers of 6 to 8 experts" in other and "expected 2 layers" in other
    for wrong in {MapStore, Matrices, ReuseModel, LearnedWeights} - {kind}:
        assert f"format='expertly-{learned.kind}'" in refusal(path, wrong)
        assert f"accepted: 'expertly-{wrong.kind}'" in refusal(path, wrong)
        assert read_learned(path, wrong, kind).header.identity == IDENTITY
    save_learned(path, learned, "trace:toy")
    assert ("--model` names it" in refusal(path, kind)) == bool(kind.made_by)


@pytest.mark.parametrize("name", KINDS)
def test_every_cut_and_every_flipped_byte_is_noticed(tmp_path: Path, name: str) -> None:
    learned = KINDS[name]()
    path = saved(tmp_path, learned)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    used, dice = 8 + len(whole[8 : 8 + length].rstrip()), random.Random(0)
    every = 1 if name == "maps" else 7  # byte of the header
    places = [8 * byte + dice.randrange(8) for byte in range(0, used, every)]
    for place in [*places, *(dice.randrange(8 * used, 8 * len(whole)) for _ in range(60))]:
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        refusal(path, type(learned), None, None)
    entries = json.loads(whole[8 : 8 + length])
    del entries["__metadata__"]
    edges = [0, 7, 8, 8 + length]
    edges += [8 + length + offset for entry in entries.values() for offset in entry["data_offsets"]]
    for place in sorted({max(0, edge + step) for edge in edges for step in (-1, 0, 1)}):
        if place < len(whole):
            path.write_bytes(whole[:place])
            refusal(path, type(learned), None, None)
    path.write_bytes(whole + b"\0")
    refusal(path, type(learned), None, None)
    path.write_bytes(whole)
    assert_same_state(read_learned(path, type(learned)).learned, learned)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "absent", MapStore)
    assert "a folder; must be a file" in refusal(tmp_path, MapStore)
    os.mkfifo(tmp_path / "pipe")
    assert "a pipe; must be a file" in refusal(tmp_path / "pipe", MapStore), (
        "which would wait for somebody to write into it"
    )


def shape(num_experts: list[Any], top_k: list[Any], **others: list[int]) -> dict[str, str | None]:
    return {"shape": json.dumps({"num_experts": num_experts, "top_k": top_k, **others})}


STACKS = {"starts": [0, 0, 0], "distances": [1, 2]}
OF_ALL: dict[str, tuple[dict[str, str | None], str]] = {
    "format": ({"format": "pt"}, "format='pt'.*accepted: 'expertly-"),
    "no format": ({"format": None}, "format=None"),
    "version": ({"version": "2"}, "version='2': this version of expertly reads 1"),
    "no identity": ({"identity": ""}, "identity=''"),
    "checksum": ({"checksum": "1" * 8}, "checksum='11111111': the file was damaged or altered"),
    "no checksum": ({"checksum": None}, "checksum=None: must be eight"),
    "shape": ({"shape": "[]"}, "shape='\\[\\]': must be a JSON object"),
    "shape lists": (shape([8, 6, 8], [2, 3]), "shape=.*must be as many"),
    "shape of nothing": (shape([], []), "shape=.*1 to 4096 layers"),
    "shape numbers": (shape([8, 6, True], [2, 3, 1]), "shape=.*whole numbers"),
    "shape below 0": (shape([8, 6, -8], [2, 3, 1]), "num_experts must be whole numbers from 1"),
    "shape top-k": (shape([8, 6, 8], [2, 7, 3]), "shape=.*num_experts=6, top_k=7: must be 1 <= top_k <= experts"),
    "about": ({"about": "3"}, "about='3': must be a JSON object"),
}
PLAIN: dict[str, tuple[dict[str, str | None], str]] = {
    "about a list": ({"about": '{"a": [1]}'}, "about=.*texts and numbers"),
    "about NaN": ({"about": '{"a": NaN}'}, "about=.*texts and numbers"),
}
CAPACITY: dict[str, tuple[dict[str, str | None], str]] = {
    "small capacity": ({"capacity": "5"}, "capacity=5: must be at least (15, the maps|6, the matrices)"),
    "no capacity": ({"capacity": "0"}, "capacity=0: must be from 1 to"),
    "half": ({"capacity": "20.5"}, "capacity='20.5': must be a whole number"),
    "huge capacity": ({"capacity": "9" * 400}, "capacity='9+"),
}
BAD_HEADERS: dict[str, dict[str, tuple[dict[str, str | None], str]]] = {
    "maps": {
        **OF_ALL, **PLAIN, **CAPACITY,
        "weight": ({"semantic_weight": "nan"}, "semantic_weight='nan': must be a number"),
        "quota": ({"quota": "0"}, "quota=0.0: must be above 0, up to 1"),
        "other shape": (shape([8, 6], [2, 3]), "tensor 'chosen': U16 .* must be"),
    },
    "matrices": {**OF_ALL, **PLAIN, **CAPACITY, "other shape": (shape([8, 6], [2, 3]), "tensor 'prefill': I32")},
    "reuse": {
        **OF_ALL, **PLAIN,
        "meaning": ({"meaning": json.dumps(dict(MEANING) | {"horizon": 9})}, "meaning=.*another version of expertly"),
        "no meaning": ({"meaning": None}, "meaning=None: must be a JSON object"),
        "greedy": (shape([65000] * 8, [1] * 8), "shape=.*weights of 135200000000 bytes; at most"),
    },
    "predictor": {
        **OF_ALL,
        "starts": (shape([8, 6, 8], [2, 3, 3], **STACKS | {"starts": [0, 0, 3]}), "starts must not be behind"),
        "few starts": (shape([8, 6, 8], [2, 3, 3], **STACKS | {"starts": [0]}), "as many layers as num_experts"),
        "no distances": (shape([8, 6, 8], [2, 3, 3], **STACKS | {"distances": []}), "1 to 64 distances"),
        "distances": (shape([8, 6, 8], [2, 3, 3], **STACKS | {"distances": [*range(1, 99)]}), "1 to 64 distances"),
        "greedy": (shape([8, 6, 60000], [2, 3, 3], **STACKS), r"must be F16 \[3, 60000, 3\]"),
    },
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, bad in BAD_HEADERS.items() for name in bad])
def test_a_header_that_lies_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    texts, expected = BAD_HEADERS[kind][name]
    learned = KINDS[kind]()
    path = forged_as(tmp_path / "a.learned", learned, **texts)
    assert re.search(expected, refusal(path, type(learned), None, None))


@pytest.mark.parametrize("kind", [MapStore, Matrices])
def test_a_small_file_does_not_take_all_memory(tmp_path: Path, kind: Any) -> None:
    path = forged_as(tmp_path / "a.learned", kind(ModelShape((9000,) * 4, (1,) * 4), 10), capacity="1000000")
    assert re.search("capacity=1000000: [a-z]+ of [0-9]+ bytes; at most", refusal(path, kind, None, None))


BAD_TENSORS: dict[str, dict[str, tuple[Any, str]]] = {
    "maps": {
        "NaN": (setting("maps", (1, 3, 2), np.nan), "tensor 'maps': map 3, layer 1, expert 2: nan"),
        "infinite": (setting("maps", (0, 0, 0), np.inf), "expert 0: inf; must be a probability"),
        "above 1": (setting("maps", (2, 14, 7), 1.5), "map 14, layer 2, expert 7: 1.5"),
        "below 0": (setting("maps", (2, 14, 7), -0.25), "expert 7: -0.25; must be a probability"),
        "no such expert": (setting("maps", (1, 0, 6), 0.5), "layer 1, expert 6: 0.5; must be 0: the layer has fewer"),
        "sum": (setting("maps", (0, 5), 0.75), "map 5, layer 0: 6.0; must be at most 1, the sum"),
        "chosen": (
            setting("chosen", (2, 1, 0), 6),
            "tensor 'chosen': map 2, layer 1: \\[6, .*at most as many experts",
        ),
        "chosen twice": (setting("chosen", (2, 0), [4, 4, 0xFFFF]), "map 2, layer 0: \\[4, 4, 65535\\]"),
        "too many chosen": (setting("chosen", (2, 0), [4, 5, 6]), "at most as many experts of the layer as it chooses"),
        "born twice": (setting("born", 1, 0), "tensor 'born'"),
        "born before": (setting("born", 1, -4), "tensor 'born'"),
        "long embedding": (setting("embeddings", (4, 0), 30), "tensor 'embeddings': map 4: 30.*; must be of length 1"),
        "endless embedding": (
            setting("embeddings", (4, 0), np.nan),
            "tensor 'embeddings': map 4: nan; must be of length 1",
        ),
        "short": (lambda t: t.update(requests=t["requests"][1:]), "tensor 'requests': I64 \\[14\\]; must be I64 \\[15"),
        "missing": (lambda t: t.pop("chosen"), "tensor 'chosen': missing"),
        "no count": (lambda t: t.pop("born"), "tensor 'born': missing"),
        "unknown": (lambda t: t.update(more=t["born"]), "tensor 'more': unknown"),
        "dtype": (lambda t: t.update(maps=t["maps"].astype(np.float32)), "tensor 'maps': F32 .*must be F16"),
        "no embedding": (lambda t: t.update(embeddings=t["embeddings"][:, :0]), "tensor 'embeddings': 0 numbers each"),
    },
    "matrices": {
        "below 0": (setting("decode", (2, 1, 3), -1), "'decode': matrix 2, layer 1, expert 3: -1; must be a count"),
        "too many": (setting("prefill", (0, 0, 0), 1 << 25), "expert 0: 33554432; must be a count of tokens"),
        "no such expert": (setting("decode", (0, 1, 6), 1), "layer 1, expert 6: 1; must be 0: the layer has fewer"),
        "empty": (setting("decode", 3, 0), "tensor 'decode': matrix 3: 0; must be above 0, the tokens"),
        "born twice": (setting("decode_born", 1, 0), "tensor 'decode_born': must count"),
        "born before": (setting("prefill_born", 1, -4), "tensor 'prefill_born'"),
        "short": (lambda t: t.update(decode=t["decode"][1:]), "tensor 'decode': I32 .*must be I32 \\[6, 3, 8\\]"),
        "missing": (lambda t: t.pop("prefill"), "tensor 'prefill': missing"),
        "no count": (lambda t: t.pop("decode_born"), "tensor 'decode_born': missing"),
    },
    "reuse": {
        "NaN": (setting("weights", 7, np.nan), "tensor 'weights': number 7: nan; must be a weight, -1e"),
        "infinite": (setting("weights", 9, np.inf), "tensor 'weights': number 9: inf"),
        "far too large": (setting("weights", 9, -3e6), "tensor 'weights': number 9: -3000000"),
        "no share": (setting("mean", 2, 1.5), "tensor 'mean': number 2: 1.5; must be a share of tokens, 0 to 1"),
        "no mean": (setting("mean", 0, np.nan), "tensor 'mean': number 0: nan"),
        "tokens": (setting("tokens", 1, -4), "tensor 'tokens': number 1: -4; must be a number of tokens, 0 to"),
        "too many tokens": (setting("tokens", 1, 1 << 60), "tensor 'tokens': number 1: 1152921504606846976"),
        "short": (lambda t: t.update(weights=t["weights"][1:]), "tensor 'weights': F32 .*must be F32 \\[484\\]"),
        "missing": (lambda t: t.pop("mean"), "tensor 'mean': missing"),
    },
    "predictor": {
        "NaN": (setting("bias", (0, 1), np.nan), "tensor 'bias': holds a number that is not finite"),
        "twice": (setting("target", 1, 1), r"network 1: of layers \(0, 1\): twice, or of no use"),
        "of no use": (setting("source", 2, 2), r"network 2: of layers \(2, 2\)"),
        "no hidden": (lambda t: t.pop("hidden"), "tensor 'hidden'"),
        "missing": (lambda t: t.pop("direct"), "tensor 'direct': missing"),
    },
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, bad in BAD_TENSORS.items() for name in bad])
def test_numbers_that_nobody_learns_are_refused(tmp_path: Path, kind: str, name: str) -> None:
    change, expected = BAD_TENSORS[kind][name]
    learned = KINDS[kind]()
    path = forged_as(tmp_path / "a.learned", learned, change)
    assert re.search(expected, refusal(path, type(learned)))


def test_a_network_that_is_missing_is_seen(tmp_path: Path) -> None:
    fewer = {pair: mlp for pair, mlp in weights().mlps.items() if pair != (1, 2)}
    path = saved(tmp_path, replace(weights(), mlps=fewer))
    assert "distances=1: a network for it is missing" in refusal(path, LearnedWeights)


@pytest.mark.parametrize("name", KINDS)
def test_a_forged_file_that_does_not_lie_is_accepted(tmp_path: Path, name: str) -> None:
    """So that the refusals above are for what they say."""
    learned = KINDS[name]()
    path = forged_as(tmp_path / "a.learned", learned)
    assert_same_state(read_learned(path, type(learned), identity=IDENTITY, shape=SHAPE).learned, learned)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["maps", "matrices", "reuse"])
def test_no_mutation_that_has_the_right_checksum_crashes(tmp_path: Path, name: str) -> None:
    """Whatever bytes change: the file is refused, or what is loaded can be used and saved."""
    learned = KINDS[name]()
    path = saved(tmp_path, learned)
    num_loaded = 0
    for number, changed in enumerate(mutations(path.read_bytes(), 200)):
        path.write_bytes(changed)
        try:
            found = read_learned(path, type(learned), shape=SHAPE if name == "reuse" else None).learned
        except StoreError:
            continue
        num_loaded += 1
        if isinstance(found, MapStore):
            add_random(found, 3, number, None, first_request=100)
        elif isinstance(found, Matrices):
            for counts in np.random.default_rng(number).integers(0, 9, (3, *found.decode.total.shape)):
                counts[:, min(found.shape.num_experts) :] = 0
                found.decode.add(counts)
        elif isinstance(found, ReuseModel):
            for _ in range(5):
                for layer in range(len(LAYERS)):
                    found.observe(one_token(layer, [1, 2]))
            assert np.isfinite(found.worth()).all()
        save_learned(path, found, IDENTITY)
    assert 10 < num_loaded < 175


def spoiled(name: str) -> LearnedState:
    learned = KINDS[name]()
    if isinstance(learned, MapStore):
        learned.maps[0, 0, 0] = np.nan
    elif isinstance(learned, Matrices):
        learned.decode.matrices[0, 0, 0] = np.nan
    elif isinstance(learned, ReuseModel):
        learned._mean[0] = np.nan
    return learned


@pytest.mark.parametrize("name", ["maps", "matrices", "reuse"])
def test_numbers_that_nobody_learns_are_not_saved(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, KINDS[name]())
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"a\.learned: tensor '(maps|decode|mean)': .*nan"):
        save_learned(path, spoiled(name), IDENTITY)
    assert path.read_bytes() == before


def test_a_disk_that_is_full_or_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with tiny_disk(tmp_path) as disk:
        path = saved(disk, make_store())
        with pytest.raises(StoreError, match="the disk is full"):
            save_learned(path, make_store(3000, 3000), IDENTITY)
        assert_same(load_maps(path, IDENTITY, SHAPE), make_store())
        assert [file.name for file in disk.iterdir()] == ["a.learned"]
    with pytest.raises(StoreError, match=r"absent: writing a\.maps failed: No such file"):
        save_learned(tmp_path / "absent" / "a.maps", make_store(), IDENTITY)


def test_a_killed_save_leaves_a_whole_file_or_none(tmp_path: Path) -> None:
    path = tmp_path / "a.maps"
    stores = [make_store(200 + 150 * number, 1000, seed=number, hidden_size=64) for number in range(3)]
    dice = random.Random(0)
    for _ in range(6):
        child = os.fork()
        if child == 0:
            try:
                for step in range(2000):
                    save_learned(path, stores[step % 3], IDENTITY, {"number": step % 3})
            finally:
                os._exit(1)
        time.sleep(dice.uniform(0, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if path.exists():
            found = read_learned(path, MapStore, identity=IDENTITY, shape=SHAPE)
            assert_same(found.learned, stores[int(found.header.about["number"] or 0)])
        assert {file.name for file in tmp_path.iterdir()} <= {"a.maps", ".a.maps.tmp"}
    save_learned(path, stores[0], IDENTITY)
    assert_same(load_maps(path, IDENTITY), stores[0])
    assert [file.name for file in tmp_path.iterdir()] == ["a.maps"], "the next save clears up"
