"""Small files: written completely or not at all, JSON values as dataclasses, and messages for when the disk refuses.

`core/untrusted.py` reads them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO, Union, get_args, get_origin, get_type_hints

from expertly.core.errors import ExpertlyError

MAX_TEXT = 4096
"""Characters of a text that `from_json` takes."""


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
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return f"not writable ({error.strerror}); choose another folder{other_folder}"
    return error.strerror or str(error)


def existing_parent(path: Path) -> Path:
    """The nearest existing folder at or above `path`."""
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
    """The file at `path`, made where it is missing, open, and locked while the block runs."""
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
    """`value` with null in place of NaN and infinities, which JSON does not have, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def from_json(kind: Any, raw: Any, where: str, error: type[ExpertlyError]) -> Any:
    """`raw`, from a JSON file, as `kind`: a dataclass, tuple[X, ...], dict[str, X], a union or a plain type. A class
    with `from_dict` reads itself; keys that are no fields are ignored.

    Raises `error` naming the field, its value and what is accepted; `where` is the name of `raw`.
    """
    if hasattr(kind, "from_dict"):
        return kind.from_dict(raw)
    if is_dataclass(kind):
        names = [one.name for one in fields(kind)]
        if not isinstance(raw, dict) or not raw.keys() >= set(names):
            raise error(f"{where}={raw!r:.80}: must be an object of {', '.join(names)}")
        hints = get_type_hints(kind)
        return kind(**{name: from_json(hints[name], raw[name], f"{where}.{name}", error) for name in names})  # type: ignore[operator]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if raw is None and NoneType in arguments:
            return None
        kinds = [one for one in arguments if one is not NoneType]
        fitting = kinds if len(kinds) == 1 else [one for one in kinds if one is type(raw)]
        if not fitting:
            raise error(f"{where}={raw!r:.80}: must be {' or '.join(_PLAIN[one] for one in kinds)}")
        return from_json(fitting[0], raw, where, error)
    if origin is tuple:
        if not isinstance(raw, list):
            raise error(f"{where}={raw!r:.80}: must be a list")
        return tuple(from_json(arguments[0], item, f"{where}[{i}]", error) for i, item in enumerate(raw))
    if origin is dict:
        if not isinstance(raw, dict):
            raise error(f"{where}={raw!r:.80}: must be an object")
        return {name: from_json(arguments[1], item, f"{where}.{name:.80}", error) for name, item in raw.items()}
    if kind is float and type(raw) in (int, float) and math.isfinite(raw):
        return float(raw)
    if type(raw) is kind and kind is not float and (kind is not str or len(raw) <= MAX_TEXT):
        return raw
    raise error(f"{where}={raw!r:.80}: must be {_PLAIN[kind]}")


_PLAIN = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: f"a string of at most {MAX_TEXT} characters",
}
