"""The cache folder: packed stores, made at first use, under their checkpoint's identity."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from expertly.core.errors import ConfigError, StoreError
from expertly.core.files import disk_errors, existing_parent, has_mark, name_of_holder
from expertly.core.untrusted import open_file, read_json_object
from expertly.store.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest
from expertly.store.packed import is_packed_store
from expertly.store.pages import remove_pages
from expertly.store.removal import LOCK_NAME, remove_store

CACHE_VARIABLE = "EXPERTLY_CACHE"

LEARNED = ("predictor", "fastest", "kv8")
"""Files beside a model's store: trained weights of a predictor, the fastest systems, factors of keys."""


def store_errors(folder: Path, doing: str) -> contextlib.AbstractContextManager[None]:
    """Turn an OSError while writing below `folder` into a StoreError that says what the user can do."""
    return disk_errors(folder, doing, StoreError, f" with --out or {CACHE_VARIABLE}")


def check_space(folder: Path, needed: int, purpose: str = "") -> None:
    """Raises StoreError where the disk has no room for so many more bytes below `folder`."""
    with store_errors(folder, "asking for free space"):
        free = shutil.disk_usage(existing_parent(folder)).free
    if needed > free:
        raise StoreError(
            f"{folder}: the disk is full: {needed} more bytes are needed{purpose}, {free} are free; make room or "
            f"choose another folder with --out or {CACHE_VARIABLE}"
        )


def cache_folder() -> Path:
    """`$EXPERTLY_CACHE`, or `~/.cache/expertly`. It may not exist yet."""
    chosen = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "expertly"
    except RuntimeError as error:
        raise ConfigError(
            f"{CACHE_VARIABLE}: no home folder to keep a cache in ({error}); set it to a folder"
        ) from None


def stores_folder(cache_dir: Path | None = None) -> Path:
    """The folder of the cached stores."""
    return (cache_dir or cache_folder()) / "stores"


def entry_folder(model_type: str, identity: str, stored_as: str, cache_dir: Path | None = None) -> Path:
    """The folder of a checkpoint's store in a dtype or weight format (`stored_as`)."""
    label = re.sub(r"[^A-Za-z0-9_-]", "_", model_type)[:40]
    return stores_folder(cache_dir) / f"{label}-{identity[:16]}-{stored_as}"


def learned_beside(folder: Path, kind: str) -> Path:
    """The file of what was learned of the model of a store, by its kind; it may not exist."""
    folder = folder.absolute()
    return folder.with_name(f"{folder.name}.{kind}")


def pages_beside(folder: Path) -> Path:
    """The folder of what a server keeps of KV caches; it may not exist."""
    return learned_beside(folder, "kv")


def mark_of(kind: str) -> bytes:
    """What every file of a kind of LEARNED has near its beginning."""
    return f'"expertly-{kind}"'.encode()


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A store in the cache, or one that is unfinished or cannot be read (`problem`)."""

    name: str
    folder: Path
    nbytes: int
    problem: str | None = None
    source: str = ""
    model_type: str = ""
    dtype: str = ""
    is_rounded: bool = False  # expertly rounded the experts


def list_entries(cache_dir: Path | None = None) -> list[CacheEntry]:
    """All entries, by name. Raises StoreError where the folder cannot be read."""
    folder = stores_folder(cache_dir)
    if not folder.exists():
        return []
    try:
        return [_entry(path) for path in sorted(folder.iterdir()) if path.is_dir() and not path.is_symlink()]
    except OSError as error:
        raise StoreError(f"{folder}: cannot be read ({error.strerror})") from None


def remove_entry(name: str, cache_dir: Path | None = None) -> CacheEntry:
    """Remove the entry of that name, or the only one whose name starts with it or whose source it is, and what was
    learned about its model, or kept of its KV caches.

    A loaded model that has the store open goes on working. Raises ConfigError where none or several match, StoreError
    where another process is packing it or it cannot be removed.
    """
    entries = list_entries(cache_dir)
    matches = [entry for entry in entries if entry.name == name]
    if not matches and name:
        matches = [
            entry for entry in entries if entry.name.startswith(name) or entry.source in (name, os.path.abspath(name))
        ]
    if len(matches) != 1:
        accepted = ", ".join(entry.name for entry in matches or entries) or "none, the cache is empty"
        problem = "matches several" if matches else "no such cached store"
        raise ConfigError(f"remove={name!r}: {problem}; accepted: {accepted}")
    entry = matches[0]
    with _locked(entry.folder), store_errors(entry.folder, "removing it"):
        remove_store(entry.folder)
        remove_pages(pages_beside(entry.folder))
        for kind in LEARNED:
            path = learned_beside(entry.folder, kind)
            if has_mark(path, mark_of(kind)):
                path.unlink(missing_ok=True)
            elif os.path.lexists(path):
                logging.getLogger("expertly").warning("%s: kept: nothing that expertly learned", path)
    return entry


def make_room_for_this_version(folder: Path) -> None:
    """Remove the cached store at `folder` if it has another version's format. Raises StoreError."""
    if not is_packed_store(folder):
        return
    if read_json_object(folder / MANIFEST_NAME, StoreError).get("format_version") != FORMAT_VERSION:
        make_room(folder, "packed by another version of expertly")


def make_room(folder: Path, reason: str) -> None:
    """Remove the cached store at `folder`, so that it is packed again. Raises StoreError where it cannot be removed."""
    logging.getLogger("expertly").warning("%s: %s; packing again", folder, reason)
    with store_errors(folder, "removing it"), contextlib.suppress(FileNotFoundError):  # another process was first
        remove_store(folder, is_for_another=True)


def _entry(path: Path) -> CacheEntry:
    nbytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    if not is_packed_store(path):
        is_partial = path.suffix == ".partial"
        problem = "unfinished: packing the model again starts over" if is_partial else "not a whole store"
        return CacheEntry(path.name, path, nbytes, problem)
    try:
        of = Manifest.read(path)
    except StoreError as error:
        return CacheEntry(path.name, path, nbytes, str(error))
    return CacheEntry(path.name, path, nbytes, None, of.source, of.model_type, of.stored_as, bool(of.rounding))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an unfinished store, if it has one. Raises StoreError where another process packs it."""
    try:
        lock = open_file(folder / LOCK_NAME, StoreError)
    except StoreError:
        yield
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = name_of_holder(lock.fileno())
            raise StoreError(f"{folder}: another process is packing it ({holder}); end that first") from None
        yield
