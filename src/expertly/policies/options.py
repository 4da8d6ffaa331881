"""Options of a part as a user writes them, `key=value`, to the frozen dataclass that the part takes."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from expertly.core.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Of a part that has none."""


NO_OPTIONS: Mapping[str, str] = MappingProxyType({})

_WORDS = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}


def parse_options(kind: type[T], values: Mapping[str, str], where: str) -> T:
    """Make `kind`, a dataclass whose fields are bool, int, float, Literal of str, or one of them or None (which only a
    default says), from texts; what is not given is as the dataclass has it. `where` begins messages. Raises ConfigError
    naming the key, its value and what is accepted; ranges are for the dataclass to check when it is made.
    """
    names = option_names(kind)
    types_of = get_type_hints(kind)
    given: dict[str, Any] = {}
    for key, text in values.items():
        if key not in names:
            accepted = f"accepted: {', '.join(names)}" if names else "there are none"
            raise ConfigError(f"{where}: option {key!r}: unknown; {accepted}")
        given[key] = _parsed(types_of[key], text, f"{where}: {key}={text!r:.80}")
    try:
        return kind(**given)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def option_names(kind: type[Any]) -> list[str]:
    """The keys that `parse_options` takes for `kind`."""
    return [field.name for field in fields(kind) if field.init]


def option_text(value: object) -> str:
    """How a parsed value is written, so that equal values read the same."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return repr(value) if isinstance(value, float) else str(value)


def _parsed(kind: Any, text: str, what: str) -> object:
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = [one for one in get_args(kind) if one is not type(None)]
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if text not in choices:
            raise ConfigError(f"{what}: unknown; accepted: {', '.join(choices)}")
        return text
    if kind is bool:
        if text not in _WORDS:
            raise ConfigError(f"{what}: accepted: {', '.join(_WORDS)}")
        return _WORDS[text]
    if kind is int:
        return parse_int(text, what)
    if kind is not float:
        raise ConfigError(
            f"{what}: an option of type {kind}; accepted: bool, int, float, Literal of str, or None besides"
        )
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{what}: must be a number") from None


def parse_int(text: str, what: str) -> int:
    """A whole number in decimal digits. Raises ConfigError."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 18:
        raise ConfigError(f"{what}: must be a whole number")
    return int(text)
