"""Files from outside: bounds on their kind, size, depth and lengths, checked before anything is built from them.

A checkpoint, a GGUF file, a store, learned state, a profile may come from anybody. Whoever reads such a file reads it
through this module, by the bounds of its kind of file, which stand here and nowhere else.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar, cast

from expertly.core.errors import ExpertlyError
from expertly.core.files import kind_of_file

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a kind of file may have at most."""

    nbytes: int
    depth: int = 32  # of lists and objects in each other
    items: int = 4096  # of a list or an object
    text: int = 4096  # characters of a string
    long: Mapping[str, int] = field(default_factory=dict)  # items, and of what is in it, of some fields of the object
    skipped: str = ""  # a field whose content is not looked at


# Released files have at most a fifth of each bound, vocabularies a third.
SMALL = Bounds(16 << 20, items=1 << 20, text=1 << 20)  # JSON and text files of no other kind
_LABELS = dict.fromkeys(("id2label", "label2id"), 1 << 17)
_QUANTIZED = dict.fromkeys(("quantization_config", "compression_config", "quantization"), 1 << 17)  # of each tensor
CONFIG = Bounds(16 << 20, text=1 << 18, long=_LABELS | _QUANTIZED)  # config.json: some lists are of all layers
GENERATION = Bounds(1 << 20)  # generation_config.json
INDEX = Bounds(128 << 20, items=1 << 21)  # model.safetensors.index.json: an entry for each tensor
HEADER = Bounds(32 << 20, items=1 << 18, depth=4, text=1 << 20)  # of a safetensors file: an entry for each tensor
# The header of a GGUF file; `items`: texts in all its lists. Vocabularies have up to 780000, tokens and merges; the
# longest text is a chat template.
GGUF = Bounds(100_000_000, depth=1, items=1 << 21, text=1 << 20)
MAX_NAME = 512  # characters of a tensor's name
MAX_DIMENSIONS = 64  # of a tensor: torch has no more
# tokenizer_config.json and the small files beside it: added tokens and chat templates
TOKENIZER_CONFIG = Bounds(16 << 20, items=1 << 14, text=1 << 20)
# tokenizer.json, sentencepiece's model and other files with an entry for each token. Those that are added take long;
# those of `model` are checked where they are read, and looking at each would take as long.
VOCABULARY = Bounds(96 << 20, text=1 << 20, long={"added_tokens": 1 << 15}, skipped="model")
# What tokenizer.json has beside the vocabulary: the longest text is a regular expression.
TOKENIZER_PART = Bounds(0, items=256, text=1 << 13)
TEMPLATE = Bounds(1 << 20)  # a chat template
LEARNED = Bounds(1 << 36, depth=8, items=1 << 16)  # a file of what a policy learned, and the JSON in its header
PROFILE = Bounds(1 << 20)  # a description of a machine or a model in TOML

_FILES_OF_A_MODEL = {
    "config.json": CONFIG,
    "generation_config.json": GENERATION,
    **dict.fromkeys(("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"), TOKENIZER_CONFIG),
    "*.jinja": TEMPLATE,
    **dict.fromkeys(
        (
            *("tokenizer.*", "tekken.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "*.spm"),
            *("*.vocab", "emoji.json", "bpe.codes", "dict.txt"),
        ),
        VOCABULARY,
    ),
}
"""Files in a model's folder that transformers opens by itself; the first pattern that fits."""

_TEMPLATES = "additional_chat_templates"

_POINTER = b"version https://git-lfs"
_POINTER_NBYTES = 1024
"""Beginning, and most bytes, of what git leaves in place of a large file that was not downloaded."""


def open_file(path: Path, failure: type[ExpertlyError]) -> FileIO:
    """Open a regular file, or a link to one, for reading. Raises `failure` naming the file; it never waits, as opening
    a pipe would, and opens no device.
    """
    try:
        _check_kind(path, os.stat(path), failure)
        file = FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        try:
            about = os.fstat(file.fileno())
            _check_kind(path, about, failure)  # it may have been replaced in between
            if about.st_size < _POINTER_NBYTES and os.pread(file.fileno(), len(_POINTER), 0) == _POINTER:
                raise failure(f"{path}: is a git-lfs pointer, not the file: run git lfs pull")
        except BaseException:
            file.close()
            raise
        return file
    except (FileNotFoundError, NotADirectoryError):
        raise failure(f"{path}: no such file") from None
    except (OSError, ValueError) as cause:
        raise failure(f"{path}: cannot be read ({getattr(cause, 'strerror', None) or cause})") from None


@contextmanager
def reading(path: Path, failure: type[ExpertlyError]) -> Iterator[FileIO]:
    """`open_file`, while the block runs. Where reading it fails there, raises `failure`, too."""
    with open_file(path, failure) as file:
        try:
            yield file
        except OSError as cause:
            raise failure(f"{path}: cannot be read ({cause.strerror or cause})") from None


def check_model_files(folder: Path, failure: type[ExpertlyError]) -> None:
    """Check kind, size, depth and lengths of all files of a model's folder that transformers opens by itself, before it
    does. Raises `failure` naming the file.
    """
    try:
        names = sorted(os.listdir(folder))
        if _TEMPLATES in names and (folder / _TEMPLATES).is_dir():
            names += [f"{_TEMPLATES}/{name}" for name in sorted(os.listdir(folder / _TEMPLATES))]
    except OSError as cause:
        raise failure(f"{folder}: cannot be read ({cause.strerror or cause})") from None
    for name in names:
        bounds = next((bounds for pattern, bounds in _FILES_OF_A_MODEL.items() if fnmatchcase(name, pattern)), None)
        if bounds is not None and bounds is not VOCABULARY and name.endswith(".json"):
            read_json_object(folder / name, failure, bounds)
        elif bounds is not None:  # a vocabulary takes as long to parse as to use
            with open_file(folder / name, failure) as file:
                _check_size(folder / name, file, bounds, failure)


def read_file(path: Path, bounds: Bounds, failure: type[ExpertlyError]) -> bytes:
    """All bytes of a file. Raises `failure` naming the file, also where it is longer than `bounds` say."""
    with reading(path, failure) as file:
        _check_size(path, file, bounds, failure)
        raw = file.read(bounds.nbytes + 1)
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


OWN_FILE = {"extra": "forbid", "allow_inf_nan": False, "str_max_length": 4096}
"""The `__pydantic_config__` of a dataclass that is a whole file of expertly's own; the dataclasses in it follow it."""


def read_as(kind: type[T], path: Path, failure: type[ExpertlyError], hint: str = "", bounds: Bounds = SMALL) -> T:
    """The JSON file at `path` as `kind`: see `parse_as`."""
    try:
        text = read_text(path, bounds, failure)
    except failure as error:
        raise failure(f"{error}{hint}") from None
    return parse_as(kind, text, str(path), failure, hint)


def parse_as(kind: type[T], text: str, name: str, failure: type[ExpertlyError], hint: str = "") -> T:
    """JSON as `kind`, a dataclass whose annotations may bound its fields. Nothing is converted: a "1" is no number.
    Raises `failure` saying `name`, the field, its value, what is accepted and then `hint`.
    """
    with _saying(name, failure, hint):
        read: T = _adapter(cast(Hashable, kind)).validate_json(text, strict=True)
        return read


def value_as(kind: type[T], value: Any, name: str, failure: type[ExpertlyError]) -> T:
    """`parse_as` for a value that was JSON."""
    with _saying(name, failure):
        read: T = _adapter(cast(Hashable, kind)).validate_python(value, strict=True)
        return read


@contextmanager
def _saying(name: str, failure: type[ExpertlyError], hint: str = "") -> Iterator[None]:
    from pydantic import ValidationError  # a tenth of a second to import, and only files need it

    try:
        yield
        return
    except ValidationError as error:
        errors = error.errors(include_url=False)
    first = next((each for each in errors if each["loc"] == ("format_version",)), errors[0])  # explains the others
    said = first["msg"].removeprefix("Value error, ").replace("Input should", "must").replace("should", "must")
    parts = [f"[{part}]" if isinstance(part, int) else f".{part:.80}" for part in first["loc"]]
    if first["type"] not in ("missing", "json_invalid"):
        parts.append(f"={first['input']!r:.80}")
    said = f"{''.join(parts).lstrip('.=')}: {said.replace('Invalid JSON', 'not JSON')}".removeprefix(": ")
    raise failure(f"{name}: {said}{hint}")


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def check_value(value: Any, name: str, bounds: Bounds, failure: type[ExpertlyError]) -> None:
    """Raises `failure` where a value as JSON has it nests deeper, or has a longer list, object or string, than `bounds`
    say; `name` is what the message calls it.
    """
    left: list[tuple[Any, tuple[str, ...]]] = [(value, ())] if isinstance(value, str | dict | list) else []
    while left:
        item, path = left.pop()
        most = (
            bounds.text if isinstance(item, str) else bounds.long.get(path[0], bounds.items) if path else bounds.items
        )
        if len(item) > most or len(path) > bounds.depth:
            names = ".".join(path)[:80]
            said = f"{len(item)} {'characters' if isinstance(item, str) else 'entries'}; accepted: {most}"
            if len(path) > bounds.depth:
                said = f"nests deeper than {bounds.depth} levels"
            raise failure(f"{name}: {f'{names}: ' if names else ''}{said}")
        inner = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
        left += [
            (part, (*path, str(key)))
            for key, part in inner
            if isinstance(part, str | dict | list) and (path or key != bounds.skipped)
        ]


def is_plain_name(name: object) -> bool:
    """Whether `name` is a file name that does not lead elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and not any(c in name for c in "/\\\0")


def _check_kind(path: Path, about: os.stat_result, failure: type[ExpertlyError]) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise failure(f"{path}: {kind_of_file(about.st_mode)}; must be a file")


def _check_size(path: Path, file: FileIO, bounds: Bounds, failure: type[ExpertlyError]) -> None:
    nbytes = os.fstat(file.fileno()).st_size
    if nbytes > bounds.nbytes:
        raise failure(f"{path}: {nbytes} bytes; accepted: {bounds.nbytes}")
