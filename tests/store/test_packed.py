"""A packed store: where experts lie, and that damage is seen."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from expertly.core.errors import ConfigError, StoreError
from expertly.store.manifest import FileEntry
from expertly.store.packed import PackedStore
from tests.store.builders import DENSE, LAYER, PLAN, expert_bytes, stored_experts, write_store


@pytest.fixture
def store(tmp_path: Path) -> PackedStore:
    return write_store(tmp_path / "store")


def test_every_expert_is_where_its_extent_says(store: PackedStore) -> None:
    experts = [(layer, expert) for layer, shape in enumerate(PLAN.layers) for expert in range(shape.num_experts)]
    assert list(stored_experts(store)) == [expert_bytes(*expert).tobytes() for expert in experts]
    assert all(offset % 4096 == 0 for _, offset in store.extents)


def test_the_library_reads_what_was_written(store: PackedStore) -> None:
    with safe_open(store.folder / "dense.safetensors", "np") as file:
        assert set(file.keys()) == {spec.name for spec in DENSE}
        tensor = file.get_tensor("embed.weight")
    assert tensor.shape == (10, 8) and tensor.view(np.uint8).min() == len("embed.weight")
    with safe_open(store.extents[0][0], "np") as file:
        assert file.get_slice("experts").get_shape() == [4, 32, 3, 64]
    index = json.loads((store.folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {spec.name: "dense.safetensors" for spec in DENSE}


def test_says_its_sizes(store: PackedStore) -> None:
    assert store.config == {"model_type": "toy"}
    assert store.dense_nbytes == 2 * (80 + 8)  # in bfloat16
    assert store.geometry(4).unit_nbytes[0] == LAYER.expert_nbytes // 4
    assert store.nbytes == sum((store.folder / name).stat().st_size for name in store.manifest.files)
    with pytest.raises(ConfigError, match="segments=5"):
        store.geometry(5)


FILES = ("config.json", "dense.safetensors", "experts-00000.safetensors", "experts-00001.safetensors")


@pytest.mark.parametrize("name", [*FILES, "model.safetensors.index.json", "experts-00001.sums.safetensors"])
def test_a_missing_or_truncated_file_is_named(store: PackedStore, name: str) -> None:
    path = store.folder / name
    content = path.read_bytes()
    for damaged, text in ((content[:-1], f"truncated: {len(content) - 1} bytes"), (content + b"x", "changed")):
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match=f"{name}: {text}"):
            PackedStore.open(store.folder)
    path.unlink()
    with pytest.raises(StoreError, match=name):
        PackedStore.open(store.folder)
    os.mkfifo(path)
    replace(store.manifest, files={**store.manifest.files, name: FileEntry(0, 0)}).write(store.folder)
    with pytest.raises(StoreError, match=f"{name}: must be a file"):  # and nobody waits for who writes into it
        PackedStore.open(store.folder)


@pytest.mark.parametrize("name", [*FILES, "model.safetensors.index.json"])
def test_one_flipped_bit_is_found_by_a_full_verify(store: PackedStore, name: str) -> None:
    path, seen = store.folder / name, list[tuple[int, int]]()
    store.verify(progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (store.nbytes, store.nbytes)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for check in (store.verify, *([] if name.startswith("experts") else [store.check_dense])):
        with pytest.raises(StoreError, match=rf"{name}: checksum .* written with .*pack again"):
            check()


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "chat.jinja"])
def test_a_changed_small_file_is_found_when_it_is_loaded(tmp_path: Path, name: str) -> None:
    (tmp_path / "source").mkdir()
    for file in (name, "README.md"):
        (tmp_path / "source" / file).write_text("7")
    store = write_store(tmp_path / "store", extras=tmp_path / "source")
    (store.folder / "README.md").write_text("nobody reads it")
    store.check_dense()
    (store.folder / name).write_text("8")
    for check in (store.check_dense, store.verify):
        with pytest.raises(StoreError, match=f"{name}: checksum"):
            check()


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


@pytest.mark.parametrize("name", ["experts-00001.safetensors", "experts-00001.sums.safetensors"])
def test_a_manifest_that_lacks_a_file_is_refused(store: PackedStore, name: str) -> None:
    files = {key: entry for key, entry in store.manifest.files.items() if key != name}
    replace(store.manifest, files=files).write(store.folder)
    with pytest.raises(StoreError, match=f"files lacks '{name}"):
        PackedStore.open(store.folder)


def test_a_folder_that_is_no_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"not a packed store"):
        PackedStore.open(tmp_path)
    with pytest.raises(StoreError, match="no such folder"):
        PackedStore.open(tmp_path / "absent")
