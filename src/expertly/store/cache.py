"""The cache folder: packed stores made at first use, by the identity of what they were made of."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from expertly.core.errors import ConfigError, StoreError
from expertly.store.files import disk_errors
from expertly.store.manifest import Manifest
from expertly.store.packed import is_packed_store, stored_ratio

CACHE_VARIABLE = "EXPERTLY_CACHE"


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
    """Where the cached stores are."""
    return (cache_dir or cache_folder()) / "stores"


_PLANES = "-planes"


def entry_folder(
    model_type: str, identity: str, dtype: str, cache_dir: Path | None = None, codec: str = "none"
) -> Path:
    """Where the store of a checkpoint in a dtype and a codec belongs."""
    label = re.sub(r"[^A-Za-z0-9_-]", "_", model_type)[:40]
    return stores_folder(cache_dir) / f"{label}-{identity[:16]}-{dtype}{_PLANES if codec == 'planes' else ''}"


LEARNED = ("maps", "matrices", "reuse", "predictor", "choices")
"""What is learned about a model, beside its store, a file each: expert maps, activation matrices, what is used again, a
predictor, what `expertly tune` chose.
"""


def learned_beside(folder: Path, kind: str) -> Path:
    """The file of what was learned about the model of a store, of a kind of LEARNED. It may not exist.

    Stores of one model and dtype share it, whatever their codec.
    """
    assert kind in LEARNED
    folder = folder.absolute()
    return folder.with_name(f"{folder.name.removesuffix(_PLANES)}.{kind}")


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A store in the cache, or what is left of one that was not finished or cannot be read (`problem`)."""

    name: str
    folder: Path
    nbytes: int
    source: str
    model_type: str
    dtype: str
    codec: str
    ratio: float  # stored bytes of experts / bytes that they are computed with
    problem: str | None


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
    """Remove the entry of that name, or the only one whose name or source starts or ends with it, and what was learned
    about its model, unless a store of the model in another codec is left.

    A store that a model has open goes on working until it is closed. Raises ConfigError where none or several
    match, StoreError where another process is packing it or it cannot be removed.
    """
    entries = list_entries(cache_dir)
    found = [entry for entry in entries if entry.name == name]
    if not found and name:
        found = [entry for entry in entries if entry.name.startswith(name) or _is_source(entry, name)]
    if len(found) != 1:
        accepted = ", ".join(entry.name for entry in found or entries) or "none, the cache is empty"
        what = "matches several" if found else "no such cached store"
        raise ConfigError(f"remove={name!r}: {what}; accepted: {accepted}")
    entry = found[0]
    lock = _lock_of(entry.folder)
    try:
        with disk_errors(entry.folder, "removing it"):
            # Under another name first: a removal that is interrupted must not leave a store that seems whole.
            doomed = entry.folder.with_name(f"{entry.folder.name.removesuffix('.removed')}.removed")
            if doomed != entry.folder:
                if doomed.exists():
                    shutil.rmtree(doomed)
                entry.folder.rename(doomed)
            shutil.rmtree(doomed)
            kept = entry.folder.with_name(_other_codec(entry.folder.name)).is_dir()
            for kind in () if kept else LEARNED:
                learned_beside(entry.folder, kind).unlink(missing_ok=True)
    finally:
        if lock >= 0:
            os.close(lock)
    return entry


def _other_codec(name: str) -> str:
    return name.removesuffix(_PLANES) if name.endswith(_PLANES) else name + _PLANES


def _is_source(entry: CacheEntry, name: str) -> bool:
    return bool(entry.source) and (entry.source == name or entry.source == os.path.abspath(name))


def _entry(path: Path) -> CacheEntry:
    nbytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    if not is_packed_store(path):
        problem = (
            "unfinished: packing the model again completes it" if path.suffix == ".partial" else "not a whole store"
        )
        return CacheEntry(path.name, path, nbytes, "", "", "", "", 1.0, problem)
    try:
        manifest = Manifest.read(path)
    except StoreError as error:
        return CacheEntry(path.name, path, nbytes, "", "", "", "", 1.0, str(error))
    about = (manifest.source, manifest.model_type, manifest.dtype, manifest.codec, stored_ratio(manifest))
    return CacheEntry(path.name, path, nbytes, *about, None)


def _lock_of(folder: Path) -> int:
    """Hold the lock of an unfinished store, so that it is not removed under a process that writes it."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise StoreError(f"{folder}: another process is packing it; end that first") from None
    return fd
