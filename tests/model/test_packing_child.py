"""A model's first use packs in a child: this process is no larger than at its second, and hears what goes wrong."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import expertly
from expertly.core.errors import CheckpointError, ExpertlyError
from expertly.model import packing
from expertly.store import cache
from tests.families import generate, make_checkpoint, make_prompts


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))


def pids_of_packing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file with a line for each process that packed."""
    file, write = tmp_path / "pids", packing.Packing.write

    def noted(self: Any, *arguments: Any) -> Any:
        with file.open("a") as out:
            out.write(f"{os.getpid()}\n")
        return write(self, *arguments)

    monkeypatch.setattr(packing.Packing, "write", noted)
    return file


def test_the_first_load_packs_in_a_child_and_the_second_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pids, heard = make_checkpoint("qwen3_moe", tmp_path / "model"), pids_of_packing(monkeypatch, tmp_path), []
    prompts, tokens = make_prompts(2, length=5), []
    for _ in range(2):
        loaded, _ = expertly.load(str(model), memory="50%", progress=lambda *told: heard.append(told))
        tokens.append(generate(loaded, prompts))
        expertly.unload(loaded)
    (pid,) = pids.read_text().split()
    assert int(pid) != os.getpid() and tokens[0] == tokens[1]
    packed = [done for what, done, total in heard if what == "packing"]
    assert packed and packed == sorted(packed), "progress comes back"


def test_what_is_wrong_is_said_as_if_it_were_packed_here(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path / "model")
    shard = next(model.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    said = []
    for in_child in (True, False):
        with pytest.raises(CheckpointError) as raised:
            packing.pack_cached(model, in_child=in_child)
        said.append((type(raised.value), str(raised.value)))
    assert said[0] == said[1]


def test_a_child_that_is_killed_leaves_what_it_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path / "model")
    dense = packing.Packing.dense_chunks
    with monkeypatch.context() as patched:
        patched.setattr(packing.Packing, "dense_chunks", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(ExpertlyError, match=r"packing .*model: .* was killed \(SIGKILL\)"):
            expertly.load(str(model), memory="50%")
    (partial,) = cache.stores_folder().glob("*.partial")
    assert any(partial.glob("experts-*")), "layers are packed before the dense part"
    assert packing.Packing.dense_chunks is dense
    loaded, _ = expertly.load(str(model), memory="50%")
    expertly.unload(loaded)
    assert not partial.exists()
