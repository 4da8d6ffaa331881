"""Types of command-line values: functions of the text whose ValueError says what is accepted."""

from __future__ import annotations

from collections.abc import Callable

from expertly.core.errors import ConfigError


def number(accepted: str, accepts: Callable[[float], bool]) -> Callable[[str], float]:
    """A type for numbers that `accepts` is true of; `accepted` is that condition in words."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not accepts(value):
            raise ValueError(accepted)
        return value

    return parse


temperature = number("0 (greedy), or from 0.0001", lambda value: value == 0 or 1e-4 <= value < float("inf"))
probability = number("above 0 and at most 1", lambda value: 0 < value <= 1)
share = number("from 0 to 1", lambda value: 0 <= value <= 1)
proper_share = number("above 0 and below 1", lambda value: 0 < value < 1)
seconds = number("seconds from 0 to 3600", lambda value: 0 <= value <= 3600)
exponent = number("from 0 to 10", lambda value: 0 <= value <= 10)


def seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) < 1 << 63):
        raise ValueError("a whole number from 0 to 2^63 - 1")
    return int(text)


def split(text: str) -> tuple[int, int]:
    """Two parts of a whole: `7:3`."""
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError("two whole numbers from 1, for instance 7:3")
    return int(parts[0]), int(parts[1])


def split_text(parts: tuple[int, int] | None) -> str | None:
    """`7:3`, as --split takes it."""
    return None if parts is None else f"{parts[0]}:{parts[1]}"


def whole_numbers(text: str) -> tuple[int, ...]:
    """Rising, each once: `1,2,4`."""
    parts = [part.strip() for part in text.split(",")]
    are_numbers = all(part.isascii() and part.isdecimal() and len(part) <= 4 for part in parts)
    if not are_numbers or not all(1 <= int(part) <= 4096 for part in parts) or len(set(parts)) > 64:
        raise ValueError("whole numbers from 1 to 4096 with commas between, for instance 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def duration(text: str) -> float:
    """Seconds of "300s", "300" or "5m"."""
    digits, scale = (text[:-1], {"s": 1.0, "m": 60.0}[text[-1]]) if text[-1:] in ("s", "m") else (text, 1.0)
    try:
        value = float(digits) * scale
    except ValueError:
        value = 0.0
    if not 1 <= value <= 86400:
        raise ValueError("from 1 second to a day, for instance 90s or 5m")
    return value


def names(field: str, text: str) -> list[str]:
    """The names in `lru,lfu`, in order and each once. Raises ConfigError naming `field`: the text may be a default,
    which no parser has seen.
    """
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise ConfigError(f"{field}={text!r}: must be one or more, with commas between them")
    return list(dict.fromkeys(found))
