"""The base of all policies: a name, a family, options with types, defaults, bounds and help.

Options are a frozen dataclass whose fields are made by `option`. Users write them as `key=value`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from operator import ge, gt, le, lt
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.policies.known import RoutingObserver

T = TypeVar("T")

NO_OPTIONS: Mapping[str, str] = MappingProxyType({})
_WORDS = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}


def option(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of an options dataclass: its default, what it means, and the bounds of a number."""
    bounds = {"least": least, "above": above, "most": most, "below": below}
    return field(default=default, metadata={"help": help, **bounds})


@dataclass(frozen=True)
class PolicyOptions:
    """Base of options dataclasses: checks the bounds that `option` gave. Raises ConfigError naming the field.

    A subclass that checks more overrides `__post_init__` and calls this one's first.
    """

    def __post_init__(self) -> None:
        for key in fields(self):
            check_bounds(key, getattr(self, key.name))


class Policy:
    """A policy is a class. The registry of its family finds it and reads these attributes, and those of the family."""

    name: ClassVar[str] = ""
    """Its name for users; a policy from outside the package is named by its path or entry point instead."""
    family: ClassVar[str] = ""
    """Which part of a system it is: "eviction", "prediction", ..."""
    options: ClassVar[type[Any]] = PolicyOptions
    """A dataclass of bool, int, float, str, Path or Literal fields, or of one of them or None."""

    @classmethod
    def parse(cls, texts: Mapping[str, str], beginning: str = "") -> Any:
        """The options, from what the user wrote. Raises ConfigError naming the key, its value and what is accepted;
        `beginning` is that of its message.
        """
        return parse_options(cls.options, texts, beginning or f"{cls.family}={cls.name or cls.__name__!r}")

    @classmethod
    def training(cls, geometry: Geometry) -> RoutingObserver | None:
        """What watches the training part of a trace for it, and is then in `Known.items`; None: nothing does."""
        return None


def parse_options(kind: type[T], texts: Mapping[str, str], beginning: str) -> T:
    """Make `kind`, an options dataclass, from texts; options that are not there have their defaults. `beginning` is
    that of messages. Raises ConfigError naming the key, its value and what is accepted.
    """
    accepted = {key.name: key for key in fields(kind) if key.init}  # type: ignore[arg-type]
    types_of = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, text in texts.items():
        if key not in accepted:
            names = f"accepted: {', '.join(accepted)}" if accepted else "there are none"
            raise ConfigError(f"{beginning}: option {key!r}: unknown; {names}")
        values[key] = _parsed(types_of[key], text, f"{beginning}: {key}={text!r:.80}")
    try:
        for key, value in values.items():  # of any dataclass, not of PolicyOptions alone
            check_bounds(accepted[key], value)
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{beginning}: {error}") from None


def option_names(kind: type[Any]) -> list[str]:
    """The keys that `parse_options` takes for `kind`."""
    return [key.name for key in fields(kind) if key.init]


def option_text(value: object) -> str:
    """The text of a parsed value; equal values have equal texts."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return repr(value) if isinstance(value, float) else str(value)


def describe_options(kind: type[Any]) -> dict[str, str]:
    """For each option its help, default and bounds."""
    texts, types_of = {}, get_type_hints(kind)
    for key in fields(kind):
        choices = get_args(types_of[key.name]) if get_origin(types_of[key.name]) is Literal else ()
        notes = (
            "" if key.default is None else f"default: {option_text(key.default)}",
            f"accepted: {', '.join(choices)}" if choices else "",
            _bounds(key),
        )
        in_brackets = ", ".join(filter(None, notes))
        texts[key.name] = f"{key.metadata.get('help', '')} ({in_brackets})" if in_brackets else key.metadata["help"]
    return texts


_HOLDS: Mapping[str, Callable[[Any, Any], bool]] = {"least": ge, "above": gt, "most": le, "below": lt}


def check_bounds(key: Field[Any], value: object) -> None:
    """Raises ConfigError where a number is outside its field's bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    for name, holds in _HOLDS.items():
        bound = key.metadata.get(name)
        if bound is not None and not holds(value, bound):  # NaN holds nothing
            raise ConfigError(f"{key.name}={value}: must be {_bounds(key)}")


def _bounds(key: Field[Any]) -> str:
    least, above, most, below = (key.metadata.get(name) for name in _HOLDS)
    if below is not None:
        return f"above {above} and below {below}"
    if most is not None:
        return f"from {least} to {most}" if above is None else f"above {above}, up to {most}"
    if above is not None:
        return f"above {above}"
    return "" if least is None else f"at least {least}"


def parse_int(text: str, name: str) -> int:
    """A whole number in decimal digits. Raises ConfigError that begins with `name`."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 18:
        raise ConfigError(f"{name}: must be a whole number")
    return int(text)


def _parsed(kind: Any, text: str, name: str) -> object:
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = [member for member in get_args(kind) if member is not type(None)]
    if kind is int:
        return parse_int(text, name)
    if kind in (str, Path):
        return kind(text)
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{name}: must be a number") from None
    if kind is not bool and get_origin(kind) is not Literal:
        accepted = "bool, int, float, str, Path, Literal of str, or None besides"
        raise ConfigError(f"{name}: an option of type {kind}; accepted: {accepted}")
    choices = _WORDS if kind is bool else {word: word for word in get_args(kind)}
    if text not in choices:
        raise ConfigError(f"{name}: {'' if kind is bool else 'unknown; '}accepted: {', '.join(choices)}")
    return choices[text]
