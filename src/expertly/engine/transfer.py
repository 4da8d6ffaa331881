"""Reads experts from a packed store into slots: loads before prefetches, several reads in flight.

The compiled library (native/readers.c) has threads of its own for it; where there is none, who waits reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import xxhash

from expertly.core.errors import TransferError
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.core.resources import NUM_READERS
from expertly.engine.reading import ExtentSource
from expertly.store.reader import ExpertFile

LOOK_EVERY_S = 1.0
"""A thread that waits for another checks this often whether that one still runs."""

_WAIT_NS = 100_000_000
"""So long a call of the library may last: signals are handled between calls."""
_DAMAGED, _TRUNCATED, _UNREAD = -1, -2, -3
_LEAST_BLOCK_NBYTES = 241
"""That the library can compare."""
_VERSION = 1
"""Of the library's structures."""
_CHANGED = "was written to while in use"


class _Request(NamedTuple):
    """As `request_t` of readers.c."""

    tag: int
    layer: int
    place: int  # of the expert in its file
    first: int  # byte of the expert
    nbytes: int
    address: int


class _Result(NamedTuple):
    """As `result_t` of readers.c: `error` is an errno, or _DAMAGED, _TRUNCATED or _UNREAD."""

    tag: int
    error: int = 0
    offset: int = 0
    nbytes: int = 0
    buffered_nbytes: int = 0
    again_nbytes: int = 0
    is_changed: int = 0
    checksum: int = 0
    expected: int = 0


class _Layer:
    """A layer's file of experts, and its checksums."""

    def __init__(self, store: ExtentSource, number: int, geometry: Geometry) -> None:
        """Raises StoreError where the file cannot be opened."""
        path, self.begin, sums, self.places, every = store.layer_file(number)
        self.number = number
        self.expert_nbytes = geometry.layers[number].expert_nbytes
        self.segment_nbytes = geometry.segment_nbytes(number)
        self.sums = np.array(() if sums is None else sums, np.uint64)  # [experts, blocks]
        self.left = np.zeros(self.sums.shape, np.uint8)  # reads until the next that is compared
        self.block_nbytes = 0 if sums is None else self.expert_nbytes // len(sums[0])
        self.every = min(every, 256)
        self.file = ExpertFile(path)

    def fields(self) -> list[int]:
        """As `layer_t` of readers.c."""
        file, about = self.file, self.file.about
        checks = [self.block_nbytes, self.every, self.sums.ctypes.data, self.left.ctypes.data]
        times = [about.st_size, about.st_mtime_ns, about.st_ctime_ns]
        return [file.fd, file.direct_fd, file.alignment, self.begin, self.expert_nbytes, *checks, *times]

    def damage(self, place: int, first: int, checksum: int, expected: int) -> str:
        low, high = first // self.segment_nbytes, (first + self.block_nbytes - 1) // self.segment_nbytes
        segments = f"segment {low}" if low == high else f"segments {low} to {high}"
        return (
            f"{self.file.path}: layer {self.number}, expert {place}, {segments}: checksum {checksum:016x}, but it was "
            f"packed with {expected:016x}: damaged; remove the store and pack again"
        )

    def compare_due(self, place: int, first: int, view: memoryview) -> int:
        """Compare the blocks of `view` whose turn it is; those that are only partly in it are read again as a whole.
        Returns the bytes of these reads. Raises TransferError.
        """
        block, again_nbytes = self.block_nbytes, 0
        for number in range(first // block, -(-(first + len(view)) // block)) if block else ():
            if self.left[place, number]:
                self.left[place, number] -= 1
                continue
            begin = number * block
            part = view[begin - first : begin - first + block] if begin >= first else view[:0]
            if len(part) < block:
                part = memoryview(bytearray(block))
                self.file.read_into(self.begin + place * self.expert_nbytes + begin, part)
                again_nbytes += block
            checksum, expected = xxhash.xxh3_64_intdigest(part), int(self.sums[place, number])
            if checksum != expected:
                raise TransferError(self.damage(place, begin, checksum, expected))
            self.left[place, number] = self.every - 1
        return again_nbytes


class _CompiledTeam:
    """Threads of the library. `arrived` is called, in a thread of this one's, when there is something to take."""

    def __init__(self, layers: Sequence[_Layer], num_readers: int, arrived: Callable[[], None] | None) -> None:
        """Raises TransferError where threads cannot be started."""
        library = _library()
        assert library is not None
        self._call = library
        self._layers = array("q", chain.from_iterable(layer.fields() for layer in layers))  # the threads' as well
        self._team = self._call.open(num_readers, self._layers.buffer_info()[0], None)
        if not self._team:
            raise TransferError("the threads that read experts cannot be started")
        self._result = array("q", bytes(8 * len(_Result._fields)))
        self._teller: threading.Thread | None = None
        if arrived is not None:
            self._teller = threading.Thread(target=self._tell, args=(arrived,), name="expertly-arrivals", daemon=True)
            self._teller.start()

    def submit(self, requests: Sequence[_Request], is_prefetch: bool) -> None:
        fields = array("q", chain.from_iterable(requests))
        if self._call.submit(self._team, fields.buffer_info()[0], len(requests), is_prefetch):
            raise MemoryError("no memory for reads")

    def cancel(self, layer: int, most: int) -> Sequence[int]:
        """Tags, `most` of them, of the prefetches of a layer (-1: of all) that had not begun; the others of it are
        loads from now on.
        """
        tags = array("q", bytes(8 * most))
        return tags[: self._call.cancel(self._team, layer, tags.buffer_info()[0])]

    def take(self, timeout_ns: int) -> _Result | None:
        """What has been read, or None within that time."""
        if not self._call.take(self._team, timeout_ns, self._result.buffer_info()[0]):
            return None
        return _Result(*self._result)

    def drain(self) -> _Result:
        """Drop what has not begun, and results. Returns what was read and nobody took, and `nbytes` of spans of which
        nothing was read.
        """
        self._call.drain(self._team, self._result.buffer_info()[0])
        return _Result(*self._result)

    def close(self) -> None:
        self._call.hush(self._team)
        if self._teller is not None and self._teller is not threading.current_thread():
            self._teller.join()
        self._call.close(self._team)

    def _tell(self, arrived: Callable[[], None]) -> None:
        seen, team = 0, self._team
        while (num := self._call.until_arrived(team, seen)) != seen:
            seen = num
            arrived()


class _PlainTeam:
    """Nobody reads, without a compiled library, or of blocks that are too small for it: who takes a span does."""

    def __init__(self, arrived: Callable[[], None] | None) -> None:
        self._arrived = arrived
        self._loads: list[_Request] = []
        self._prefetches: list[_Request] = []

    def submit(self, requests: Sequence[_Request], is_prefetch: bool) -> None:
        (self._prefetches if is_prefetch else self._loads).extend(requests)
        if self._arrived is not None:
            self._arrived()

    def cancel(self, layer: int, most: int) -> Sequence[int]:
        cancelled = [request for request in self._prefetches if layer in (-1, request.layer)]
        self._prefetches = [request for request in self._prefetches if request not in cancelled]
        return [request.tag for request in cancelled]

    def take(self, timeout_ns: int) -> _Result | None:
        queue = self._loads or self._prefetches
        return _Result(queue.pop(0).tag, _UNREAD) if queue else None

    def drain(self) -> _Result:
        dropped = sum(request.nbytes for request in self._loads)
        self._loads.clear()
        return _Result(0, nbytes=dropped)

    def close(self) -> None:
        """It has no threads."""


class Readers:
    """Submit spans, then take them back as they arrive, in any order. Called by one thread.

    A prefetch begins only while no load is queued or being read. One prefetched span is in flight at a time, or as many
    small ones as there are readers, so that a load waits for no more than that (fMoE, section 4.5).
    """

    def __init__(
        self,
        store: ExtentSource,
        geometry: Geometry,
        buffer_of: Callable[[Span], memoryview],
        num_readers: int = NUM_READERS,
        arrived: Callable[[], None] | None = None,
    ) -> None:
        """`buffer_of` gives the bytes of a span's slots. `arrived` is called, in a thread of its own, when there is
        something for `poll`. Raises StoreError where a file cannot be opened.
        """
        self._buffer_of = buffer_of
        self._layers: list[_Layer] = []
        self._tag = 0  # the last
        self._spans: dict[int, Span] = {}  # in flight, by tag
        self._process = os.getpid()  # a forked child has none of the threads, of which one may hold the lock
        self.asked_nbytes = 0
        """To be read from disk for all spans, without those cancelled before they began."""
        self.again_nbytes = 0
        """Read a second time to verify checksums of whole blocks."""
        self.buffered_nbytes = 0
        """Read through the page cache."""
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_files)
            for number in range(geometry.num_layers):
                self._layers.append(_Layer(store, number, geometry))
            sizes = {layer.block_nbytes for layer in self._layers} - {0}
            self._team: _CompiledTeam | _PlainTeam
            if _library() is None or min(sizes, default=_LEAST_BLOCK_NBYTES) < _LEAST_BLOCK_NBYTES:
                self._team = _PlainTeam(arrived)
            else:
                self._team = _CompiledTeam(self._layers, num_readers, arrived)
            undo.pop_all()

    @property
    def num_in_flight(self) -> int:
        """Spans submitted and neither taken back nor cancelled."""
        return len(self._spans)

    def prefetch(self, spans: Sequence[Span]) -> None:
        """Read these, in this order, while no load is queued or being read."""
        self.submit(spans, is_prefetch=True)

    def submit(self, spans: Sequence[Span], *, is_prefetch: bool = False) -> None:
        """Start reading."""
        requests = []
        for span in spans:
            layer, buffer = self._layers[span.layer], self._buffer_of(span)
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            self._tag += 1
            first = span.segment * layer.segment_nbytes
            place = layer.places[span.expert]
            requests.append(_Request(self._tag, span.layer, place, first, len(buffer), address))
            self._spans[self._tag] = span
            self.asked_nbytes += len(buffer)
        if requests:
            self._team.submit(requests, is_prefetch)

    def cancel(self, layer: int | None = None) -> list[Span]:
        """Cancel prefetches that have not begun: of this layer, or all. Returns them; they will not arrive. Those of
        the layer that have begun are read like loads.
        """
        tags = self._team.cancel(-1 if layer is None else layer, len(self._spans)) if self._spans else ()
        cancelled = [self._spans.pop(tag) for tag in tags]
        self.asked_nbytes -= sum(span.num_segments * self._layers[span.layer].segment_nbytes for span in cancelled)
        return cancelled

    def poll(self, timeout_ns: int = 0) -> Span | None:
        """A span that has arrived within that time, or None. Raises TransferError naming what its read met."""
        result = self._team.take(timeout_ns) if self._spans else None
        if result is None:
            return None
        span = self._spans.pop(result.tag)
        layer = self._layers[span.layer]
        if result.error == _UNREAD:
            result = self._read(span, layer)
        self.buffered_nbytes += result.buffered_nbytes
        self.again_nbytes += result.again_nbytes
        if result.error:
            raise TransferError(_explained(span, layer, result))
        if result.is_changed:
            self._compare_changed(span, layer)
        return span

    def wait(self) -> Span:
        """The next span to arrive. Raises as `poll`. Something must be in flight."""
        assert self._spans, "waiting for nothing would never end"
        while (span := self.poll(_WAIT_NS)) is None:
            pass
        return span

    def drain(self) -> None:
        """Drop what has not begun, wait for all other reads, and forget results and errors."""
        self.cancel()
        dropped = self._team.drain()
        self._spans.clear()
        self.asked_nbytes -= dropped.nbytes
        self.buffered_nbytes += dropped.buffered_nbytes
        self.again_nbytes += dropped.again_nbytes

    def stats(self) -> dict[str, int]:
        """Bytes asked of the disk, and of these through the page cache."""
        return {"disk_nbytes": self.asked_nbytes + self.again_nbytes, "buffered_nbytes": self.buffered_nbytes}

    def close(self) -> None:
        """End the threads and close the files. Idempotent."""
        if self._layers:
            if os.getpid() == self._process:
                self.drain()
                self._team.close()
            self._close_files()

    def _close_files(self) -> None:
        while self._layers:
            self._layers.pop().file.close()

    def _read(self, span: Span, layer: _Layer) -> _Result:
        buffer, place, first = self._buffer_of(span), layer.places[span.expert], span.segment * layer.segment_nbytes
        is_direct = layer.file.read_into(layer.begin + place * layer.expert_nbytes + first, buffer)
        again_nbytes, is_now_another = layer.compare_due(place, first, buffer), layer.file.is_changed()
        buffered_nbytes = 0 if is_direct else len(buffer)
        return _Result(0, buffered_nbytes=buffered_nbytes, again_nbytes=again_nbytes, is_changed=is_now_another)

    def _compare_changed(self, span: Span, layer: _Layer) -> None:
        """The file that a span was read from is another than was opened, or may have been written to: all that is read
        of it from then on is compared. Raises TransferError naming the file where that cannot be, or shows damage.
        """
        path, before, now = layer.file.path, layer.file.about.st_size, os.fstat(layer.file.fd).st_size
        if now != before:
            sizes = f"{before} bytes then, {now} now" + ", truncated" * (now < before)
            raise TransferError(f"{path}: {_CHANGED} ({sizes}); restore it, or remove the store and pack again")
        if not layer.block_nbytes:
            unsure = "it has no checksums, or they are not compared: load the model again"
            raise TransferError(f"{path}: {_CHANGED}: {unsure}")
        place = layer.places[span.expert]
        layer.left[place] = 0
        try:
            layer.compare_due(place, span.segment * layer.segment_nbytes, self._buffer_of(span))
        except TransferError as error:
            raise TransferError(f"{path}: {_CHANGED}: {error}") from None


def _explained(span: Span, layer: _Layer, result: _Result) -> str:
    """What a read met."""
    path = layer.file.path
    if result.error == _TRUNCATED:
        message = f"{path}: ends at offset {result.offset}, {result.nbytes} bytes short: truncated"
    elif result.error == _DAMAGED:
        sums = (result.checksum & (1 << 64) - 1, result.expected & (1 << 64) - 1)
        message = layer.damage(layer.places[span.expert], result.offset, *sums)
    else:
        reason = os.strerror(result.error)
        message = f"{path}: reading {result.nbytes} bytes at offset {result.offset} failed ({reason})"
    return f"{path}: {_CHANGED}: {message}" if layer.file.is_changed() else message


_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "open": (_POINTER, (_INT, _POINTER, _POINTER)),
    "submit": (_INT, (_POINTER, _POINTER, _INT, _INT)),
    "cancel": (_INT, (_POINTER, _LONG, _POINTER)),
    "take": (_INT, (_POINTER, _LONG, _POINTER)),
    "until_arrived": (ctypes.c_uint, (_POINTER, ctypes.c_uint)),
    "drain": (None, (_POINTER, _POINTER)),
    **dict.fromkeys(("hush", "close"), (None, (_POINTER,))),
}


@cache
def _library() -> SimpleNamespace | None:
    """The functions of the compiled library; None where it is not there, or is another version's."""
    paths = sorted((Path(__file__).parents[1] / "native").glob("_readers*.so"))
    try:
        library = ctypes.CDLL(str(paths[0]))
        if library.expertly_readers_version() != _VERSION:
            return None
        functions = {name: getattr(library, f"expertly_readers_{name}") for name in _FUNCTIONS}
    except (IndexError, OSError, AttributeError):
        return None
    for name, (result, arguments) in _FUNCTIONS.items():
        functions[name].restype, functions[name].argtypes = result, arguments
    return SimpleNamespace(**functions)
