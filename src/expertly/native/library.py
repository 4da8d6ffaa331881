"""Finds the compiled products, where there are any that run here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch  # first: the library takes part in its OpenMP

MAX_TOKENS = 4
"""Most tokens of one product; of the `generic` one, whose vectors are short, 1 (docs/log.md)."""

BFLOAT16, FLOAT16, FLOAT32 = range(3)
VERSION = 1
"""Of the interface that is called here; native/products.c says the same number."""

_NAMES = ("expertly_products_dots", "expertly_products_sums")
_INT, _LONG, _ADDRESS = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p


@dataclass(frozen=True)
class Library:
    """The compiled products for one instruction set. Both functions let go of the interpreter lock, and return 0, or -1
    where memory is short or the request is not one of theirs; see native/products.c for their arguments.
    """

    name: str  # of the instruction set
    level: int
    has_half: bool  # takes float16
    has_threads: bool  # has found torch's OpenMP
    dots: Callable[..., int]
    sums: Callable[..., int]

    @property
    def max_tokens(self) -> int:
        """Most tokens of a product for which it is worth while."""
        return 1 if self.name == "generic" else MAX_TOKENS

    @property
    def dtypes(self) -> dict[torch.dtype, int]:
        """What it multiplies, by its own numbers."""
        half = {torch.float16: FLOAT16} if self.has_half else {}
        return {torch.bfloat16: BFLOAT16, **half, torch.float32: FLOAT32}


@cache
def libraries(folder: Path = Path(__file__).parent) -> tuple[Sequence[Library], str]:
    """All that run here, from the fastest down, and where there is none, why."""
    found = sorted(folder.glob("_products*.so"))
    if not found:
        return (), "not compiled: there was no C compiler when expertly was installed"
    try:
        library = ctypes.CDLL(str(found[0]))
        version = library.expertly_products_version()
        if version != VERSION:
            return (), f"{found[0].name} is of version {version}, needed is {VERSION}: install expertly again"
        name_of, has_half = library.expertly_products_name, library.expertly_products_has_half
        has_threads = bool(library.expertly_products_has_threads())
        dots, sums = (getattr(library, name) for name in _NAMES)
    except (OSError, AttributeError) as error:
        return (), f"{found[0].name} cannot be used: {error}"
    name_of.restype = ctypes.c_char_p
    # level, dtype, threads, tasks, how many; matrices, neurons, width, bytes from row to row and from matrix to matrix
    dots.argtypes = (*3 * (_INT,), _ADDRESS, *6 * (_LONG,), *(_ADDRESS, _LONG, _LONG), *(_ADDRESS, _ADDRESS, _LONG))
    sums.argtypes = (*3 * (_INT,), _ADDRESS, *4 * (_LONG,), *(_ADDRESS, _LONG), *(_ADDRESS, _INT))
    made = []
    for level in (2, 1, 0):
        name = name_of(level)
        if name is not None:
            made.append(Library(name.decode(), level, bool(has_half(level)), has_threads, dots, sums))
    return tuple(made), ""
