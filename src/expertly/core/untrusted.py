"""Files from outside: bounds on their kind, size, depth and lengths, checked before anything is built from them.

A checkpoint, a GGUF file, a store, learned state, a profile may come from anybody. Whoever reads such a file reads it
through this module, by the bounds of its kind of file, which stand here and nowhere else.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from expertly.core.errors import ExpertlyError


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a kind of file may have at most."""

    nbytes: int
    depth: int = 32  # of lists and objects in each other
    items: int = 4096  # of a list or an object
    text: int = 4096  # characters of a string

    # Released files have at most a fifth of each bound.


SMALL = Bounds(16 << 20, items=1 << 20, text=1 << 20)
"""JSON and text files of no other kind."""

CONFIG = Bounds(4 << 20, items=1 << 16)
"""`config.json`: the longest list is a label for each class, the longest text a chat template that got in there."""

INDEX = Bounds(128 << 20, items=1 << 21)
"""`model.safetensors.index.json`: an entry for each tensor."""

GGUF = Bounds(100_000_000, depth=1, items=1 << 21, text=1 << 20)
"""The header of a GGUF file; `items`: texts in all its lists. Vocabularies have up to 780000, tokens and merges; the
longest text is a chat template.
"""


def open_file(path: Path, failure: type[ExpertlyError]) -> FileIO:
    """Open a regular file, or a link to one, for reading. Raises `failure` naming the file; it never waits, as opening
    a pipe would, and opens no device.
    """
    try:
        _check_kind(path, os.stat(path), failure)
        file = FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        try:
            _check_kind(path, os.fstat(file.fileno()), failure)  # it may have been replaced in between
        except BaseException:
            file.close()
            raise
        return file
    except (FileNotFoundError, NotADirectoryError):
        raise failure(f"{path}: no such file") from None
    except (OSError, ValueError) as cause:
        raise failure(f"{path}: cannot be read ({getattr(cause, 'strerror', None) or cause})") from None


def read_file(path: Path, bounds: Bounds, failure: type[ExpertlyError]) -> bytes:
    """All bytes of a file. Raises `failure` naming the file, also where it is longer than `bounds` say."""
    with open_file(path, failure) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > bounds.nbytes:
            raise failure(f"{path}: {nbytes} bytes; accepted: {bounds.nbytes}")
        try:
            raw = file.read(bounds.nbytes + 1)
        except OSError as cause:
            raise failure(f"{path}: cannot be read ({cause.strerror or cause})") from None
    if len(raw) > bounds.nbytes:  # it grew
        raise failure(f"{path}: more than {bounds.nbytes} bytes; accepted: {bounds.nbytes}")
    return raw


def read_text(path: Path, bounds: Bounds, failure: type[ExpertlyError]) -> str:
    """A file's text, in UTF-8. Raises `failure` naming the file."""
    try:
        return read_file(path, bounds, failure).decode("utf-8")
    except UnicodeDecodeError as cause:
        raise failure(f"{path}: is no text in UTF-8 ({cause.reason} at byte {cause.start})") from None


def read_json_object(path: Path, failure: type[ExpertlyError], bounds: Bounds = SMALL) -> dict[str, Any]:
    """The JSON object in a file. Raises `failure` naming the file, and the field that is beyond `bounds`."""
    try:
        value = json.loads(read_text(path, bounds, failure).removeprefix("\ufeff"))
    except (ValueError, RecursionError) as cause:
        raise failure(f"{path}: not JSON ({cause})") from None
    if not isinstance(value, dict):
        raise failure(f"{path}: holds a JSON {type(value).__name__}; must be an object")
    check_value(value, str(path), bounds, failure)
    return value


def check_value(value: Any, name: str, bounds: Bounds, failure: type[ExpertlyError]) -> None:
    """Raises `failure` where a value as JSON has it nests deeper, or has a longer list, object or string, than `bounds`
    say; `name` is what the message calls it.
    """
    left: list[tuple[Any, tuple[str, ...]]] = [(value, ())]
    while left:
        item, path = left.pop()
        if not isinstance(item, str | dict | list):
            continue
        most = bounds.text if isinstance(item, str) else bounds.items
        if len(item) > most or len(path) > bounds.depth:
            field = ".".join(path)[:80]
            said = f"{len(item)} {'characters' if isinstance(item, str) else 'entries'}; accepted: {most}"
            if len(path) > bounds.depth:
                said = f"nests deeper than {bounds.depth} levels"
            raise failure(f"{name}: {f'{field}: ' if field else ''}{said}")
        if isinstance(item, dict):
            left += [(inner, (*path, str(key))) for key, inner in item.items() if isinstance(inner, str | dict | list)]
        elif isinstance(item, list):
            left += [(inner, (*path, str(at))) for at, inner in enumerate(item) if isinstance(inner, str | dict | list)]


def is_plain_name(name: object) -> bool:
    """Whether `name` is a file name that does not lead elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and not any(c in name for c in "/\\\0")


def _check_kind(path: Path, about: os.stat_result, failure: type[ExpertlyError]) -> None:
    if not stat.S_ISREG(about.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise failure(f"{path}: {kinds.get(stat.S_IFMT(about.st_mode), 'a device')}; must be a file")
