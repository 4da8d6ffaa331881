"""Pages of a KV cache on disk, beside a model's store: what was read or written once is not computed again, though the
server was started again or others needed its memory meanwhile. A page is a file, found by all tokens up to its end.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from expertly.core.errors import ConfigError, StoreError
from expertly.core.files import check_folder, remove_folder, write_atomic
from expertly.core.untrusted import reading

_NAME = re.compile(r"[0-9a-f]{32}\.page|\.[0-9a-f]{32}\.page\.tmp")

WAITING_NBYTES = 32 << 20
"""Of pages that wait to be written; who has more waits for the disk."""

NUM_READERS = 4
"""Threads that read pages at a time: the disk goes on while checksums are made."""

_SUM_NBYTES = 8  # behind a page

log = logging.getLogger("expertly.serve")


def remove_pages(folder: Path) -> None:
    """Delete a folder's pages, and the folder where there is nothing else. Raises OSError."""
    if os.path.lexists(folder):
        remove_folder(folder, lambda name: _NAME.fullmatch(name) is not None)


class KeptPages:
    """The pages of one model, at most so many bytes; those go first that were used the longest ago. One thread uses
    it, several may read, another writes. What cannot be read is not there, and a disk that cannot be written to is a
    warning.
    """

    def __init__(self, folder: Path, most_nbytes: int, model: bytes) -> None:
        """`model`: what makes the same tokens other pages. Raises ConfigError where the folder cannot be used."""
        self._folder, self._most_nbytes, self._model = folder, most_nbytes, model
        self._changed = threading.Condition()  # guards the fields below
        self._nbytes: OrderedDict[str, int] = OrderedDict()  # of files by name, the last used last
        self._waiting_nbytes = 0  # of pages to be written
        self._is_closed = self._is_broken = False
        try:
            check_folder(folder)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            files = [(entry.stat(), entry.name) for entry in os.scandir(folder) if _NAME.fullmatch(entry.name)]
        except OSError as error:
            raise ConfigError(f"kv_disk: {folder} cannot be used: {error.strerror or error}") from None
        for about, name in sorted(files, key=lambda file: file[0].st_mtime_ns):
            self._nbytes[name] = about.st_size
        self._writer = ThreadPoolExecutor(1, "expertly-serve-pages")

    def names(self, tokens: Sequence[int], page_tokens: int) -> Iterator[str]:
        """Of the pages that these tokens fill, one after the other."""
        digest, array = hashlib.blake2b(self._model, digest_size=16), np.asarray(tokens, np.int64)
        for end in range(page_tokens, len(tokens) + 1, page_tokens):
            digest.update(array[end - page_tokens : end].data)
            yield f"{digest.hexdigest()}.page"

    def __contains__(self, name: str) -> bool:
        return name in self._nbytes

    def read(self, name: str, page: memoryview) -> bool:
        """Read a page into this memory, of its size. False where that is not what was written. Any thread may call."""
        checksum, num_read = bytearray(_SUM_NBYTES + 1), 0
        with suppress(StoreError), reading(self._folder / name, StoreError) as file:
            num_read = os.readv(file.fileno(), [page, checksum])
        if num_read != len(page) + _SUM_NBYTES or checksum[:-1] != _sum_of(name, page):
            self._forget(name)
            return False
        return True

    def used(self, names: Sequence[str]) -> None:
        """Pages of a text that goes on; its first, without which none is found, shall go last."""
        for name in reversed(names):
            with self._changed, suppress(KeyError, OSError):
                self._nbytes.move_to_end(name)
                os.utime(self._folder / name)

    def write(self, name: str, page: bytes) -> None:
        """Soon; a page that is there stays. Waits where too much waits to be written."""
        with self._changed:
            most = WAITING_NBYTES - len(page)
            self._changed.wait_for(lambda: not self._waiting_nbytes or self._waiting_nbytes <= most)
            if not (self._is_broken or self._is_closed):
                self._waiting_nbytes += len(page)
                self._writer.submit(self._write_next, name, page)

    def close(self) -> None:
        """Returns when all is written. Idempotent."""
        with self._changed:
            self._is_closed = True
        self._writer.shutdown()

    def _write_next(self, name: str, page: bytes) -> None:
        try:
            if not self._is_broken:
                self._write(name, page + _sum_of(name, page))
        except OSError as error:
            log.warning("kv_disk: %s: %s; nothing more is kept there", self._folder, error.strerror or error)
            self._is_broken = True
        finally:
            with self._changed:
                self._waiting_nbytes -= len(page)
                self._changed.notify_all()

    def _write(self, name: str, content: bytes) -> None:
        if name in self._nbytes or len(content) > self._most_nbytes:
            return
        while self._nbytes and sum(self._nbytes.values()) + len(content) > self._most_nbytes:
            self._forget(next(iter(self._nbytes)))
        write_atomic(self._folder / name, content)
        with self._changed:
            self._nbytes[name] = len(content)

    def _forget(self, name: str) -> None:
        with self._changed:
            self._nbytes.pop(name, None)
        with suppress(OSError):
            (self._folder / name).unlink()


def _sum_of(name: str, page: bytes | memoryview) -> bytes:
    """Of a page and its name: another page's file under this name is not it."""
    checksum = xxhash.xxh3_64(name.encode())
    checksum.update(page)
    return checksum.digest()
