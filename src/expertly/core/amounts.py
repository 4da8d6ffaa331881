"""Amounts of memory as users write them."""

from __future__ import annotations

import re

from expertly.core.errors import BudgetError, ConfigError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%|[a-z]*)\s*", re.IGNORECASE)


def parse_memory(memory: str | int, expert_nbytes: int) -> int | None:
    """Bytes of `"25%"` (of the experts), `"1.5GiB"` or a number of bytes; None for `"auto"`. Raises ConfigError."""
    if memory == "auto":
        return None
    match = _AMOUNT.fullmatch(str(memory))
    unit = match.group(2).lower() if match else None
    if match is None or (unit != "%" and unit not in _UNITS):
        raise ConfigError(f'memory={memory!r}: accepted are a share ("25%"), an amount ("1.5GiB", "800MB") and "auto"')
    amount = float(match.group(1))
    nbytes = int(expert_nbytes * amount / 100) if unit == "%" else int(amount * _UNITS[unit])
    if nbytes < 1:
        raise BudgetError(f"memory={memory!r}: no memory at all; state at least one expert's bytes")
    return nbytes
