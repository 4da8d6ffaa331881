"""Numbers as people read them, in every command, report and page: three significant digits and a unit. "-" stands for
what is unknown or not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def format_seconds(seconds: float | None) -> str:
    """`8.12 ms`."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds == 0:
        return "0 s"
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if abs(seconds) < limit:
            return f"{_digits(seconds * scale)} {unit}"
    return f"{_digits(seconds)} s"


def format_nbytes(nbytes: float | None) -> str:
    """`1.50 GiB`, `2 GiB`: binary units, as --memory takes them."""
    if nbytes is None or not math.isfinite(nbytes):
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{int(nbytes) if nbytes == int(nbytes) else _digits(nbytes)} {unit}"
        nbytes /= 1024
    return f"{_digits(nbytes)} TiB"


def format_rate(nbytes_per_s: float | None) -> str:
    """`3.21 GB/s`: decimal, as makers of disks and links write it."""
    return "-" if nbytes_per_s is None or not math.isfinite(nbytes_per_s) else f"{nbytes_per_s / 1e9:.2f} GB/s"


def format_share(share: float | None) -> str:
    """`65.2%`."""
    return "-" if share is None or not math.isfinite(share) else f"{100 * share:.1f}%"


def format_ratio(ratio: float | None, places: int = 2) -> str:
    """`0.93x`."""
    return "-" if ratio is None or not math.isfinite(ratio) else f"{ratio:.{places}f}x"


def format_number(value: float | None) -> str:
    """`8.12`, `592`: of what has no unit, or one that is told beside it."""
    return "-" if value is None or not math.isfinite(value) else _digits(value)


def format_range(write: Callable[[float], str], low: float, high: float) -> str:
    """`39.8 to 79.1 ms`, `5.0 to 7.1%`: the unit once, where it is the same."""
    first, last = write(low), write(high)
    unit = first.lstrip("-.0123456789")
    return f"{first.removesuffix(unit)} to {last}" if unit and last.endswith(unit) else f"{first} to {last}"


def counted(num: int, noun: str) -> str:
    """`1 request`, `2 requests`."""
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


def _digits(value: float) -> str:
    if value == 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(places, 2)}f}"
