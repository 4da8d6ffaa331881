"""Reads experts from a packed store into slots, by the threads of native/readers.c: several reads in flight, and blocks
compared with their checksums.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np

from expertly.core.compiled import compiled
from expertly.core.errors import StoreError, TransferError
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.core.resources import NUM_READERS
from expertly.core.untrusted import open_file
from expertly.store.packed import LayerFile

_WAIT_NS = 100_000_000
"""The longest that a call of the library lasts: Python handles signals between calls."""
_DAMAGED, _TRUNCATED, _CHANGED = -1, -2, -3
_RESULT = struct.Struct("5q2Q16x")  # as `result_t` of readers.c
_VERSION = 2  # of the structures of readers.c

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "readers_open": (_POINTER, (_INT, _POINTER, _INT, *2 * (_POINTER,))),
    "readers_submit": (_INT, (_POINTER, _POINTER, _INT, _INT)),
    "readers_cancel": (_INT, (_POINTER, _LONG, _POINTER)),
    "readers_take": (_INT, (_POINTER, _LONG, _POINTER)),
    "readers_until_arrived": (ctypes.c_uint, (_POINTER, ctypes.c_uint)),
    **dict.fromkeys(("readers_drain", "readers_hush", "readers_close"), (None, (_POINTER,))),
}


@cache
def library() -> SimpleNamespace:
    """The compiled library. Raises ConfigError where it is missing."""
    return compiled("native/_readers", _VERSION, _FUNCTIONS)


class Readers:
    """Submit spans, then take them back as they arrive, in any order. Called by one thread.

    A prefetch begins only while no load is queued or being read. One prefetched span is in flight at a time, or, of
    spans of at most a MiB, as many as there are readers: a load waits for no more than that (fMoE, section 4.5).
    """

    def __init__(
        self,
        layer_file: Callable[[int], LayerFile],
        geometry: Geometry,
        memory_of: Callable[[int], memoryview],
        num_readers: int = NUM_READERS,
        arrived: Callable[[], None] | None = None,
    ) -> None:
        """`memory_of` gives a layer's slots, side by side, as bytes, which stay while there are Readers. `arrived` is
        called, in a thread of its own, when there is something for `poll`. Raises StoreError where a file cannot be
        opened, TransferError where threads cannot be started.
        """
        self._call, self._segment_nbytes = library(), geometry.unit_nbytes
        self._files = [layer_file(layer) for layer in range(geometry.num_layers)]
        self._last_tag = 0
        self._spans: dict[int, Span] = {}  # in flight, by tag
        self.waits: list[tuple[int, int]] = []  # begin and end of each call of `wait`, emptied by whoever reads it
        self._teller: threading.Thread | None = None
        self._process = os.getpid()  # a forked child has none of the threads, of which one may hold the lock
        self._result = bytearray(_RESULT.size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._result))
        layers, self._alive, self._totals = array("q"), list[Any](), array("q", (0, 0))
        with contextlib.ExitStack() as opened:
            for file, shape in zip(self._files, geometry.layers, strict=True):
                twice = [opened.enter_context(open_file(file.path, StoreError)) for _ in range(2)]  # one: O_DIRECT
                sums = np.array(file.sums or (), np.uint64)  # [experts, blocks]
                left = np.zeros(sums.shape, np.uint8)
                block_nbytes = shape.expert_nbytes // sums.shape[1] if sums.size else 0
                layers.extend((*(each.fileno() for each in twice), file.begin, shape.expert_nbytes, block_nbytes))
                layers.extend((min(file.check_every, 256), sums.ctypes.data, left.ctypes.data, *4 * (0,)))
                self._alive += [sums, left]
            memories = map(memory_of, range(geometry.num_layers))
            self._slots = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in memories]
            self._alive.append(layers)
            addresses = layers.buffer_info()[0], geometry.num_layers, self._totals.buffer_info()[0]
            self._team = self._call.readers_open(num_readers, *addresses, None)
            if not self._team:
                raise TransferError("the threads that read experts cannot be started")
            opened.callback(self._end)
            if arrived is not None:
                self._teller = threading.Thread(None, self._tell, "expertly-arrivals", (arrived,), daemon=True)
                self._teller.start()
            self._opened = opened.pop_all()

    @property
    def num_in_flight(self) -> int:
        """Spans submitted and neither taken back nor cancelled."""
        return len(self._spans)

    def prefetch(self, spans: Sequence[Span]) -> None:
        """Read these, in this order, while no load is queued or being read."""
        self.submit(spans, is_prefetch=True)

    def submit(self, spans: Sequence[Span], *, is_prefetch: bool = False) -> None:
        """Start reading."""
        requests = []  # as `request_t`
        for span in spans:
            self._last_tag += 1
            place, nbytes = self._files[span.layer].places[span.expert], self._segment_nbytes[span.layer]
            first, address = span.segment * nbytes, self._slots[span.layer] + span.slot * nbytes
            requests.append((self._last_tag, span.layer, place, first, span.num_segments * nbytes, address))
            self._spans[self._last_tag] = span
        numbers = array("q", chain.from_iterable(requests))
        if self._call.readers_submit(self._team, numbers.buffer_info()[0], len(requests), is_prefetch):
            raise MemoryError("no memory for reads")

    def cancel(self, layer: int | None = None) -> list[Span]:
        """Cancel prefetches that have not begun: of this layer, or all. Returns them; they will not arrive. Those of
        the layer that have begun are read like loads.
        """
        if not self._spans:
            return []
        tags = array("q", bytes(8 * len(self._spans)))
        num = self._call.readers_cancel(self._team, -1 if layer is None else layer, tags.buffer_info()[0])
        return [self._spans.pop(tag) for tag in tags[:num]]

    def poll(self, timeout_ns: int = 0) -> Span | None:
        """A span that has arrived within that time, or None. Raises TransferError naming what went wrong."""
        if not self._spans or not self._call.readers_take(self._team, timeout_ns, self._address):
            return None
        tag, error, *details = _RESULT.unpack(self._result)
        span = self._spans.pop(tag)
        if error:
            raise TransferError(self._explained(span, error, *details))
        return span

    def wait(self) -> Span:
        """The next span to arrive. Raises as `poll`. Something must be in flight."""
        assert self._spans, "waiting for nothing would never end"
        begin = time.perf_counter_ns()
        while (span := self.poll(_WAIT_NS)) is None:
            pass
        self.waits.append((begin, time.perf_counter_ns()))
        return span

    def drain(self) -> None:
        """Drop what has not begun, wait for all other reads, and forget results and errors."""
        self._call.readers_drain(self._team)
        self._spans.clear()

    def stats(self) -> dict[str, int]:
        """Bytes asked of the disk, without cancelled reads, and how many of them went through the page cache."""
        return dict(zip(("disk_nbytes", "buffered_nbytes"), self._totals, strict=True))

    def close(self) -> None:
        """End the threads and close the files. Idempotent."""
        self._opened.close()

    def _end(self) -> None:
        if os.getpid() != self._process:
            return
        self.drain()
        self._call.readers_hush(self._team)
        if self._teller is not None and self._teller.is_alive() and self._teller is not threading.current_thread():
            self._teller.join()
        self._call.readers_close(self._team)

    def _tell(self, arrived: Callable[[], None]) -> None:
        seen = 0
        while (num := self._call.readers_until_arrived(self._team, seen)) != seen:
            seen = num
            arrived()

    def _explained(self, span: Span, error: int, *details: int) -> str:
        offset, nbytes, is_changed, checksum, expected = details  # _CHANGED: the file's size now, and before
        file, segment_nbytes = self._files[span.layer], self._segment_nbytes[span.layer]
        if error == _CHANGED and offset == nbytes:
            problem = "it has no checksums, or they are not compared: load the model again"
        elif error == _CHANGED:
            sizes = f"{nbytes} bytes then, {offset} now{', truncated' * (offset < nbytes)}"
            problem = f"{sizes}; restore it, or remove the store and pack again"
        elif error == _TRUNCATED:
            problem = f"ends at offset {offset}, {nbytes} bytes short: truncated"
        elif error == _DAMAGED:
            low, high = offset // segment_nbytes, (offset + nbytes - 1) // segment_nbytes
            place, segments = file.places[span.expert], f"segment {low}" if low == high else f"segments {low} to {high}"
            sums = f"checksum {checksum:016x}, but it was packed with {expected:016x}: damaged"
            problem = f"layer {span.layer}, expert {place}, {segments}: {sums}; remove the store and pack again"
        else:
            problem = f"reading {nbytes} bytes at offset {offset} failed ({os.strerror(error)})"
        return f"{file.path}: {'was written to while in use: ' * bool(is_changed)}{problem}"
