"""A maps file holds what was saved, and is refused when it is anything else."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from expertly.core.errors import StoreError
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.fmoe.store import MapStore
from expertly.policies.state.file import DTYPES, MapsFile, load_maps, save_maps
from expertly.policies.state.header import MapsHeader
from expertly.policies.state.sealed import NO_CHECKSUM
from tests.policies.state.builders import (
    IDENTITY,
    SHAPE,
    add_random,
    assert_same,
    forged,
    make_store,
    mutations,
    setting,
)
from tests.store.mounts import tiny_disk

HEADER = MapsHeader(IDENTITY, SHAPE, 20, 0.25, 0.5, {})


def saved(folder: Path, store: MapStore | None = None) -> Path:
    save_maps(folder / "a.maps", store or make_store(), IDENTITY, {"source": "a test", "tokens": 3})
    return folder / "a.maps"


def refusal(path: Path, identity: str | None = IDENTITY, shape: ModelShape | None = SHAPE) -> str:
    with pytest.raises(StoreError) as error:
        load_maps(path, identity, shape)
    assert str(path) in str(error.value)
    return str(error.value)


def tensors_of(store: MapStore) -> dict[str, np.ndarray]:
    numpy_names = {"I64": np.int64, "U16": np.uint16, "F16": np.float16}
    return {name: store.state()[name].astype(numpy_names[dtype]) for name, dtype in DTYPES.items()}


def forged_maps(folder: Path, tensors: dict[str, np.ndarray], **metadata: str | None) -> Path:
    return forged(folder / "a.maps", tensors, HEADER.metadata(NO_CHECKSUM) | metadata)


@pytest.mark.parametrize(
    "store",
    [
        make_store(),
        make_store(60),
        make_store(hidden_size=None),
        make_store(1, capacity=1),
        make_store(0),
        MapStore(ModelShape((4,), (4,)), 7, semantic_weight=1.0, quota=1.0),
    ],
    ids=["some", "full", "no embeddings", "one", "none", "one layer"],
)
def test_what_was_saved_is_loaded(tmp_path: Path, store: MapStore) -> None:
    path = saved(tmp_path, store)
    found = MapsFile.read(path, IDENTITY, store.shape)
    assert_same(found.store, store)
    assert (found.header.identity, dict(found.header.about)) == (IDENTITY, {"source": "a test", "tokens": 3})
    assert found.nbytes == path.stat().st_size
    assert_same(load_maps(path), store)
    assert [file.name for file in tmp_path.iterdir()] == ["a.maps"]


def test_a_loaded_store_goes_on_as_the_saved_one(tmp_path: Path) -> None:
    store = make_store(60)
    other = load_maps(saved(tmp_path, store))
    for seed in range(3):
        add_random(store, 4, seed, first_request=1000 + seed)
        add_random(other, 4, seed, first_request=1000 + seed)
        assert_same(other, store)


def test_requests_of_a_file_are_none_of_a_running_model(tmp_path: Path) -> None:
    loaded = load_maps(saved(tmp_path))
    assert set(loaded.requests[: loaded.num_maps].tolist()) == {-1, -2, -3, -4}
    np.testing.assert_array_equal(loaded.request_counts(-1), make_store().request_counts(0))
    save_maps(tmp_path / "b.maps", loaded, IDENTITY)
    assert_same(load_maps(tmp_path / "b.maps"), loaded)


def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    store = make_store()
    tensors = load_file(saved(tmp_path, store))
    assert {name: str(array.dtype) for name, array in tensors.items()} == {
        "born": "int64", "requests": "int64", "chosen": "uint16", "maps": "float16", "embeddings": "float16",
    }  # fmt: skip
    np.testing.assert_array_equal(tensors["maps"].astype(np.float32), store.state()["maps"])
    np.testing.assert_array_equal(tensors["embeddings"].astype(np.float32), store.state()["embeddings"])


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert "identity='4444" in refusal(path, "5" * 64) and "another model" in refusal(path, "5" * 64)
    assert "3 layers of 6 to 8 experts" in refusal(path, IDENTITY, ModelShape((8, 6), (2, 3)))
    assert "shape" in refusal(path, IDENTITY, ModelShape((8, 6, 8), (2, 3, 4)))


@pytest.mark.parametrize("hidden_size", [5, None])
def test_a_flipped_bit_anywhere_is_refused(tmp_path: Path, hidden_size: int | None) -> None:
    path = saved(tmp_path, make_store(hidden_size=hidden_size))
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    used = 8 + len(whole[8 : 8 + length].rstrip())
    dice = random.Random(0)
    places = [8 * byte + dice.randrange(8) for byte in range(used)]  # every byte of the header
    places += [dice.randrange(8 * used, 8 * len(whole)) for _ in range(400)]
    for place in places:
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        refusal(path, None, None)
    path.write_bytes(whole)
    load_maps(path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    edges = [0, 7, 8, 8 + length]
    entries = json.loads(whole[8 : 8 + length])
    del entries["__metadata__"]
    edges += [8 + length + offset for entry in entries.values() for offset in entry["data_offsets"]]
    for place in sorted({max(0, edge + step) for edge in edges for step in (-1, 0, 1)}):
        if place < len(whole):
            path.write_bytes(whole[:place])
            refusal(path, None, None)
    path.write_bytes(whole + b"\0")
    assert "belong to no tensor" in refusal(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\0" * 5000, b"\xff" * 100, b"x" * 9000])
def test_what_is_no_maps_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.maps"
    path.write_bytes(content)
    refusal(path)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.maps")
    assert "cannot be read" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in refusal(tmp_path / "pipe"), "which would wait for somebody to write into it"


BAD_METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"format": "pt"}, "format='pt': not a file of expert maps"),
    "no format": ({"format": None}, "format=None"),
    "version": ({"version": "2"}, "version='2': this version of expertly reads 1"),
    "no identity": ({"identity": ""}, "identity=''"),
    "checksum": ({"checksum": "1" * 8}, "checksum='11111111': the file was damaged or altered"),
    "no checksum": ({"checksum": None}, "checksum=None: must be eight"),
    "capacity": ({"capacity": "14"}, "15 maps, more than the capacity=14"),
    "no capacity": ({"capacity": "0"}, "capacity='0': must be a whole number from 1"),
    "huge capacity": ({"capacity": "9999999"}, "capacity='9999999': must be"),
    "greedy capacity": (
        {"capacity": "1000000", "shape": json.dumps({"num_experts": [9000] * 4, "top_k": [1] * 4})},
        "capacity='1000000': a store of [0-9]+ bytes",
    ),
    "weight": ({"semantic_weight": "nan"}, "semantic_weight='nan': must be a number from 0 to 1"),
    "quota": ({"quota": "0"}, "quota='0': must be above 0"),
    "shape": ({"shape": "[]"}, "shape='\\[\\]': must be a JSON object"),
    "shape lists": ({"shape": '{"num_experts": [8, 6, 8], "top_k": [2, 3]}'}, "shape=.*must list"),
    "shape numbers": ({"shape": '{"num_experts": [8, 6, true], "top_k": [2, 3, 1]}'}, "shape=.*whole numbers"),
    "shape top-k": ({"shape": '{"num_experts": [8, 6, 8], "top_k": [2, 7, 3]}'}, "top_k must be at most num_experts"),
    "shape other": ({"shape": '{"num_experts": [8, 6], "top_k": [2, 3]}'}, "tensor 'chosen': U16 .* must be"),
    "about": ({"about": '{"a": [1]}'}, "about=.*texts and numbers"),
    "about NaN": ({"about": '{"a": NaN}'}, "about=.*texts and numbers"),
}


@pytest.mark.parametrize("name", BAD_METADATA)
def test_a_header_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    metadata, expected = BAD_METADATA[name]
    path = forged_maps(tmp_path, tensors_of(make_store()), **metadata)
    assert re.search(expected, refusal(path, None, None))


def test_a_forged_file_that_does_not_lie_is_accepted(tmp_path: Path) -> None:
    """So that the refusals above and below are for what they say."""
    assert_same(load_maps(forged_maps(tmp_path, tensors_of(make_store())), IDENTITY, SHAPE), make_store())


BAD_TENSORS = {
    "NaN": (setting("maps", (1, 3, 2), np.nan), "tensor 'maps': map 3, layer 1, expert 2: nan"),
    "infinite": (setting("maps", (0, 0, 0), np.inf), "expert 0: inf; must be a probability"),
    "above 1": (setting("maps", (2, 14, 7), 1.5), "map 14, layer 2, expert 7: 1.5"),
    "below 0": (setting("maps", (2, 14, 7), -0.25), "expert 7: -0.25; must be a probability"),
    "no such expert": (setting("maps", (1, 0, 6), 0.5), "layer 1, expert 6: 0.5; must be 0: there are 6 experts"),
    "sum": (setting("maps", (0, 5), 0.75), "map 5, layer 0: probabilities sum to 6.000"),
    "chosen": (setting("chosen", (2, 1, 0), 6), "tensor 'chosen': map 2, layer 1: \\[6, .*at most 3 of 6 experts"),
    "chosen twice": (setting("chosen", (2, 0), [4, 4, 0xFFFF]), "map 2, layer 0: \\[4, 4, 65535\\]"),
    "too many chosen": (setting("chosen", (2, 0), [4, 5, 6]), "at most 2 of 8 experts"),
    "born twice": (setting("born", 1, 0), "tensor 'born'"),
    "born before": (setting("born", 1, -4), "tensor 'born'"),
    "long embedding": (setting("embeddings", (4, 0), 30), "tensor 'embeddings': map 4: of length 30"),
    "endless embedding": (setting("embeddings", (4, 0), np.nan), "tensor 'embeddings': map 4: of length nan"),
    "short": (lambda t: t.update(requests=t["requests"][1:]), "tensor 'requests': I64 \\[14\\]; must be I64 \\[15\\]"),
    "missing": (lambda t: t.pop("chosen"), "tensor 'chosen': missing"),
    "no count": (lambda t: t.pop("born"), "tensor 'born': missing"),
    "unknown": (lambda t: t.update(more=t["born"]), "tensor 'more': unknown"),
    "dtype": (lambda t: t.update(maps=t["maps"].astype(np.float32)), "tensor 'maps': F32 .*must be F16"),
    "no embedding": (lambda t: t.update(embeddings=t["embeddings"][:, :0]), "tensor 'embeddings': 0 numbers each"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_numbers_that_no_map_has_are_refused(tmp_path: Path, name: str) -> None:
    change, expected = BAD_TENSORS[name]
    tensors = tensors_of(make_store())
    change(tensors)
    assert re.search(expected, refusal(forged_maps(tmp_path, tensors)))


@pytest.mark.filterwarnings("error")
def test_no_mutation_that_has_the_right_checksum_crashes(tmp_path: Path) -> None:
    """Whatever bytes change: the file is refused, or what is loaded can be used and saved."""
    path = saved(tmp_path)
    num_loaded = 0
    for number, changed in enumerate(mutations(path.read_bytes(), 600)):
        path.write_bytes(changed)
        try:
            store = load_maps(path)
        except StoreError:
            continue
        num_loaded += 1
        add_random(store, 3, number, None, first_request=100)
        save_maps(path, store, IDENTITY)
    assert 30 < num_loaded < 500


def test_numbers_that_no_map_has_are_not_saved(tmp_path: Path) -> None:
    path = saved(tmp_path)
    before = path.read_bytes()
    store = make_store()
    store.maps[0, 0, 0] = np.nan
    with pytest.raises(StoreError, match=r"a\.maps: tensor 'maps': map 0, layer 0, expert 0: nan"):
        save_maps(path, store, IDENTITY)
    assert path.read_bytes() == before


def test_a_full_disk_leaves_the_file_before(tmp_path: Path) -> None:
    with tiny_disk(tmp_path) as disk:
        path = saved(disk)
        with pytest.raises(StoreError, match="the disk is full"):
            save_maps(path, make_store(3000, 3000), IDENTITY)
        assert_same(load_maps(path, IDENTITY, SHAPE), make_store())
        assert [file.name for file in disk.iterdir()] == ["a.maps"]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"absent: writing a\.maps failed: No such file"):
        save_maps(tmp_path / "absent" / "a.maps", make_store(), IDENTITY)
