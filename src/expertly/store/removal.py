"""Which files of a folder are a store's, and deleting those and nothing else.

A folder is ours if its manifest, or the journal of an unfinished store, says so. Of it go the files whose names every
store has, and those that manifest or journal list. Whatever else is in it stays, and the folder with it. No link is
followed: not one in place of the folder, nor one in it.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from expertly.core.errors import StoreError
from expertly.core.files import check_folder, remove_folder
from expertly.core.untrusted import is_plain_name, read_json_object
from expertly.store.manifest import JOURNAL_NAME, MANIFEST_NAME

LOCK_NAME = "lock"
"""Empty, and locked by who makes the store."""

_WEIGHTS = re.compile(r"dense\.safetensors|experts-\d{5,}\.(sums\.)?safetensors")
_NAMES = re.compile(rf"(manifest|progress|config|model\.safetensors\.index)\.json|lock|{_WEIGHTS.pattern}")


def is_store_name(name: str) -> bool:
    """Whether every store may have a file of this name, or a writer that was killed may have left one."""
    if name.startswith(".") and name.endswith(".tmp"):
        name = name[1:-4]
    return _NAMES.fullmatch(name) is not None


def listed_names(folder: Path) -> set[str]:
    """Names that its manifest or its journal has, of files in it."""
    return {name for raw in _lists(folder) for name in raw["files"] if is_plain_name(name)}


def is_ours(folder: Path) -> bool:
    """Whether the folder, which is no link, has a manifest or a journal of ours, or a damaged one beside weights; or
    nothing but the empty lock of a writer that was stopped before it had a journal.
    """
    try:
        check_folder(folder)
        names = {path.name for path in folder.iterdir()}
        if names <= {LOCK_NAME, f".{JOURNAL_NAME}.tmp"}:
            lock = os.lstat(folder / LOCK_NAME) if LOCK_NAME in names else None
            return lock is None or (stat.S_ISREG(lock.st_mode) and not lock.st_size)
    except OSError:
        return False
    is_damaged = any(_json(folder / name) is None for name in {MANIFEST_NAME, JOURNAL_NAME} & names)
    return bool(_lists(folder)) or (is_damaged and any(map(_WEIGHTS.fullmatch, names)))


def check_partial(folder: Path) -> None:
    """Raises StoreError unless a store may be made in this folder: it is not there, empty, or was left by packing."""
    check_folder(folder)
    if folder.is_dir() and not is_ours(folder):
        raise StoreError(f"{folder}: in the way, and not left by packing; move it, or choose another folder")


def remove_store(folder: Path, *, is_for_another: bool = False) -> None:
    """Remove a store, whole or not; a process that has it open goes on. What is left after a crash is an unfinished
    store. What is not a store's stays where it is, with a warning; or in a folder beside it, NAME.removed, if another
    store is to take the place (`is_for_another`). Raises OSError, StoreError where the folder is none of ours.
    """
    check_folder(folder)
    if folder.exists() and not is_ours(folder):
        raise StoreError(f"{folder}: not a store, and not left by packing: nothing is removed")
    with suppress(FileNotFoundError):
        (folder / MANIFEST_NAME).replace(folder / JOURNAL_NAME)
    kept = remove_in_place(folder)
    if kept and is_for_another:
        ends = (f"-{number}.removed" if number else ".removed" for number in count())
        places = (folder.with_name(folder.name + end) for end in ends)
        folder = folder.rename(next(path for path in places if not os.path.lexists(path)))
    if kept:
        names = ", ".join(f"{name!r:.80}" for name in kept[:3]) + (", ..." if len(kept) > 3 else "")
        logging.getLogger("expertly").warning("%s: kept, with what no store of ours has: %s", folder, names)


def remove_in_place(folder: Path) -> list[str]:
    """Remove an unfinished store. Returns the names of what stays."""
    listed = listed_names(folder)
    return remove_folder(folder, lambda name: name in listed or is_store_name(name), last=JOURNAL_NAME)


def _lists(folder: Path) -> list[dict[str, Any]]:
    """The manifest and the journal, as far as the folder has them: objects with `files`."""
    lists = [_json(folder / name) or {} for name in (MANIFEST_NAME, JOURNAL_NAME)]
    return [raw for raw in lists if isinstance(raw.get("files"), dict) and type(raw.get("format_version")) is int]


def _json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none."""
    with suppress(StoreError):
        return read_json_object(path, StoreError)
    return None
