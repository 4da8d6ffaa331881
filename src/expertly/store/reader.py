"""Reads experts straight from disk, past the page cache."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

from expertly.core.errors import StoreError, TransferError
from expertly.core.geometry import PAGE_NBYTES

_MAX_BUFFERS = 1024
"""IOV_MAX of Linux."""

_PASSING = (errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ENOMEM)
"""Errors of an overloaded system: the same read may succeed a moment later."""

_PAUSES_S = (0.001, 0.01, 0.1, 0.5)
"""Pauses before each retry of such a read."""


class ExpertFile:
    """An open file of experts. Reads are positional, so threads may share it.

    Raises StoreError where it cannot be opened. On a file system without O_DIRECT reads go through the page cache, and
    its pages are dropped afterwards; `is_direct` says which.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(f"{path}: cannot be opened ({error.strerror})") from None
        try:
            self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except (OSError, AttributeError):  # EINVAL where unsupported; no O_DIRECT outside Linux
            self._direct = -1
        if hasattr(os, "posix_fadvise"):  # no readahead
            os.posix_fadvise(self._buffered, 0, 0, os.POSIX_FADV_RANDOM)

    @property
    def is_direct(self) -> bool:
        """Whether aligned reads bypass the page cache."""
        return self._direct >= 0

    def direct(self, offset: int, view: memoryview) -> tuple[int, int, int, int] | None:
        """For `ReadQueue`, the read that fills `view` from `offset`; None where it would not bypass the page cache."""
        if self._direct < 0 or offset % PAGE_NBYTES or not len(view) or len(view) % PAGE_NBYTES:
            return None
        address = _address(view)
        return None if address % PAGE_NBYTES else (self._direct, offset, address, len(view))

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> bool:
        """Fill `buffers` one after the other from `offset`. Returns whether the page cache was bypassed.

        It is bypassed if the offset and each buffer's address and length are multiples of 4096, and the device accepts
        the read. A read that fails because the system is overloaded is retried a few times. Raises TransferError naming
        file and offset on a read error or where the file ends early.
        """
        assert self._buffered >= 0, "read after close"
        buffers = [view if view.format == "B" else view.cast("B") for view in buffers]
        direct = self._direct >= 0 and offset % PAGE_NBYTES == 0 and all(map(_is_aligned, buffers))
        total = sum(map(len, buffers))
        try:
            direct = self._read(self._direct if direct else self._buffered, offset, buffers)
        except OSError as error:
            raise TransferError(
                f"{self.path}: reading {total} bytes at offset {offset} failed ({error.strerror or error})"
            ) from error
        if not direct:
            self._drop(offset, total)
        return direct

    def _read(self, fd: int, offset: int, buffers: Sequence[memoryview]) -> bool:
        """Whether all bytes bypassed the page cache."""
        left = [view for view in buffers if len(view)]
        pauses = iter(_PAUSES_S)
        while left:
            try:
                count = os.preadv(fd, left[:_MAX_BUFFERS], offset)
            except OSError as error:
                # The device needs larger blocks than pages, or a short read has left a part that is not aligned.
                if fd == self._direct and error.errno == errno.EINVAL:
                    fd = self._buffered
                    continue
                pause = next(pauses, None) if error.errno in _PASSING else None
                if pause is None:
                    raise
                time.sleep(pause)
                continue
            if count == 0:
                raise TransferError(
                    f"{self.path}: ends at offset {offset}, {sum(map(len, left))} bytes short: truncated"
                )
            offset += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
        return fd == self._direct

    def _drop(self, offset: int, nbytes: int) -> None:
        """Drop the pages just read from the page cache; another reader of the file would only read them again."""
        if hasattr(os, "posix_fadvise"):
            first = offset // PAGE_NBYTES * PAGE_NBYTES
            end = -(-(offset + nbytes) // PAGE_NBYTES) * PAGE_NBYTES
            os.posix_fadvise(self._buffered, first, end - first, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Idempotent. No read may be under way."""
        for fd in (self._buffered, self._direct):
            if fd >= 0:
                os.close(fd)
        self._buffered = self._direct = -1


_SPIN_NS = 200_000
"""A read of some ten kilobytes ends sooner: so long it is asked for again and again instead of going to sleep, from
which a thread returns with cold caches.
"""


class ReadQueue:
    """Reads past the page cache that need no thread of their own: several begin in one call of the system (Linux AIO).
    Called by one thread.
    """

    MAX_READS = 64
    """In flight at a time."""

    def __init__(self) -> None:
        """Raises OSError where the system has no such reads."""
        numbers = _SYSTEM_CALLS.get(platform.machine()) if sys.platform == "linux" else None
        if numbers is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._setup, self._destroy, self._submit, self._get_events = numbers
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.argtypes, self._call.restype = 6 * (ctypes.c_long,), ctypes.c_long
        self._events = array("q", bytes(32 * self.MAX_READS))  # for each: tag, its request, result, another result
        self._timeout = array("q", (0, 0))
        self._context = ctypes.c_long()
        self._open()

    def begin(self, reads: Sequence[tuple[int, tuple[int, int, int, int]]]) -> int:
        """Begin reads, each a tag and what `ExpertFile.direct` gave; returns how many of them, the first ones, the
        system has taken.
        """
        requests = array("q")  # struct iocb
        for tag, (fd, offset, address, nbytes) in reads:
            requests.extend((tag, 0, fd << 32, address, nbytes, offset, 0, 0))
        first = requests.buffer_info()[0]
        pointers = array("q", range(first, first + 64 * len(reads), 64))
        num: int = self._call(self._submit, self._context.value, len(reads), pointers.buffer_info()[0], 0, 0)
        return max(0, num)

    def ended(self, timeout_ns: int = 0) -> list[tuple[int, int]]:
        """Tags of reads that have ended, and how many bytes each read, below 0 where it failed. Waits until there is
        one, but no longer than `timeout_ns`, a second at most.
        """
        events, timeout = self._events, self._timeout
        start_ns, timeout[1] = time.perf_counter_ns(), 0
        context, room = self._context.value, (self.MAX_READS, events.buffer_info()[0], timeout.buffer_info()[0])
        num = self._call(self._get_events, context, 0, *room)
        while not num and time.perf_counter_ns() - start_ns < min(timeout_ns, _SPIN_NS):
            num = self._call(self._get_events, context, 0, *room)
        if not num and timeout_ns:
            timeout[1] = min(timeout_ns, 999_999_999)
            num = self._call(self._get_events, context, 1, *room)
        return [(events[4 * i], events[4 * i + 2]) for i in range(num)]

    def restart(self) -> None:
        """Wait until no read runs, and forget all. After an interrupt in here, call it again."""
        self.close()
        self._open()

    def close(self) -> None:
        """Wait until no read runs. Idempotent."""
        if self._context.value:
            self._call(self._destroy, self._context.value, 0, 0, 0, 0)
            self._context.value = 0

    def _open(self) -> None:
        if self._call(self._setup, self.MAX_READS, ctypes.addressof(self._context), 0, 0, 0):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


_SYSTEM_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
"""Numbers of io_setup, io_destroy, io_submit and io_getevents."""


def _is_aligned(view: memoryview) -> bool:
    if len(view) % PAGE_NBYTES:
        return False
    return not len(view) or _address(view) % PAGE_NBYTES == 0


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
