"""Which files of a folder are a store's, and deleting those and nothing else.

A folder is ours if its manifest, or the journal of an unfinished store, says so. Of it go the files whose names every
store has, and those that manifest or journal list. Whatever else is in it stays, and the folder with it. No link is
followed: not one in place of the folder, nor one in it.
"""

from __future__ import annotations

import logging
import re
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from expertly.core.errors import StoreError
from expertly.core.files import about_path, check_folder, json_bytes, remove_folder, write_atomic
from expertly.core.untrusted import is_plain_name, read_json_object
from expertly.store.manifest import FORMAT_VERSION, JOURNAL_NAME, MANIFEST_NAME

LOCK_NAME = "lock"
"""Empty, and locked by who makes the store."""

MARK_NAME = "download.json"
"""In a folder of downloaded files: lists those, as a manifest does."""

_NAMES = re.compile(
    r"(manifest|progress|config|model\.safetensors\.index)\.json|dense\.safetensors|lock|dense-\d{5,}\.part"
    r"|experts-\d{5,}\.(safetensors|sums\.safetensors|planes|frames\.safetensors)"
)
_WEIGHTS = re.compile(r"dense\.safetensors|experts-\d{5,}\..*")

_HUB_FOLDERS = (".cache/huggingface/download", ".cache/huggingface", ".cache")
_HUB_NAMES = re.compile(r".*\.(metadata|lock|incomplete)|\.gitignore|CACHEDIR\.TAG", re.DOTALL)
"""What the hub's client keeps beside files that it downloads into a folder."""


def is_store_name(name: str) -> bool:
    """Whether every store may have a file of this name, or a writer that was killed may have left one."""
    if name.startswith(".") and name.endswith(".tmp"):
        name = name[1:-4]
    return _NAMES.fullmatch(name) is not None


def listed_names(folder: Path) -> set[str]:
    """Names that its manifest, its journal or its list of downloads has, of files in it."""
    return {name for raw in _lists(folder) for name in raw["files"] if is_plain_name(name)}


def is_ours(folder: Path) -> bool:
    """Whether the folder, which is no link, has a manifest or a journal of ours, or a damaged one beside weights."""
    try:
        check_folder(folder)
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return False
    return bool(_lists(folder)) or (
        any(name in (MANIFEST_NAME, JOURNAL_NAME) and not _is_json(folder / name) for name in names)
        and any(_WEIGHTS.fullmatch(name) for name in names)
    )


def is_begun(folder: Path) -> bool:
    """Whether a writer may have been stopped here before it had a journal: all that there is is an empty lock."""
    names = {path.name for path in folder.iterdir()}
    about = about_path(folder / LOCK_NAME)
    is_lock = about is None or (stat.S_ISREG(about.st_mode) and not about.st_size)
    return is_lock and names <= {LOCK_NAME, f".{JOURNAL_NAME}.tmp"}


def check_partial(folder: Path) -> None:
    """Raises StoreError unless a store may be made in this folder: it is not there, empty, or was left by packing."""
    check_folder(folder)
    if folder.is_dir() and not is_ours(folder) and not is_begun(folder):
        raise StoreError(f"{folder}: in the way, and not left by packing; move it, or choose another folder")


def remove_store(folder: Path, *, is_for_another: bool = False) -> None:
    """Remove a store, whole or not, so that what is left after a crash does not look like a whole one; a process that
    has it open goes on. What is not a store's stays where it is, with a warning; or in a folder beside it,
    NAME.removed, if another store is to take the place (`is_for_another`). Raises OSError, StoreError where the folder
    is none of ours.
    """
    check_folder(folder)
    if not is_ours(folder) and not is_begun(folder):
        raise StoreError(f"{folder}: not a store, and not left by packing: nothing is removed")
    doomed = folder
    if folder.suffix != ".removed":
        doomed = _doomed(folder)
        folder.rename(doomed)
    remove_in_place(doomed, None if is_for_another else folder)


def remove_in_place(folder: Path, was: Path | None = None) -> None:
    """Remove what `remove_store` does, without another name before. `was`: its name, which it gets back if something
    stays.
    """
    listed = listed_names(folder)
    is_streamed = bool(_lists(folder, (MARK_NAME,)))
    if is_streamed:
        _remove_hub_files(folder)
    last = MANIFEST_NAME if (folder / MANIFEST_NAME).is_file() else JOURNAL_NAME
    kept = remove_folder(folder, lambda name: name in listed or is_store_name(name), last=last, links=is_streamed)
    if not kept:
        return
    if was is not None and was != folder:
        with suppress(OSError):  # another process has made one meanwhile
            folder.rename(was)
            folder = was
    names = ", ".join(f"{name!r:.80}" for name in kept[:3]) + (", ..." if len(kept) > 3 else "")
    logging.getLogger("expertly").warning("%s: kept, with what no store of ours has: %s", folder, names)


def _doomed(folder: Path) -> Path:
    """A name for the folder while it is removed. What an earlier removal left under it is removed first."""
    for number in count():
        path = folder.with_name(f"{folder.name}{f'-{number}' if number else ''}.removed")
        if is_ours(path):
            remove_in_place(path)
        if about_path(path) is None:
            return path
    raise AssertionError("numbers do not end")


def _lists(folder: Path, names: Sequence[str] = (MANIFEST_NAME, JOURNAL_NAME, MARK_NAME)) -> list[dict[str, Any]]:
    """The manifest, the journal and the list of a download, as far as the folder has them: objects with `files`."""
    lists = []
    for name in names:
        with suppress(StoreError):
            raw = read_json_object(folder / name, StoreError)
            if isinstance(raw.get("files"), dict) and type(raw.get("format_version")) is int:
                lists.append(raw)
    return lists


def _is_json(path: Path) -> bool:
    try:
        read_json_object(path, StoreError)
    except StoreError:
        return False
    return True


# -- downloads ---------------------------------------------------------------------------------------------------------


def begin_download(folder: Path, names: Iterable[str]) -> None:
    """Make the folder for files of the hub, with a list of their names; one that an earlier download left is used. Its
    other files stay. Raises OSError, and StoreError where it holds what no download left.
    """
    check_folder(folder)
    if folder.is_dir() and any(folder.iterdir()) and not ((folder / MARK_NAME).is_file() and is_ours(folder)):
        raise StoreError(f"{folder}: in the way, and not left by packing; move it, or choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Any] = {name: {} for name in sorted({*listed_names(folder), *names, MARK_NAME})}
    write_atomic(folder / MARK_NAME, json_bytes({"format_version": FORMAT_VERSION, "files": files}))
    for path in (folder / part for part in _HUB_FOLDERS):  # the hub's client would follow a link
        check_folder(path)


def _remove_hub_files(folder: Path) -> None:
    with suppress(OSError):
        for path in (folder / part for part in reversed(_HUB_FOLDERS)):
            check_folder(path)
        for path in (folder / part for part in _HUB_FOLDERS):
            remove_folder(path, lambda name: _HUB_NAMES.fullmatch(name) is not None)
