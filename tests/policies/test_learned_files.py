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
from expertly.policies.fmoe import MapStore
from expertly.policies.learned import LearnedState, ModelShape, read_learned, save_learned
from expertly.policies.moe_infinity import Matrices
from expertly.policies.promoe import LearnedWeights
from expertly.policies.reuse import MEANING, ReuseModel
from tests.policies.learned_builders import (
    IDENTITY,
    SHAPE,
    add_random,
    assert_same,
    assert_same_state,
    forged_as,
    fresh,
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


def refusal(path: Path, *accepted: Any, identity: str | None = IDENTITY) -> str:
    with pytest.raises(StoreError) as caught:
        read_learned(path, *accepted, identity=identity)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 600
    return message


@pytest.mark.parametrize("name", [*KINDS, *MORE])
def test_a_saved_state_is_read_back(tmp_path: Path, name: str) -> None:
    learned = (KINDS | MORE)[name]()
    path = saved(tmp_path, learned)
    found = read_learned(path, fresh(learned), identity=IDENTITY)
    assert_same_state(found.learned, learned)
    assert found.learned.num_learned == learned.num_learned
    assert (found.identity, found.about) == (IDENTITY, {"source": "a test", "tokens": 3})
    assert (found.path, found.nbytes) == (path, path.stat().st_size)
    assert [file.name for file in tmp_path.iterdir()] == ["a.learned"]
    if name != "maps" and "map" not in name:  # whose requests are numbered anew
        whole = path.read_bytes()
        save_learned(path, found.learned, IDENTITY, found.about)
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
    other = load_maps(saved(tmp_path, store), like=store)
    for seed in range(3):
        add_random(store, 4, seed, first_request=1000 + seed)
        add_random(other, 4, seed, first_request=1000 + seed)
        assert_same(other, store)
    model = taught(200)
    again = ReuseModel(SHAPE.geometry())
    read_learned(saved(tmp_path, model), again)
    for one in (model, again):
        for layer in range(len(LAYERS)):
            one.observe(one_token(layer, [1, 2]))
    assert again.num_learned == model.num_learned == 201


def test_requests_of_a_file_are_none_of_a_running_model(tmp_path: Path) -> None:
    made, loaded = make_store(), load_maps(saved(tmp_path, make_store()))
    assert set(loaded.requests[: loaded.num_maps].tolist()) == {-1, -2, -3, -4}
    of_first = [
        store.maps[:, : store.num_maps][:, store.requests[: store.num_maps] == n]
        for store, n in ((made, 0), (loaded, -1))
    ]
    np.testing.assert_array_equal(*of_first)
    assert_same(load_maps(saved(tmp_path, loaded)), loaded)


@pytest.mark.parametrize("name", KINDS)
def test_another_kind_or_model_is_refused(tmp_path: Path, name: str) -> None:
    learned = KINDS[name]()
    path = saved(tmp_path, learned)
    other = refusal(path, fresh(learned), identity="5" * 64)
    assert "identity='4444" in other and "another model" in other and "accepted: '5555" in other
    if not isinstance(learned, LearnedWeights):  # which are made for any model
        smaller = {"maps": MapStore, "matrices": Matrices}.get(learned.kind, lambda one: ReuseModel(one.geometry()))
        other = refusal(path, smaller(ModelShape((8, 6), (2, 3))))
        assert "shape: of 3 layers of 6 to 8 experts" in other and "accepted: 2 layers" in other
    for wrong in {one.kind: one for one in (make_store(0), make_matrices(0, 0), taught(0), LearnedWeights)}.values():
        if wrong.kind != learned.kind:
            message = refusal(path, wrong)
            assert f"format='expertly-{learned.kind}'" in message and f"accepted: 'expertly-{wrong.kind}'" in message
            assert read_learned(path, wrong, fresh(learned)).identity == IDENTITY
    save_learned(path, learned, "trace:toy")
    assert ("--model` names it" in refusal(path, fresh(learned))) == bool(learned.made_by)


@pytest.mark.parametrize("name", KINDS)
def test_every_cut_is_noticed(tmp_path: Path, name: str) -> None:
    learned = KINDS[name]()
    path = saved(tmp_path, learned)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    entries = json.loads(whole[8 : 8 + length])
    del entries["__metadata__"]
    edges = [0, 7, 8, 8 + length]
    edges += [8 + length + offset for entry in entries.values() for offset in entry["data_offsets"]]
    for place in sorted({max(0, edge + step) for edge in edges for step in (-1, 0, 1)}):
        if place < len(whole):
            path.write_bytes(whole[:place])
            refusal(path, fresh(learned), identity=None)
    path.write_bytes(whole + b"\0")
    refusal(path, fresh(learned), identity=None)
    path.write_bytes(whole)
    assert_same_state(read_learned(path, fresh(learned)).learned, learned)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "absent", MapStore)
    (tmp_path / "huge").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    assert "header length 1099511627776: more than" in refusal(tmp_path / "huge", MapStore)
    with (tmp_path / "large").open("wb") as file:
        file.truncate((1 << 36) + 1)
    assert "68719476737 bytes; accepted: 68719476736" in refusal(tmp_path / "large", MapStore)
    assert "a folder; must be a file" in refusal(tmp_path, MapStore)
    os.mkfifo(tmp_path / "pipe")
    assert "a pipe; must be a file" in refusal(tmp_path / "pipe", MapStore), (
        "which would wait for somebody to write into it"
    )


def shape(num_experts: list[Any], top_k: list[Any]) -> dict[str, str | None]:
    return {"shape": json.dumps({"num_experts": num_experts, "top_k": top_k})}


OF_ALL: dict[str, tuple[dict[str, str | None], str]] = {
    "format": ({"format": "pt"}, "format='pt'.*accepted: 'expertly-"),
    "no format": ({"format": None}, "format=None"),
    "version": ({"version": "1"}, "version='1': accepted: 2"),
    "no identity": ({"identity": ""}, "identity=''"),
    "shape": ({"shape": "[]"}, "shape='\\[\\]': must be a JSON object"),
    "shape lists": (shape([8, 6, 8], [2, 3]), "model shape: .*must be as many"),
    "shape of nothing": (shape([], []), "model shape: .*1 to 4096 layers"),
    "shape numbers": (shape([8, 6, True], [2, 3, 1]), "shape=.*whole numbers"),
    "shape below 0": (shape([8, 6, -8], [2, 3, 1]), r"num_experts=\[8, 6, -8\], top_k=\[2, 3, 1\]: must be"),
    "shape top-k": (shape([8, 6, 8], [2, 7, 3]), r"top_k=\[2, 7, 3\]: must be 1 <= top_k <= experts"),
    "about": ({"about": "3"}, "about='3': must be a JSON object"),
    "about deep": ({"about": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"}, "about"),
    "about long": ({"about": json.dumps({"a": "x" * 5000})}, "about: a: 5000 characters; accepted: 4096"),
    "no settings": ({"settings": None}, "settings=None: must be a JSON object"),
    "settings": ({"settings": '{"size": 3}'}, "settings=.*learned otherwise; accepted: {"),
}
BAD_HEADERS: dict[str, dict[str, tuple[dict[str, str | None], str]]] = {
    "maps": {**OF_ALL, "other shape": (shape([8, 6], [2, 3]), "accepted: 3 layers")},
    "matrices": {**OF_ALL, "other shape": (shape([8, 6], [2, 3]), "accepted: 3 layers")},
    "reuse": {
        **OF_ALL,
        "meaning": ({"settings": json.dumps(dict(MEANING) | {"horizon": 9})}, "settings=.*accepted: .*.horizon.: 8"),
    },
    "predictor": {
        **OF_ALL,
        "greedy": (shape([8, 6, 60000], [2, 3, 3]), r"tensor 'out': .*accepted: F16 \[3, 60000, 3\]"),
    },
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, bad in BAD_HEADERS.items() for name in bad])
def test_a_header_that_lies_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    texts, expected = BAD_HEADERS[kind][name]
    learned = KINDS[kind]()
    path = forged_as(tmp_path / "a.learned", learned, **texts)
    assert re.search(expected, refusal(path, fresh(learned), identity=None))


@pytest.mark.parametrize("kind", [MapStore, Matrices])
def test_a_small_file_does_not_take_all_memory(tmp_path: Path, kind: Any) -> None:
    path = forged_as(tmp_path / "a.learned", kind(ModelShape((8,), (1,)), 10), **shape([65000] * 4096, [1] * 4096))
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


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, bad in BAD_TENSORS.items() for name in bad])
def test_numbers_that_nobody_learns_are_refused(tmp_path: Path, kind: str, name: str) -> None:
    change, expected = BAD_TENSORS[kind][name]
    learned = KINDS[kind]()
    path = forged_as(tmp_path / "a.learned", learned, change)
    assert re.search(expected, refusal(path, fresh(learned)))


def test_a_network_that_is_missing_is_seen(tmp_path: Path) -> None:
    fewer = {pair: mlp for pair, mlp in weights().mlps.items() if pair != (1, 2)}
    path = saved(tmp_path, replace(weights(), mlps=fewer))
    assert "tensor 'distances': 1: a network for it is missing" in refusal(path, LearnedWeights)


@pytest.mark.parametrize("name", KINDS)
def test_a_forged_file_that_does_not_lie_is_accepted(tmp_path: Path, name: str) -> None:
    """So that the refusals above are for what they say."""
    learned = KINDS[name]()
    path = forged_as(tmp_path / "a.learned", learned)
    assert_same_state(read_learned(path, fresh(learned), identity=IDENTITY).learned, learned)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["maps", "matrices", "reuse"])
def test_no_mutation_crashes(tmp_path: Path, name: str) -> None:
    """Whatever bytes change: the file is refused, or what is loaded can be used and saved."""
    learned = KINDS[name]()
    path = saved(tmp_path, learned)
    num_loaded = 0
    for number, changed in enumerate(mutations(path.read_bytes(), 200)):
        path.write_bytes(changed)
        try:
            found = read_learned(path, fresh(learned)).learned
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
        learned.decode.columns[0, 0, 0] = np.nan
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
        assert_same(load_maps(path, IDENTITY), make_store())
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
            found = read_learned(path, MapStore, identity=IDENTITY)
            assert_same(found.learned, stores[int(found.about["number"])])
        assert {file.name for file in tmp_path.iterdir()} <= {"a.maps", ".a.maps.tmp"}
    save_learned(path, stores[0], IDENTITY)
    assert_same(load_maps(path, IDENTITY), stores[0])
    assert [file.name for file in tmp_path.iterdir()] == ["a.maps"], "the next save clears up"
