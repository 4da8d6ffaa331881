"""Packing at first use: resumed after SIGKILL, found again, never taken for another model's."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from expertly.core.errors import CheckpointError, ConfigError, ExpertlyError, StoreError
from expertly.model.packing import pack, pack_cached
from expertly.store.writer import partial_folder
from tests.families import make_checkpoint
from tests.model.checkpoints import (
    change,
    read_experts,
)
from tests.store.builders import files_of

SLOW_PACK = """
import sys, time
from expertly.model.packing import pack
pack(sys.argv[1], sys.argv[2], progress=lambda done, total: time.sleep(0.02))
"""


def test_a_killed_pack_is_resumed_to_the_same_store(tmp_path: Path) -> None:
    source, folder = make_checkpoint("qwen3_moe", tmp_path / "source", tokenizer=True), tmp_path / "store"
    process = subprocess.Popen([sys.executable, "-c", SLOW_PACK, str(source), str(folder)])
    deadline = time.monotonic() + 120
    while not (partial_folder(folder) / "experts-00001.safetensors").exists():
        assert process.poll() is None and time.monotonic() < deadline, "the packer ended early"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not folder.exists()
    with pytest.raises(ExpertlyError):  # what it left is no model
        pack_cached(partial_folder(folder))
    progress: list[int] = []
    pack(source, folder, progress=lambda done, total: progress.append(done)).verify(full=True)
    assert progress[0] > 0, "started from nothing"
    assert files_of(folder) == files_of(pack(source, tmp_path / "uninterrupted").folder)


def test_the_first_use_packs_and_the_next_opens(tmp_path: Path) -> None:
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


def test_the_cache_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path / "mine"))
    store = pack_cached(make_checkpoint("olmoe", tmp_path / "source"))
    assert store.folder.is_relative_to(tmp_path / "mine")


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


def test_a_changed_tokenizer_is_brought_up_to_date(tmp_path: Path) -> None:
    source = make_checkpoint("mixtral", tmp_path / "source")
    store = pack(source, tmp_path / "store")
    (source / "generation_config.json").write_text('{"max_new_tokens": 7}')
    pack(source, tmp_path / "store", progress=lambda *now: pytest.fail("packed again")).verify(full=True)
    assert (store.folder / "generation_config.json").read_text() == '{"max_new_tokens": 7}'


def test_a_store_of_another_dtype_is_refused(tmp_path: Path) -> None:
    source = make_checkpoint("mixtral", tmp_path / "source")
    pack(source, tmp_path / "store")
    for attempt in (
        lambda: pack(source, tmp_path / "store", "bfloat16"),
        lambda: pack_cached(tmp_path / "store", "float16"),
    ):
        with pytest.raises(ConfigError, match=r"dtype='b?float16': the packed store .* holds float32"):
            attempt()
    with pytest.raises(CheckpointError, match="already a packed store"):
        pack(tmp_path / "store", tmp_path / "again")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    source = make_checkpoint("mixtral", tmp_path / "source")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=str(tmp_path / "file")):
        pack_cached(source, cache_dir=tmp_path / "file" / "cache")


@pytest.mark.parametrize("model", ["./absent", "/absent/model", "a/b/c", "", "~/absent", "no spaces allowed", "-x-"])
def test_what_is_no_model_is_named(model: str) -> None:
    with pytest.raises(CheckpointError, match=rf"model={model!r}: no such folder"):
        pack_cached(model)


def test_a_hub_id_without_a_network_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"model='someone/something': no such folder here, and the hub cannot be"):
        pack_cached("someone/something")
