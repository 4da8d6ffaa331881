"""Small files: written whole or not at all, JSON in and out, and what a user is told when the disk refuses."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from expertly.core.errors import ExpertlyError


@contextmanager
def disk_errors(folder: Path, doing: str, failure: type[ExpertlyError], other_folder: str) -> Iterator[None]:
    """Turn an OSError while writing below `folder` into a `failure` that says what the user can do; `other_folder`: how
    to choose another folder (" with --out").
    """
    try:
        yield
    except OSError as error:
        raise failure(f"{folder}: {doing} failed: {_reason(folder, error, other_folder)}") from error


def _reason(folder: Path, error: OSError, other_folder: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        try:
            free = f", {shutil.disk_usage(existing_parent(folder)).free} bytes are free"
        except OSError:
            free = ""
        return f"the disk is full{free}; make room (or choose another folder) and run again: what is done is kept"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"not writable ({error.strerror}); choose another folder{other_folder}"
    return error.strerror or str(error)


def existing_parent(path: Path) -> Path:
    """The nearest folder at or above `path` that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, as `replacing` does."""
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """An empty file that takes the place of `path` when the block ends, and is removed when it fails.

    After a crash `path` holds either all that was written or what it held before. Writers of the same path (threads or
    processes) wait for each other, and the last one wins. A killed writer leaves one hidden file, which the next one
    uses. A symbolic link stays: the file that it leads to is replaced.
    """
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    temporary = path.with_name(f".{path.name}.tmp")
    with _locked(temporary) as file:
        try:
            file.truncate()
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """The file at `path`, made where there is none, open, and nobody else's while the block runs."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o666), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                if _is_at(path, file):  # else another writer has renamed it in the meantime
                    yield file
                    return
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough where a forked child has it, too


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def json_bytes(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def finite(value: Any) -> Any:
    """`value` with null in place of NaN and infinities, which JSON cannot say, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def read_json_object(path: Path, error: type[ExpertlyError]) -> dict[str, Any]:
    """The JSON object in `path`; anything else raises `error` naming the file."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror})") from None
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as cause:
        raise error(f"{path}: not JSON ({cause})") from None
    if not isinstance(value, dict):
        raise error(f"{path}: holds a JSON {type(value).__name__}; must be an object")
    return value


def is_plain_name(name: object) -> bool:
    """Whether `name` is a file name and nothing that leads elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and not any(c in name for c in "/\\\0")
