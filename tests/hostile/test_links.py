"""Links, pipes and other people's folders where expertly writes and deletes: what is theirs is there afterwards."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from expertly.core.errors import StoreError
from expertly.store import removal
from expertly.store.cache import entry_folder, learned_beside, list_entries, make_room, remove_entry, stores_folder
from expertly.store.checkpoint import Checkpoint
from expertly.store.packed import expert_files
from expertly.store.removal import is_store_name
from expertly.store.writer import StoreWriter, partial_folder
from tests.hostile.cases import run_command
from tests.store.builders import DENSE, PLAN, experts_of, write_store

Seen = dict[str, tuple[int, str | bytes]]


def seen(folder: Path) -> Seen:
    """All that is below a folder, no link followed: kinds, targets of links, bytes of files."""
    result: Seen = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        content: str | bytes = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        result[str(path.relative_to(folder))] = mode, content
    return result


def make_precious(folder: Path) -> Path:
    """A folder of somebody else's whose files have names that a store has."""
    folder.mkdir(parents=True)
    for name in ("lock", "config.json", "experts-00000.safetensors", "dense.safetensors", "thesis.txt"):
        (folder / name).write_text(f"my {name}")
    return folder


def linked(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def unfinished(folder: Path) -> Path:
    """What a writer left that was stopped behind the first layer."""
    with StoreWriter(folder, PLAN, DENSE, None) as writer:
        writer.write_layer(0, experts_of(0))
    return partial_folder(folder)


# -- packing -----------------------------------------------------------------------------------------------------------


def left_with(name: str, make: Callable[[Path, Path], Any]) -> Callable[[Path, Path], Any]:
    """An unfinished store in which something else has the name of one of its files."""
    return lambda m, mine: ((unfinished(m) / name).unlink(missing_ok=True), make(partial_folder(m) / name, mine))


def pipe(path: Path, mine: Path) -> None:
    os.mkfifo(path)


def link_to(name: str) -> Callable[[Path, Path], Any]:
    return lambda path, mine: path.symlink_to(mine / name)


PACKING: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "partial is a link": (lambda m, mine: linked(partial_folder(m), mine), "a link is in the way"),
    "partial is a pipe": (lambda m, mine: os.mkfifo(partial_folder(m)), "a pipe is in the way"),
    "partial is somebody's, with a JSON": (
        lambda m, mine: ((mine / "progress.json").write_text("{}"), mine.rename(partial_folder(m))),
        "not left by packing",
    ),
    "partial is somebody's lock": (
        lambda m, mine: (partial_folder(m).mkdir(), (partial_folder(m) / "lock").write_text("mine")),
        "not left by packing",
    ),
    "out is a link": (lambda m, mine: linked(m, mine), "a link is in the way"),
    "the lock is a link": (left_with("lock", link_to("lock")), "a link is in the way"),
    "the lock is a second name": (
        left_with("lock", lambda path, mine: path.hardlink_to(mine / "thesis.txt")),
        "a file is in the way",
    ),
    "the journal is a pipe": (left_with("progress.json", pipe), "a pipe is in the way"),
    "a file of experts is a link": (
        left_with("experts-00001.safetensors", link_to("thesis.txt")),
        "a link is in the way",
    ),
    "the manifest is a link": (left_with("manifest.json", link_to("config.json")), "a link is in the way"),
    "what is made is a link": (left_with(".config.json.tmp", link_to("config.json")), "a link is in the way"),
}


@pytest.mark.parametrize("name", PACKING)
def test_packing_goes_through_no_link_and_into_no_folder_of_others(name: str, tmp_path: Path) -> None:
    make, sentence = PACKING[name]
    precious = make_precious(tmp_path / "precious")
    folder = tmp_path / "m"
    make(folder, precious)
    ours = partial_folder(folder) if "somebody" not in name else tmp_path / "absent"
    theirs = {
        path: entry
        for path, entry in seen(tmp_path).items()
        if not (tmp_path / path).is_relative_to(ours) or not stat.S_ISREG(entry[0])
    }
    with pytest.raises(StoreError, match=sentence):
        write_store(folder)
    after = seen(tmp_path)
    assert {path: after.get(path) for path in theirs} == theirs
    assert not (folder / "absent").exists() and not (tmp_path / "absent").exists()


def test_what_lies_beside_a_store_that_is_made_stays_in_it(tmp_path: Path) -> None:
    partial = unfinished(tmp_path / "m")
    for file in ("notes.txt", "my.json", "a\nb", "ü"):
        (partial / file).write_text("mine")
    (partial / "experts-00001.safetensors").write_text("half")  # of ours, and not in the journal
    store = write_store(tmp_path / "m")
    store.verify()
    assert {(store.folder / file).read_text() for file in ("notes.txt", "my.json", "a\nb", "ü")} == {"mine"}


# -- removing ----------------------------------------------------------------------------------------------------------


def edit_manifest(store: Path, **files_listed: Any) -> None:
    raw = json.loads((store / "manifest.json").read_text())
    raw["files"] |= files_listed
    (store / "manifest.json").write_text(json.dumps(raw))


ENTRY = {"nbytes": 1, "checksum": 1}

REMOVING: dict[str, tuple[Callable[[Path, Path], Any], set[str]]] = {
    "a store": (lambda store, mine: None, set()),
    "with a file of theirs": (lambda store, mine: (store / "notes.txt").write_text("mine"), {"notes.txt"}),
    "with a folder of theirs": (lambda store, mine: (store / "a\nb").mkdir(), {"a\nb"}),
    "with a link that has a store's name": (
        lambda store, mine: linked(store / "experts-00009.safetensors", mine / "thesis.txt"),
        {"experts-00009.safetensors"},
    ),
    "whose manifest leads elsewhere": (
        lambda store, mine: edit_manifest(store, **{"../../precious/thesis.txt": ENTRY, str(mine / "lock"): ENTRY}),
        set(),
    ),
    "whose manifest lists a link": (
        lambda store, mine: (
            linked(store / "tokenizer.json", mine / "config.json"),
            edit_manifest(store, **{"tokenizer.json": ENTRY}),
        ),
        {"tokenizer.json"},
    ),
    "of a damaged manifest": (lambda store, mine: (store / "manifest.json").write_text("{"), set()),
}
"""Of each case what is done before the store is removed, and the names that stay in its folder."""


@pytest.mark.parametrize("name", REMOVING)
def test_removing_a_store_removes_what_a_store_has(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, stays = REMOVING[name]
    precious = make_precious(tmp_path / "precious")
    store = entry_folder(PLAN.model_type, PLAN.identity, PLAN.dtype, tmp_path)
    write_store(store)
    make(store, precious)
    ours = {f"stores/{store.name}/{path.name}" for path in store.iterdir() if path.name not in stays}
    before = {path: entry for path, entry in seen(tmp_path).items() if path not in ours}
    remove_entry(store.name, tmp_path)
    if not stays:
        before.pop(f"stores/{store.name}")
    assert seen(tmp_path) == before
    assert all(repr(stay) in caplog.text for stay in stays)


@pytest.mark.parametrize("name", ["manifest.json", "progress.json", "lock"])
def test_a_folder_that_is_no_store_is_not_removed(name: str, tmp_path: Path) -> None:
    mine = stores_folder(tmp_path) / "mine"
    mine.mkdir(parents=True)
    (mine / name).write_text('{"files": ["a"], "name": "an extension of a browser"}')
    (mine / "config.json").write_text("mine")
    before = seen(tmp_path)
    assert [entry.name for entry in list_entries(tmp_path)] == ["mine"]
    for remove in (lambda: remove_entry("mine", tmp_path), lambda: make_room(mine, "for a test")):
        with pytest.raises(StoreError, match="nothing is removed"):
            remove()
    assert seen(tmp_path) == before


@pytest.mark.parametrize("kind", ["a link", "a text", "a pipe"])
def test_what_lies_where_learned_state_does_is_not_removed(kind: str, tmp_path: Path) -> None:
    store = write_store(entry_folder(PLAN.model_type, PLAN.identity, PLAN.dtype, tmp_path)).folder
    precious = tmp_path / "precious"
    precious.write_text('{"format":"expertly-reuse"}')
    path = learned_beside(store, "reuse")
    {"a link": path.symlink_to, "a text": lambda _: path.write_text("mine"), "a pipe": lambda _: os.mkfifo(path)}[kind](
        precious
    )
    before = path.lstat()
    remove_entry(store.name, tmp_path)
    after = path.lstat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert precious.exists() and not store.exists()


def test_an_interrupted_removal_is_finished_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write_store(entry_folder(PLAN.model_type, PLAN.identity, PLAN.dtype, tmp_path)).folder
    with monkeypatch.context() as patched:
        patched.setattr(removal, "remove_folder", Mock(side_effect=KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            remove_entry(store.name, tmp_path)
    (store / "dense.safetensors").unlink()
    assert [entry.problem for entry in list_entries(tmp_path)] == ["not a whole store"]
    remove_entry(store.name, tmp_path)
    assert not any(stores_folder(tmp_path).iterdir())


def test_every_file_of_a_store_has_a_name_of_the_list(tmp_path: Path) -> None:
    assert all(map(is_store_name, expert_files(123456)))
    assert all(is_store_name(path.name) for path in write_store(tmp_path / "m").folder.iterdir())
    assert not any(is_store_name(name) for name in ("notes.txt", "experts-1.safetensors", "../lock", "lock\n", ".tmp"))


# -- whole commands ----------------------------------------------------------------------------------------------------


def cached(checkpoint: Path, folder: Path) -> Path:
    """Where `run_command` in `folder` packs the checkpoint."""
    return entry_folder("qwen3_moe", Checkpoint.open(checkpoint).identity, "float32", folder / ".cache")


Make = Callable[[Path, Path, Path], Any]

COMMANDS: dict[str, tuple[Make, list[str], str]] = {
    "what is learned is made at a link": (
        lambda folder, entry, mine: linked(entry.with_name(f".{entry.name}.reuse.tmp"), mine / "thesis.txt"),
        ["--system", "expertly"],
        "",
    ),
    "the cache is a pipe": (lambda folder, entry, mine: os.mkfifo(folder / ".cache"), [], ".cache"),
    "the cache is somebody's home": (
        lambda folder, entry, mine: (mine / "stores").mkdir() or linked(folder / ".cache", mine),
        [],
        "",
    ),
    "the stores are on another disk": (lambda folder, entry, mine: linked(folder / ".cache" / "stores", mine), [], ""),
}
"""Of each case what lies where `run` writes, options, and what is said of it; "": the run is answered."""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_leaves_what_is_not_its_own(name: str, checkpoint: Path, imported: Any, tmp_path: Path) -> None:
    make, options, sentence = COMMANDS[name]
    precious = make_precious(tmp_path / "precious")
    make(tmp_path, cached(checkpoint, tmp_path), precious)
    before = seen(tmp_path)
    ended = run_command(imported, tmp_path, "run", str(checkpoint), "hello", "--max-new-tokens", "4", *options)
    if sentence:
        ended.is_refused(sentence)
    else:
        ended.is_answered()
    after = seen(tmp_path)
    assert {path: after.get(path) for path in before} == before
