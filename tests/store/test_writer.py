"""Writing a store: atomic, begun anew after SIGKILL, refused in time on a full disk, safe against a second packer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from expertly.core.errors import StoreError
from expertly.store import writer as writer_module
from expertly.store.packed import PackedStore
from expertly.store.writer import StoreWriter, partial_folder
from tests.store.builders import DENSE, PLAN, experts_of, files_of, fill, write_store
from tests.store.mounts import tiny_disk

SLOW_WRITER = """
import sys, time
from pathlib import Path
from tests.store.builders import PLAN, write_store
folder, file, pause_s = sys.argv[1:]
write_store(Path(folder), PLAN, lambda done, total: time.sleep(float(pause_s) if Path(file).exists() else 0))
"""


def start_writer(folder: Path, file: str, pause_s: float = 60) -> subprocess.Popen[str]:
    """A process that begins to write a store, and pauses again and again as soon as it has begun this file."""
    command = [sys.executable, "-c", SLOW_WRITER, folder, partial_folder(folder) / file, str(pause_s)]
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "src")]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, stderr=subprocess.PIPE, text=True
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, "the writer ended early"
        time.sleep(0.005)


def test_writes_all_or_nothing_and_progress_counts_weights(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    store = write_store(tmp_path / "store", PLAN, lambda done, total: seen.append((done, total)))
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert set(files_of(store.folder)) == {*store.manifest.files, "manifest.json"}
    total = sum(layer.nbytes for layer in PLAN.layers) + sum(spec.nbytes for spec in DENSE)
    assert seen[0] == (0, total) and seen[-1] == (total, total)
    assert seen == sorted(seen)


@pytest.mark.parametrize("damage", ["none", "other plan", "journal torn", "journal lies", "truncated"])
def test_what_a_killed_writer_left_is_written_again(tmp_path: Path, damage: str) -> None:
    folder, plan, partial = tmp_path / "store", PLAN, partial_folder(tmp_path / "store")
    (tmp_path / "extras").mkdir()
    (tmp_path / "extras" / "tokenizer.json").write_text("{}")
    with StoreWriter(folder, PLAN, DENSE, None) as writer:
        writer.write_layer(0, experts_of(0))
        writer.copy_extras(tmp_path / "extras")
    path, journal = partial / "experts-00000.safetensors", partial / "progress.json"
    if damage == "other plan":
        plan = replace(PLAN, identity="2" * 64)
    elif damage == "journal torn":
        journal.write_bytes(journal.read_bytes()[:-20])
        (partial / "tokenizer.json").unlink()
    elif damage == "journal lies":
        raw = json.loads(journal.read_text())
        journal.write_text(json.dumps(raw | {"files": {"../x": None, "tokenizer.json": None}}))
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "x").touch()
    write_store(folder, plan).verify()
    assert files_of(folder) == files_of(write_store(tmp_path / "whole", plan).folder) and (tmp_path / "x").exists()


@pytest.mark.parametrize("failure", [KeyboardInterrupt, StoreError, ValueError])
def test_a_writer_that_fails_leaves_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    with pytest.raises(failure), StoreWriter(tmp_path / "store", PLAN, DENSE, None) as writer:
        writer.write_layer(0, experts_of(0))
        raise failure
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"store\.partial: making the folder failed|looking at it failed"):
        write_store(tmp_path / "file" / "store")
    with tiny_disk(tmp_path, read_only=True) as disk, pytest.raises(StoreError, match=r"not writable .*EXPERTLY_CACHE"):
        write_store(disk / "store")


def test_too_little_room_is_said_first_or_when_it_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_disk(tmp_path) as disk:
        with pytest.raises(StoreError, match=r"the disk is full: \d+ more bytes are needed, \d+ are free"):
            write_store(disk / "store")
        assert not list(disk.rglob("*.safetensors"))
        monkeypatch.setattr(writer_module, "check_space", lambda *args: None)  # room seems to be there
        with pytest.raises(StoreError, match=r"the disk is full, \d+ bytes are free; make room .* run again"):
            write_store(disk / "store")
        assert not any(disk.iterdir())


def test_a_second_process_waits_and_uses_the_first_one_s_store(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    process = start_writer(folder, "experts-00000.safetensors", pause_s=0.1)
    wait_for(partial_folder(folder) / "experts-00000.safetensors", process)
    with StoreWriter(folder, PLAN, DENSE, None) as writer:  # waits here
        store = writer.finished_store()
    assert process.wait() == 0
    assert store is not None and store.folder == folder
    assert not partial_folder(folder).exists()


def test_a_second_process_takes_over_from_a_killed_one(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    process = start_writer(folder, "experts-00000.safetensors")
    wait_for(partial_folder(folder) / "experts-00000.safetensors", process)
    with pytest.raises(StoreError):
        PackedStore.open(partial_folder(folder))
    timer = threading.Timer(0.3, process.kill)
    timer.start()
    with StoreWriter(folder, PLAN, DENSE, None) as writer:
        assert writer.finished_store() is None and not folder.exists()
        fill(writer).verify()
    assert files_of(folder) == files_of(write_store(tmp_path / "uninterrupted").folder)
    process.wait()
