"""Types of command-line values: each says what it accepts."""

from __future__ import annotations

import argparse
from typing import Any


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


def exponent(text: str) -> float:
    return float(_number(text, float, lambda value: 0 <= value <= 10, "from 0 to 10"))


def split(text: str) -> tuple[int, int]:
    """Two parts of a whole: `7:3`."""
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: must be two whole numbers from 1, for instance 7:3")
    return int(parts[0]), int(parts[1])


def _number(text: str, convert: Any, accepts: Any, accepted: str) -> Any:
    try:
        value = convert(text)
    except ValueError:
        value = None
    if value is None or not accepts(value):
        raise argparse.ArgumentTypeError(f"{text!r}: must be {accepted}")
    return value
