"""What readers call in place of the system's pread: files of experts that answer when they are told to, each segment
filled with one byte of its own; reads that fail, or wait.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.engine import transfer
from expertly.store.packed import LayerFile

_PREAD = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong, use_errno=True
)
_KEPT: list[object] = []
"""Readers may outlive the patch."""
Pread = Callable[[int, memoryview, int], int]
"""(file, buffer, offset) -> bytes read. May raise OSError."""

Read = tuple[int, int]
"""(layer, expert) of one read."""


def can_bypass_the_page_cache(path: Path) -> bool:
    """Whether its file system has O_DIRECT."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


class Preads:
    """Readers opened from now on call `call`, which may be replaced while they run."""

    def __init__(self, patch: pytest.MonkeyPatch, call: Pread | None = None) -> None:
        self.call: Pread = call or (lambda file, buffer, offset: os.preadv(file, [buffer], offset))
        self._function = _PREAD(self._pread)
        _KEPT.append(self._function)
        library = transfer.library()
        original = library.readers_open
        # `original` may be the function of others that were put there before: these come first.
        patch.setattr(library, "readers_open", lambda *numbers: original(*numbers[:-1], numbers[-1] or self._function))

    def _pread(self, file: int, address: int, nbytes: int, offset: int) -> int:
        buffer = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        try:
            return self.call(file, buffer, offset)
        except OSError as error:
            ctypes.set_errno(error.errno or errno.EIO)
            return -1


class Disk:
    """An ExtentSource, whose files `put` has readers open and read. Each read is noted when it begins, and ends
    when it is let go; with `dice` after a moment, at random.
    """

    def __init__(self, geometry: Geometry, dice: random.Random | None = None) -> None:
        self.geometry = geometry
        self.begun: list[Read] = []
        self.num_ended = 0
        self.read_nbytes = 0
        self._folder = tempfile.TemporaryDirectory()
        for layer in range(geometry.num_layers):
            Path(self._folder.name, str(layer)).touch()
        self.fails: Callable[[int, int], bool] = lambda layer, expert: False
        self._dice = dice
        self._is_held = dice is None
        self._may_end: list[Read] = []
        self._changed = threading.Condition()

    def layer_file(self, layer: int) -> LayerFile:
        return LayerFile(Path(self._folder.name, str(layer)), 0, None, range(self.geometry.layers[layer].num_experts))

    def put(self, patch: pytest.MonkeyPatch) -> None:
        """Readers opened from now on read its files, which are empty, from here."""
        Preads(patch, self._read)

    def content(self, span: Span) -> bytes:
        """The bytes of a span."""
        nbytes = self.geometry.unit_nbytes[span.layer]
        return b"".join(
            bytes([self._byte(span.layer, span.expert, span.segment + i)]) * nbytes for i in range(span.num_segments)
        )

    def let_end(self, *reads: Read) -> None:
        with self._changed:
            self._may_end += reads
            self._changed.notify_all()

    def let_all_end(self) -> None:
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def until_begun(self, count: int) -> list[Read]:
        """Wait until so many reads have begun, and a little for one too many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, 60), self.begun
        time.sleep(0.02)
        return list(self.begun)

    def _byte(self, layer: int, expert: int, segment: int) -> int:
        return 1 + (101 * layer + 7 * expert + 59 * segment) % 255

    def _read(self, file: int, buffer: memoryview, offset: int) -> int:
        layer = int(Path(f"/proc/self/fd/{file}").readlink().name)
        nbytes = self.geometry.unit_nbytes[layer]
        segments = self.geometry.segments_per_expert
        expert = offset // (segments * nbytes)
        with self._changed:
            self.begun.append((layer, expert))
            self._changed.notify_all()
            while self._is_held and (layer, expert) not in self._may_end:
                assert self._changed.wait(60), "nobody lets this read end"
            if self._is_held:
                self._may_end.remove((layer, expert))
        if self._dice is not None:
            time.sleep(self._dice.choice([0, 0, 1e-4, 3e-4]))
        with self._changed:
            self.num_ended += 1
            self.read_nbytes += len(buffer)
        if self.fails(layer, expert):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done = 0
        while done < len(buffer):
            expert, segment = divmod((offset + done) // nbytes, segments)
            count = min(len(buffer) - done, nbytes - (offset + done) % nbytes)
            buffer[done : done + count] = bytes([self._byte(layer, expert, segment)]) * count
            done += count
        return done
