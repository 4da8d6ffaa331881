"""TOML files read strictly: every key is known and has the right type and range, or the error names it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from expertly.core.errors import HardwareError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_NUMBER = 10**18
MAX_FILE_NBYTES = 1 << 20


class Table:
    """One table of a file. Keys are taken one by one; `end` refuses those that nobody took.

    All methods raise HardwareError naming the file, the key, its value and what is accepted.
    """

    def __init__(self, where: str, raw: Mapping[str, Any], prefix: str = "") -> None:
        self.where = where
        self._raw = raw
        self._prefix = prefix
        self._taken: list[str] = []

    @classmethod
    def read(cls, path: Path) -> Table:
        try:
            with path.open("rb") as file:
                text = file.read(MAX_FILE_NBYTES + 1)
        except OSError as error:
            raise HardwareError(f"{path}: cannot be read ({error.strerror})") from None
        if len(text) > MAX_FILE_NBYTES:
            raise HardwareError(f"{path}: more than {MAX_FILE_NBYTES} bytes: not a description")
        try:
            return cls(str(path), tomllib.loads(text.decode()))
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError and TOMLDecodeError are ValueErrors
            raise HardwareError(f"{path}: not TOML ({error})") from None

    def fail(self, key: str, accepted: str) -> HardwareError:
        """The error of a key whose value was read."""
        return HardwareError(f"{self.where}: {self._prefix}{key}={self._raw.get(key)!r:.80}: {accepted}")

    def has(self, key: str) -> bool:
        return key in self._raw

    def text(self, key: str) -> str:
        value = self._take(key)
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise self.fail(key, "must be a string of one line that is not empty")
        return value

    def whole(self, key: str, least: int = 0) -> int:
        """A whole number."""
        value = self._take(key)
        if not _is_whole(value, least):
            raise self.fail(key, f"must be a whole number from {least} to {MAX_NUMBER:.0e}")
        return int(value)

    def rate(self, key: str, can_be_infinite: bool = False) -> float:
        """A number a second, from 1."""
        value = self._take(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (1 <= value <= MAX_NUMBER or (can_be_infinite and value == math.inf)):
            more = " or inf" if can_be_infinite else ""
            raise self.fail(key, f"must be a number from 1 to {MAX_NUMBER:.0e}{more}")
        return float(value)

    def factor(self, key: str, least: float, most: float, can_be_zero: bool = False) -> float:
        """A number from `least` (0 left out, unless it `can_be_zero`) to `most`."""
        value = self._take(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most or not (value or can_be_zero):
            begin = f"from {least:g}" if least or can_be_zero else "above 0"
            raise self.fail(key, f"must be a number {begin} to {most:g}")
        return float(value)

    def wholes(self, key: str, length: int | None = None, least: int = 0) -> tuple[int, ...]:
        """A list of whole numbers, at least one."""
        values = self._take(key)
        if not isinstance(values, list) or not values or not all(_is_whole(value, least) for value in values):
            raise self.fail(key, f"must be a list of whole numbers from {least} to {MAX_NUMBER:.0e}")
        if length is not None and len(values) != length:
            raise self.fail(key, f"must have {length} numbers, has {len(values)}")
        return tuple(values)

    def table(self, key: str) -> Table:
        value = self._take(key)
        if not isinstance(value, dict):
            raise self.fail(key, "must be a table")
        return Table(self.where, value, f"{self._prefix}{key}.")

    def end(self) -> None:
        """Nothing else may be in this table."""
        unknown = [key for key in self._raw if key not in self._taken]
        if unknown:
            raise self.fail(unknown[0], f"unknown key; accepted: {', '.join(self._taken)}")

    def _take(self, key: str) -> Any:
        self._taken.append(key)
        if key not in self._raw:
            raise HardwareError(f"{self.where}: lacks {self._prefix}{key}")
        return self._raw[key]


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_NUMBER


def write_toml(path: Path, comments: Sequence[str], values: Mapping[str, Any]) -> None:
    """Replace `path` atomically by strings, numbers, lists of them and tables, None left out. Raises HardwareError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    text = "".join(f"# {' '.join(line.split())}\n" for line in comments) + "\n".join(_lines(values, "")) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise HardwareError(f"{path}: cannot be written ({error.strerror})") from None


def _lines(values: Mapping[str, Any], prefix: str) -> list[str]:
    here = {key: value for key, value in values.items() if value is not None}
    lines = [f"{key} = {_literal(value)}" for key, value in here.items() if not isinstance(value, Mapping)]
    for key, value in here.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{prefix}{key}]", *_lines(value, f"{prefix}{key}.")]
    return lines


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the escapes of JSON are TOML's
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_literal, value))}]"
    return repr(value)
