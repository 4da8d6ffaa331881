"""Types of command-line values: each says what it accepts."""

from __future__ import annotations

import argparse
from typing import Any

from expertly.core.errors import ConfigError


def positive_int(text: str) -> int:
    return int(_number(text, int, lambda value: value >= 1, "a whole number from 1"))


def count(text: str) -> int:
    return int(_number(text, int, lambda value: value >= 0, "a whole number from 0"))


def seed(text: str) -> int:
    return int(_number(text, int, lambda value: 0 <= value < 1 << 63, "a whole number from 0 to 2^63 - 1"))


def temperature(text: str) -> float:
    return float(_number(text, float, lambda value: 0 <= value < float("inf"), "0 (greedy) or more"))


def probability(text: str) -> float:
    return float(_number(text, float, lambda value: 0 < value <= 1, "above 0 and at most 1"))


def share(text: str) -> float:
    return float(_number(text, float, lambda value: 0 <= value <= 1, "from 0 to 1"))


def proper_share(text: str) -> float:
    return float(_number(text, float, lambda value: 0 < value < 1, "above 0 and below 1"))


def seconds(text: str) -> float:
    return float(_number(text, float, lambda value: 0 <= value <= 3600, "seconds from 0 to 3600"))


def exponent(text: str) -> float:
    return float(_number(text, float, lambda value: 0 <= value <= 10, "from 0 to 10"))


def split(text: str) -> tuple[int, int]:
    """Two parts of a whole: `7:3`."""
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: must be two whole numbers from 1, for instance 7:3")
    return int(parts[0]), int(parts[1])


def distances(text: str) -> tuple[int, ...]:
    """Layers ahead: `1,2,4`."""
    parts = [part.strip() for part in text.split(",")]
    are_numbers = all(part.isascii() and part.isdecimal() and len(part) <= 4 for part in parts)
    if not are_numbers or not all(1 <= int(part) <= 4096 for part in parts) or len(set(parts)) > 64:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be whole numbers from 1 to 4096 with commas between, for instance 1,2,4"
        )
    return tuple(sorted({int(part) for part in parts}))


def names(field: str, text: str) -> list[str]:
    """`lru,lfu`: each once, in order. Raises ConfigError, as it may be asked with a default."""
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise ConfigError(f"{field}={text!r}: must be one or more, with commas between them")
    return list(dict.fromkeys(found))


def _number(text: str, convert: Any, accepts: Any, accepted: str) -> Any:
    try:
        value = convert(text)
    except ValueError:
        value = None
    if value is None or not accepts(value):
        raise argparse.ArgumentTypeError(f"{text!r}: must be {accepted}")
    return value
