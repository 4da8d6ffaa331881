"""Reads experts straight from disk, past the page cache."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

from expertly.core.errors import StoreError, TransferError
from expertly.core.geometry import PAGE_NBYTES, SECTOR_NBYTES
from expertly.core.untrusted import open_file


class ExpertFile:
    """An open file of experts. Reads are positional, so threads may share it.

    Raises StoreError where it cannot be opened. On a file system without O_DIRECT reads go through the page cache, and
    its pages are dropped afterwards. `direct_fd`, where there is one (else below 0), is for aligned reads that
    bypass it: offset, address and length are multiples of `alignment`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_file(path, StoreError) as file:
                self.fd = os.dup(file.fileno())
        except StoreError as error:
            raise StoreError(f"{path}: cannot be opened ({str(error).removeprefix(f'{path}: ')})") from None
        self.about = os.fstat(self.fd)
        """What it was when it was opened."""
        try:
            self.direct_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:  # EINVAL where unsupported
            self.direct_fd = -1
        self.alignment = PAGE_NBYTES if self.direct_fd < 0 or not _reads_sectors(self.direct_fd) else SECTOR_NBYTES
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        """Fill `buffer` from `offset`. Returns whether the page cache was bypassed: if offset, address and length are
        multiples of `alignment`, and the device accepts the read. Raises TransferError naming file and offset on a read
        error or where the file ends early.
        """
        assert self.fd >= 0, "read after close"
        fd, at, left = self.direct_fd if self._is_aligned(offset, buffer) else self.fd, offset, buffer
        while left:
            try:
                count = os.preadv(fd, [left], at)
            except OSError as error:
                # The device needs larger blocks than pages, or a short read has left a part that is not aligned.
                if fd == self.direct_fd and error.errno == errno.EINVAL:
                    fd = self.fd
                    continue
                problem = f"reading {len(buffer)} bytes at offset {offset} failed ({error.strerror or error})"
                raise TransferError(f"{self.path}: {problem}") from error
            if count == 0:
                raise TransferError(f"{self.path}: ends at offset {at}, {len(left)} bytes short: truncated")
            at, left = at + count, left[count:]
        if fd == self.fd:  # another reader of the file would only read its pages again
            first, end = offset // PAGE_NBYTES * PAGE_NBYTES, -(-at // PAGE_NBYTES) * PAGE_NBYTES
            os.posix_fadvise(self.fd, first, end - first, os.POSIX_FADV_DONTNEED)
        return fd == self.direct_fd

    def _is_aligned(self, offset: int, buffer: memoryview) -> bool:
        if self.direct_fd < 0 or (offset | len(buffer)) % self.alignment:
            return False
        return not len(buffer) or ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % self.alignment == 0

    def is_changed(self) -> bool:
        """Whether what was opened has been replaced, or may have been written to."""
        return is_changed(self.about, os.fstat(self.fd))

    def close(self) -> None:
        """Idempotent. No read may be under way."""
        for fd in (self.fd, self.direct_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self.direct_fd = -1


def is_changed(before: os.stat_result, now: os.stat_result) -> bool:
    """Whether what is at a path has been replaced, or may have been written to."""
    fields = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
    return any(getattr(before, field) != getattr(now, field) for field in fields)


def _reads_sectors(direct_fd: int) -> bool:
    """Whether a read past the page cache may begin and end within a page; False where the file has no second sector."""
    with mmap.mmap(-1, PAGE_NBYTES) as memory, memoryview(memory)[SECTOR_NBYTES : 2 * SECTOR_NBYTES] as sector:
        try:
            return os.preadv(direct_fd, [sector], SECTOR_NBYTES) == SECTOR_NBYTES
        except OSError:
            return False
