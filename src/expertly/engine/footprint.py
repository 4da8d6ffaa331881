"""Keeps small what libraries take beside weights: in a small memory it would be the place of experts."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

PRIMITIVES = 16
"""Shapes of products whose compiled code oneDNN keeps; a decoded token has about ten."""

VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""What oneDNN, and torch's own cache of its operations, read when they are first used."""

_DONT_NEED = 4  # MADV_DONTNEED
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+\s*(.*)$")


def keep_few_primitives() -> None:
    """Let oneDNN keep the code of `PRIMITIVES` shapes instead of 1024, unless the environment says otherwise.

    Each number of rows that an expert gets in a prompt is a shape of its own, so that after a few prompts hundreds of
    them took 130 MB. Making one again takes less time than can be measured. Must run before torch multiplies.
    """
    for name in VARIABLES:
        os.environ.setdefault(name, str(PRIMITIVES))


def give_back_unused() -> int:
    """Give back to the system what importing and loading left behind; bytes of code that are resident no more.

    Free memory of the C library's heap goes, and pages of libraries' code: most of it ran while they were imported, and
    what runs again comes back from the page cache. Does nothing where there is no /proc/self/smaps.
    """
    gc.collect()
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
    try:
        smaps = Path("/proc/self/smaps").read_text()
    except OSError:
        return 0
    given_nbytes = 0
    for begin, end, resident_nbytes in _code(smaps):
        if library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONT_NEED) == 0:
            given_nbytes += resident_nbytes
    return given_nbytes


def _code(smaps: str) -> Iterator[tuple[int, int, int]]:
    """(begin, end, resident bytes) of mappings of files' code that nobody has written to: those can be read again."""
    begin = end = resident = anonymous = 0
    is_code = False
    for line in [*smaps.splitlines(), "0-0 ---p 0 0 0"]:
        found = _MAPPING.match(line)
        if found is None:
            name, _, rest = line.partition(":")
            if name == "Rss":
                resident = int(rest.split()[0]) << 10
            elif name == "Anonymous":
                anonymous = int(rest.split()[0]) << 10
            continue
        if is_code and resident and not anonymous:
            yield begin, end, resident
        begin, end = int(found[1], 16), int(found[2], 16)
        is_code = found[3] == "r-xp" and found[4].startswith("/") and not found[4].endswith(" (deleted)")
        resident = anonymous = 0
