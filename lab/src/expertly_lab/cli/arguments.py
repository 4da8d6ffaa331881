"""Types of the lab's command-line values, as in `expertly.options`."""

from __future__ import annotations

from expertly.options import checked

share = checked(float, "from 0 to 1", lambda value: 0 <= value <= 1)
exponent = checked(float, "from 0 to 10", lambda value: 0 <= value <= 10)


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
