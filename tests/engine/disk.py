"""Files of experts that answer when they are told to, each segment filled with one byte of its own."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

from expertly.core.errors import TransferError
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.store.packed import LayerFile

Read = tuple[int, int]
"""(layer, expert) of one read."""


class Disk:
    """An ExtentSource, and what to put in the place of ExpertFile: `open`. Each read is noted when it begins, and ends
    when it is let go; with `dice` after a moment, at random.
    """

    def __init__(self, geometry: Geometry, dice: random.Random | None = None) -> None:
        self.geometry = geometry
        self.begun: list[Read] = []
        self.num_ended = 0
        self.fails: Callable[[int, int], bool] = lambda layer, expert: False
        self._dice = dice
        self._is_held = dice is None
        self._may_end: list[Read] = []
        self._changed = threading.Condition()

    def layer_file(self, layer: int) -> LayerFile:
        return LayerFile(Path(str(layer)), 0, None, None, range(self.geometry.layers[layer].num_experts))

    def open(self, path: Path) -> SimpleNamespace:
        def read_into(offset: int, buffers: Sequence[memoryview]) -> bool:
            return self._read(int(path.name), offset, buffers[0])

        fd = os.open(__file__, os.O_RDONLY)  # which nobody writes to
        unchanged = {"fd": fd, "about": os.fstat(fd), "close": lambda: os.close(fd)}
        return SimpleNamespace(path=path, read_into=read_into, direct_fd=-1, alignment=512, **unchanged)

    def content(self, span: Span) -> bytes:
        """The bytes of a span."""
        nbytes = self.geometry.segment_nbytes(span.layer)
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

    def hold(self) -> None:
        """From now on a read ends when it is let."""
        self._is_held = True

    def until_begun(self, count: int) -> list[Read]:
        """Wait until so many reads have begun, and a little for one too many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, 20), self.begun
        time.sleep(0.02)
        return list(self.begun)

    def _byte(self, layer: int, expert: int, segment: int) -> int:
        return 1 + (101 * layer + 7 * expert + 59 * segment) % 255

    def _read(self, layer: int, offset: int, buffer: memoryview) -> bool:
        nbytes = self.geometry.segment_nbytes(layer)
        segments = self.geometry.segments_per_expert
        expert = offset // (segments * nbytes)
        with self._changed:
            self.begun.append((layer, expert))
            self._changed.notify_all()
            while self._is_held and (layer, expert) not in self._may_end:
                assert self._changed.wait(20), "nobody lets this read end"
            if self._is_held:
                self._may_end.remove((layer, expert))
        if self._dice is not None:
            time.sleep(self._dice.choice([0, 0, 1e-4, 3e-4]))
        with self._changed:
            self.num_ended += 1
        if self.fails(layer, expert):
            raise TransferError(f"layer {layer} expert {expert} cannot be read")
        done = 0
        while done < len(buffer):
            expert, segment = divmod((offset + done) // nbytes, segments)
            count = min(len(buffer) - done, nbytes - (offset + done) % nbytes)
            buffer[done : done + count] = bytes([self._byte(layer, expert, segment)]) * count
            done += count
        return False
