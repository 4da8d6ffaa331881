"""A packed store: where experts lie, and that damage is seen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from expertly.core.errors import ConfigError, StoreError
from expertly.store.packed import PackedStore
from tests.store.builders import DENSE, LAYER, PLAN, expert_bytes, write_store


@pytest.fixture
def store(tmp_path: Path) -> PackedStore:
    return write_store(tmp_path / "store")


def test_every_expert_is_where_the_geometry_says(store: PackedStore) -> None:
    for layer, geometry in enumerate(PLAN.layers):
        path, offset = store.layer_extent(layer)
        assert offset % 4096 == 0
        raw = path.read_bytes()
        for expert in range(geometry.num_experts):
            start = offset + expert * geometry.expert_nbytes
            assert raw[start : start + geometry.expert_nbytes] == expert_bytes(layer, expert).tobytes()


def test_the_library_reads_what_was_written(store: PackedStore) -> None:
    with safe_open(store.folder / "dense.safetensors", "np") as file:
        assert set(file.keys()) == {spec.name for spec in DENSE}
        tensor = file.get_tensor("embed.weight")
    assert tensor.shape == (10, 8) and tensor.view(np.uint8).min() == len("embed.weight")
    with safe_open(store.layer_extent(0)[0], "np") as file:
        assert file.get_slice("experts").get_shape() == [4, 32, 3, 64]
    index = json.loads((store.folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {spec.name: "dense.safetensors" for spec in DENSE}


def test_says_its_sizes(store: PackedStore) -> None:
    assert store.config == {"model_type": "toy"}
    assert store.dense_nbytes == 2 * (80 + 8)  # in bfloat16
    assert store.geometry(4).segment_nbytes(0) == LAYER.expert_nbytes // 4
    assert store.nbytes == sum((store.folder / name).stat().st_size for name in store.manifest.files)
    with pytest.raises(ConfigError, match="segments=5"):
        store.geometry(5)


def test_the_wrong_checkpoint_is_refused(store: PackedStore) -> None:
    PackedStore.open(store.folder, PLAN.identity)
    with pytest.raises(StoreError, match="another checkpoint"):
        PackedStore.open(store.folder, "1" * 64)


FILES = ("config.json", "dense.safetensors", "experts-00000.safetensors", "experts-00001.safetensors")


@pytest.mark.parametrize("name", [*FILES, "model.safetensors.index.json"])
def test_a_missing_or_truncated_file_is_named(store: PackedStore, name: str) -> None:
    path = store.folder / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(StoreError, match=f"{name}: truncated: {len(content) - 1} bytes"):
        PackedStore.open(store.folder)
    path.write_bytes(content + b"x")
    with pytest.raises(StoreError, match=f"{name}: changed"):
        PackedStore.open(store.folder)
    path.unlink()
    with pytest.raises(StoreError, match=name):
        PackedStore.open(store.folder)


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_found_by_a_full_verify(store: PackedStore, name: str) -> None:
    path = store.folder / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match=f"{name}: checksum"):
        store.verify(full=True)


def test_a_whole_store_verifies_with_progress(store: PackedStore) -> None:
    seen: list[tuple[int, int]] = []
    store.verify(full=True, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (store.nbytes, store.nbytes)


def test_a_damaged_header_is_named(store: PackedStore) -> None:
    path = store.folder / "experts-00000.safetensors"
    content = path.read_bytes()
    for damaged in (content.replace(b'"BF16"', b'"F16" '), content.replace(b"[4,32,3,64]", b"[4,64,3,32]")):
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match=r"experts-00000.*must be BF16 \[4, 32, 3, 64\]"):
            PackedStore.open(store.folder)
    path.write_bytes(b"\0" * len(content))
    with pytest.raises(StoreError, match="experts-00000"):
        PackedStore.open(store.folder)


def test_a_manifest_that_lacks_a_file_is_refused(store: PackedStore) -> None:
    path = store.folder / "manifest.json"
    raw = json.loads(path.read_text())
    del raw["files"]["experts-00001.safetensors"]
    path.write_text(json.dumps(raw))
    with pytest.raises(StoreError, match="files lacks 'experts-00001"):
        PackedStore.open(store.folder)


def test_a_folder_that_is_no_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"not a packed store"):
        PackedStore.open(tmp_path)
    with pytest.raises(StoreError, match="no such folder"):
        PackedStore.open(tmp_path / "absent")
