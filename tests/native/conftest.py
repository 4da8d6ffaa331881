"""Memory of the numbers that products are compared with is kept for the next ones."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of mallopt


@pytest.fixture(autouse=True, scope="module")
def keep_freed_memory() -> Iterator[None]:
    """To get it again is a page fault for each 4 KiB: a third of what these tests took. Then as after a load."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, nbytes: None)
    mallopt(MMAP_THRESHOLD, 32 << 20)
    mallopt(TRIM_THRESHOLD, 512 << 20)
    yield
    mallopt(MMAP_THRESHOLD, 1 << 20)
    mallopt(TRIM_THRESHOLD, 128 << 10)
