"""Slots on an accelerator, filled from host memory over a copy stream, which is filled from disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from expertly.control.budget import class_segment_nbytes
from expertly.core.errors import ModelUseError
from expertly.core.geometry import Geometry
from expertly.core.messages import Piece
from expertly.engine.host_tier import HostTier
from expertly.engine.pool import layer_view
from expertly.store.packed import PackedStore


class Streams(Protocol):
    """The asynchronous side of a device. Marks are events: `Any`, made and read only here."""

    def is_capturing(self) -> bool:
        """Whether what is queued on the compute stream is recorded instead of run."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: list[Any]) -> None:
        """Queue a copy on the copy stream, after these marks of the compute stream."""

    def mark_copy(self) -> Any:
        """A mark behind everything queued on the copy stream."""

    def mark_compute(self) -> Any:
        """A mark behind everything queued on the compute stream."""

    def is_past(self, mark: Any) -> bool:
        """Whether everything before the mark has run. Does not wait."""

    def hold_compute(self, mark: Any) -> None:
        """The compute stream goes on only when the mark is past. Does not wait."""

    def synchronize(self) -> None:
        """Wait for everything queued on both streams."""

    def stall_ns(self) -> int:
        """Time the compute stream was held, of holds that have ended since the last call."""

    def register(self, memory: torch.Tensor) -> Callable[[], None]:
        """Pin host memory for copies; call the result to undo."""


@dataclass(slots=True)
class _Transfer:
    """A device piece under way: the host pieces it still waits for, and the mark behind its copies."""

    piece: Piece
    waits_for: dict[Piece, None] = field(default_factory=dict)
    mark: Any = None


class TieredBackend:
    """disk -> host tier -> device. See Backend; a `Streams` makes it CUDA."""

    def __init__(
        self,
        device: torch.device,
        streams: Streams,
        store: PackedStore,
        geometry: Geometry,
        slots_per_class: list[int],
        dtype: torch.dtype,
        host_nbytes: int,
    ) -> None:
        self.device = device
        self._streams = streams
        self._geometry = geometry
        sizes = class_segment_nbytes(geometry)
        flats = [
            torch.empty(num_slots * nbytes, dtype=torch.uint8, device=device)
            for num_slots, nbytes in zip(slots_per_class, sizes, strict=True)
        ]
        self._views = [layer_view(flats[c], geometry, layer, dtype) for layer, c in enumerate(geometry.size_classes)]
        self._last_use: list[dict[int, Any]] = [{} for _ in sizes]  # slot -> mark of the last kernels that read it
        self._busy: dict[int, Any] = {}  # expert id -> mark of the last copy out of its host slots
        self.tier = HostTier(store, geometry, host_nbytes, dtype, self._is_busy, self._wait_idle)
        self._unpin = [streams.register(memory) for memory in self.tier.pool.memory()]
        self._waiting: dict[Piece, _Transfer] = {}  # by host piece being read
        self._copying: deque[_Transfer] = deque()
        self._backlog: deque[Piece] = deque()  # for which the host tier has no room yet
        self._copied_nbytes = 0

    def rows(self, layer: int) -> torch.Tensor:
        """[S * I/P, M, H] on the device, see Backend."""
        return self._views[layer]

    def begin(self) -> None:
        """Not while the stream is being captured."""
        if self._streams.is_capturing():
            raise ModelUseError("CUDA graphs cannot capture experts whose weights come and go; call the model eagerly")

    def submit(self, pieces: Iterable[Piece]) -> None:
        """Copy what the host has at once; the rest when it has been read."""
        self._backlog.extend(pieces)
        self._start()

    def poll(self) -> Piece | None:
        """A piece whose copy has ended, or None."""
        while self._waiting and (host_piece := self.tier.readers.poll()) is not None:
            self._read(host_piece)
        if self._copying and self._streams.is_past(self._copying[0].mark):
            return self._take()
        return None

    def wait(self) -> Piece:
        """The next piece whose copy has been queued: the compute stream waits for it, the host does not."""
        while not self._copying:
            if self._waiting:
                self._read(self.tier.readers.wait())
            else:
                self._start()
        return self._take()

    def used(self, piece: Piece) -> None:
        """Remember the kernels that read the piece's slots."""
        mark = self._streams.mark_compute()
        uses = self._last_use[self._geometry.size_classes[piece.layer]]
        uses.update(dict.fromkeys(range(piece.slot, piece.slot + piece.num_segments), mark))

    def drain(self) -> None:
        """Wait for reads and copies; forget them."""
        self._waiting.clear()
        self._copying.clear()
        self._backlog.clear()
        self.tier.abandon()
        self._streams.synchronize()
        self._busy.clear()
        self.tier.check()  # an interrupt in the middle of a decision shows here

    def stall_ns(self) -> int:
        """Time the compute stream was held for copies."""
        return self._streams.stall_ns()

    def stats(self) -> dict[str, int]:
        """Bytes read from disk, of these through the page cache, served from host memory, and copied to the device."""
        return {
            "disk_nbytes": self.tier.disk_nbytes,
            "buffered_nbytes": self.tier.readers.buffered_nbytes,
            "host_hit_nbytes": self.tier.hit_nbytes,
            "copied_nbytes": self._copied_nbytes,
        }

    def close(self) -> None:
        """Free threads, files, pinned and device memory."""
        if self._views:
            self.tier.readers.close()
            self._streams.synchronize()
            for undo in self._unpin:
                undo()
            self._unpin, self._views = [], []

    def _start(self) -> None:
        """Begin what waits for room in the host tier."""
        while self._backlog and (request := self.tier.request(self._backlog[0])) is not None:
            transfer = _Transfer(self._backlog.popleft())
            found, reads = request
            for host_piece in found:
                self._copy(transfer, host_piece)
            transfer.waits_for = dict.fromkeys(reads)
            self._waiting.update(dict.fromkeys(reads, transfer))
            if not reads:
                self._finish(transfer)

    def _read(self, host_piece: Piece) -> None:
        self.tier.arrived(host_piece)
        transfer = self._waiting.pop(host_piece)
        self._copy(transfer, host_piece)
        del transfer.waits_for[host_piece]
        if not transfer.waits_for:
            self._finish(transfer)
        self._start()

    def _copy(self, transfer: _Transfer, source: Piece) -> None:
        """Queue the copy of a host piece into its part of the device piece, after the last use of those slots."""
        layer, piece = source.layer, transfer.piece
        neurons = self._geometry.neurons_per_segment(layer)
        slot = piece.slot + source.segment - piece.segment
        uses = self._last_use[self._geometry.size_classes[layer]]
        slots = range(slot, slot + source.num_segments)
        after = list({id(mark): mark for s in slots if (mark := uses.pop(s, None)) is not None}.values())
        target = self._views[layer][slot * neurons : (slot + source.num_segments) * neurons]
        rows = self.tier.pool.rows(layer)
        self._streams.copy(target, rows[source.slot * neurons : (source.slot + source.num_segments) * neurons], after)
        self._busy[self._geometry.expert_id(layer, source.expert)] = self._streams.mark_copy()
        self._copied_nbytes += source.num_segments * self._geometry.segment_nbytes(layer)

    def _finish(self, transfer: _Transfer) -> None:
        transfer.mark = self._streams.mark_copy()
        self._copying.append(transfer)

    def _take(self) -> Piece:
        transfer = self._copying.popleft()
        self._streams.hold_compute(transfer.mark)
        return transfer.piece

    def _is_busy(self, eid: int) -> bool:
        mark = self._busy.get(eid)
        if mark is None:
            return False
        if self._streams.is_past(mark):
            del self._busy[eid]
            return False
        return True

    def _wait_idle(self) -> None:
        self._streams.synchronize()
        self._busy.clear()
