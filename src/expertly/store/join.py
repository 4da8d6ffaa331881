"""Byte planes to weights in one pass over them, where that was compiled."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

VERSION = 1
"""Of the interface that is called here; store/join.c says the same number."""

Join = Callable[[Sequence[NDArray[np.uint8]], memoryview], None]
"""(planes of n bytes each, the highest first; out): writes n words of as many bytes as there are planes, 2 or 4. It
lets go of the interpreter lock, and several threads may call it at a time.
"""

_NAMES = {2: "expertly_join_two", 4: "expertly_join_four"}


@cache
def compiled_join(folder: Path = Path(__file__).parent) -> Join | None:
    """None where there was no C compiler when expertly was installed, or an older expertly was."""
    for path in sorted(folder.glob("_join*.so")):
        try:
            library = ctypes.CDLL(str(path))
            if library.expertly_join_version() == VERSION:
                return _made(library)
        except (OSError, AttributeError):
            continue
    return None


def _made(library: ctypes.CDLL) -> Join:
    functions = {}
    for num_planes, name in _NAMES.items():
        functions[num_planes] = function = getattr(library, name)
        function.argtypes = (*(num_planes + 1) * (ctypes.c_void_p,), ctypes.c_size_t)
        function.restype = None

    def join(planes: Sequence[NDArray[np.uint8]], out: memoryview) -> None:
        words = np.frombuffer(out, np.uint8)
        count = len(words) // len(planes)
        assert all(plane.flags.c_contiguous and len(plane) == count for plane in planes)
        functions[len(planes)](*(plane.ctypes.data for plane in planes), words.ctypes.data, count)

    return join
