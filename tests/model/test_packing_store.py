"""Stores that packing makes: resumed after SIGKILL, found again, never another model's."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import expertly
from expertly.core.errors import CheckpointError, ConfigError, StoreError
from expertly.model.generation import generate, generation_config
from expertly.model.packing import local_folder, pack, pack_cached
from expertly.store.cache import learned_beside, list_entries
from expertly.store.checkpoint import Checkpoint
from expertly.store.manifest import FORMAT_VERSION, MANIFEST_NAME
from tests.families import make_checkpoint
from tests.model.checkpoints import change, read_experts, read_tensors
from tests.store.builders import files_of


def test_the_first_use_packs_and_the_next_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint("mixtral", tmp_path / "source", tokenizer=True)
    seen: list[tuple[int, int]] = []
    store = pack_cached(str(source), cache_dir=tmp_path / "cache", progress=lambda *now: seen.append(now))
    assert store.folder.parent == tmp_path / "cache" / "stores"
    assert seen[-1][0] == seen[-1][1] > 0
    again = pack_cached(source, cache_dir=tmp_path / "cache", progress=lambda *now: pytest.fail("packed again"))
    assert again.folder == store.folder
    assert pack_cached(source, "bfloat16", tmp_path / "cache").folder != store.folder
    assert pack_cached(store.folder).folder == store.folder  # a store is a model too
    assert json.loads((store.folder / "tokenizer_config.json").read_text())
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path / "mine"))
    assert pack_cached(source).folder.is_relative_to(tmp_path / "mine")


def test_a_cached_store_of_another_version_is_packed_again_and_what_was_learned_stays(tmp_path: Path) -> None:
    source = make_checkpoint("mixtral", tmp_path / "source")
    store = pack_cached(source, cache_dir=tmp_path)
    manifest, learned = store.folder / MANIFEST_NAME, learned_beside(store.folder, "predictor")
    learned.write_text("learned")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format_version": FORMAT_VERSION - 1}))
    (store.folder / "somebody's").write_text("mine")
    with pytest.raises(StoreError, match=r"format_version=\d: .*`expertly pack`"):
        pack_cached(store.folder)
    pack_cached(source, cache_dir=tmp_path).verify()
    assert learned.exists() and not (store.folder / "somebody's").exists()
    assert store.folder.with_name(f"{store.folder.name}.removed").joinpath("somebody's").read_text() == "mine"


def test_a_changed_source_is_packed_anew_and_its_old_store_refused(tmp_path: Path) -> None:
    source = make_checkpoint("mixtral", tmp_path / "source")
    first = pack_cached(source, cache_dir=tmp_path / "cache")
    pack(source, tmp_path / "store")
    change(source, lambda name, tensor: tensor + 1)  # same names, shapes and sizes
    second = pack_cached(source, cache_dir=tmp_path / "cache")
    assert second.folder != first.folder
    assert not torch.equal(read_experts(first, 0), read_experts(second, 0))
    with pytest.raises(StoreError, match=r"another checkpoint .*changed since"):
        pack(source, tmp_path / "store")


LARGE = (64 << 20) + 4096


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose file is too large to be read whole: most of it is a tensor that is not the model's."""
    source = make_checkpoint("mixtral", tmp_path_factory.mktemp("large") / "source")
    save_file(read_tensors(source) | {"unused": torch.zeros(LARGE, dtype=torch.uint8)}, source / "model.safetensors")
    return source


def zero(path: Path, name: str) -> None:
    """A tensor of a checkpoint, in place."""
    ref = Checkpoint.open(path.parent).tensors[name]
    with path.open("r+b") as file:
        file.seek(ref.offset)
        file.write(bytes(ref.nbytes))


def test_bytes_that_changed_in_place_are_packed_again_and_learned_state_stays(tmp_path: Path, large: Path) -> None:
    """The first bytes of the file are sampled, these are not."""
    source = Path(shutil.copytree(large, tmp_path / "source"))
    first, name = pack_cached(source, cache_dir=tmp_path), "model.layers.1.input_layernorm.weight"
    explicit = pack(source, tmp_path / "explicit")
    learned_beside(first.folder, "predictor").write_text("learned")
    before = Checkpoint.open(source).identity
    zero(source / "model.safetensors", name)
    assert Checkpoint.open(source).identity == before
    second = pack_cached(source, cache_dir=tmp_path)
    assert not load_file(second.folder / "dense.safetensors")[name].any()
    assert second.folder == first.folder and learned_beside(first.folder, "predictor").exists()
    with pytest.raises(StoreError, match=r"another checkpoint .*changed since"):
        pack(source, explicit.folder)


def test_a_copy_shares_the_store_if_it_keeps_times_and_else_has_its_own(tmp_path: Path, large: Path) -> None:
    store = pack_cached(large, cache_dir=tmp_path)
    source = Path(shutil.copytree(large, tmp_path / "copy"))  # as cp -a
    assert pack_cached(source, cache_dir=tmp_path).folder == store.folder
    (source / "model.safetensors").touch()
    mine = pack_cached(source, cache_dir=tmp_path)
    assert mine.folder != store.folder
    for each, folder in ((large, store.folder), (source, mine.folder)):
        again = pack_cached(each, cache_dir=tmp_path, progress=lambda *now: pytest.fail("packed again"))
        assert again.folder == folder
    assert {entry.problem for entry in list_entries(tmp_path)} == {None}


def test_folders_of_the_same_weights_keep_their_small_files_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share a store, whose own files stay what they were."""
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path))
    sources = [make_checkpoint("mixtral", tmp_path / name, tokenizer=True) for name in ("a", "b")]
    for source, top_k in zip(sources, (3, 4), strict=True):
        (source / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": top_k}))
    stores = [pack_cached(source) for source in sources]
    assert stores[0].folder == stores[1].folder
    before = files_of(stores[0].folder)
    for source, top_k in zip(sources, (3, 4), strict=True):
        model, tokenizer = expertly.load(source, memory="100%")
        assert model.generation_config.top_k == top_k and tokenizer.name_or_path == str(source)
        model.generation_config.bad_words_ids = [[10**7]]
        with pytest.raises(CheckpointError, match=f"^{source}: generation_config.json: transformers refuses it"):
            generate(model, [5, 6], generation_config(model, 3))
        expertly.unload(model)
    (sources[1] / "generation_config.json").write_text('{"top_k": "many"}')
    with pytest.raises(CheckpointError, match=re.escape(f"{sources[1] / 'generation_config.json'}: top_k='many'")):
        expertly.load(sources[1], memory="100%")
    assert files_of(stores[0].folder) == before


@pytest.mark.parametrize(
    "model", ["./absent", "/absent/model", "a/b/c", "", "~/absent", "no spaces allowed", "-x-", "someone/something"]
)
def test_what_is_no_model_is_named(model: str) -> None:
    reason = " here, and the hub cannot be" if model == "someone/something" else ""
    with pytest.raises(CheckpointError, match=rf"model={model!r}: no such folder{reason}"):
        pack_cached(model)


def test_a_store_is_of_one_dtype_and_not_packed_again(tmp_path: Path) -> None:
    source, store = make_checkpoint("mixtral", tmp_path / "source"), tmp_path / "store"
    pack(source, store)
    with pytest.raises(ConfigError, match=r"dtype='bfloat16': .* holds float32"):
        pack(source, store, "bfloat16")
    with pytest.raises(CheckpointError, match="already a packed store"):
        pack(store, tmp_path / "again")


def test_a_repository_in_the_hubs_cache_is_its_snapshot(tmp_path: Path) -> None:
    repository = tmp_path / "models--maker--model"
    (repository / "refs").mkdir(parents=True)
    make_checkpoint("mixtral", snapshot := repository / "snapshots" / ("0" * 40))
    assert local_folder(repository) == local_folder(snapshot) == snapshot
    (repository / "snapshots" / ("1" * 40)).mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        pack(repository, tmp_path / "store")  # which of the two, nobody can tell
