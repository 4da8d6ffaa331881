"""Slots on an accelerator, filled from host memory over a copy stream, which is filled from disk: demands first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from expertly.core.errors import ModelUseError
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.engine.device_streams import Streams
from expertly.engine.host_tier import HostTier
from expertly.engine.numa import MemoryNode
from expertly.engine.pool import layer_view
from expertly.engine.reads import ExtentSource
from expertly.scheduler.budget import class_segment_nbytes


@dataclass(slots=True)
class _Transfer:
    """A device span under way: the host spans it still waits for, and the mark behind its last copy."""

    span: Span
    is_ahead: bool = False
    was_read: bool = False  # from disk, for this transfer
    waits_for: dict[Span, None] = field(default_factory=dict)
    mark: Any = None


class CudaDevice:
    """disk -> host tier -> device. See Device; a `Streams` makes it CUDA.

    Disk and copy stream each serve demands first. A copy that is queued cannot be recalled: of what was submitted ahead
    one segment is on the stream at a time, and only behind kernels and demands that have run, so that a demand finds
    one segment before it at most. What is submitted ahead moves on when `poll` or `wait` is called.
    """

    def __init__(
        self,
        device: torch.device,
        streams: Streams,
        store: ExtentSource,
        geometry: Geometry,
        slots_per_class: list[int],
        dtype: torch.dtype,
        host_nbytes: int,
        node: MemoryNode | None = None,
    ) -> None:
        """`host_nbytes`: pinned RAM."""
        self.torch_device = device
        self.queues_uses = True
        self._waited_ns = 0
        self.node = node
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
        self.tier = HostTier(store, geometry, host_nbytes, dtype, self._is_busy, self._wait_idle, node)
        self._unpin: list[Callable[[], None]] = []
        try:
            for memory in self.tier.pool.memory():
                self._unpin.append(streams.register(memory))
        except BaseException:  # the readers run already, and hold all of the memory
            self.close()
            raise
        self._waiting: dict[Span, _Transfer] = {}  # by host span being read
        self._copying: deque[_Transfer] = deque()
        self._backlog: deque[_Transfer] = deque()  # demands for which the host tier has no room yet
        self._demand_mark: Any = None  # behind the last copy of a demand
        self._ahead: deque[_Transfer] = deque()  # not asked of the host tier, or it had no room
        self._here: deque[_Transfer] = deque()  # ahead, and in the host tier, which may yet evict it for a demand
        self._ahead_copy: _Transfer | None = None
        self._copied_nbytes = 0
        self._hit_nbytes = 0

    def rows(self, layer: int) -> torch.Tensor:
        """[S * I/P, M, H] on the device, see Device."""
        return self._views[layer]

    def begin(self) -> None:
        """Not while the stream is being captured."""
        if self._streams.is_capturing():
            raise ModelUseError("CUDA graphs cannot capture experts whose weights come and go; call the model eagerly")

    def submit(self, spans: Iterable[Span]) -> None:
        """Copy what the host has at once; the rest when it has been read."""
        self._backlog.extend([_Transfer(span) for span in spans])
        self._start()

    def submit_ahead(self, spans: Iterable[Span]) -> None:
        """Read and copy what is left to do of these when there is no demand to read or to copy."""
        for span in spans:
            assert span.num_segments == 1, "a demand never waits for more than a segment"
            self._ahead.append(_Transfer(span, is_ahead=True))
        self._begin_ahead()

    def withdraw(self, layer: int, experts: Collection[int] | None = None) -> list[Span]:
        """Forget those of this layer, or of these experts of it, that are neither being read nor copied; go on with the
        others of them as with demands.
        """

        def is_meant(transfer: _Transfer) -> bool:
            return transfer.span.layer == layer and (experts is None or transfer.span.expert in experts)

        gone: list[Span] = []
        for queue in (self._here, self._ahead):
            gone += [transfer.span for transfer in queue if is_meant(transfer)]
            left = [transfer for transfer in queue if not is_meant(transfer)]
            queue.clear()
            queue.extend(left)
        gone += [self._waiting.pop(host_span).span for host_span in self.tier.withdraw(layer, experts)]
        for transfer in self._waiting.values():
            if is_meant(transfer):
                transfer.is_ahead = False
        if self._ahead_copy is not None and is_meant(self._ahead_copy):
            self._promote_copy()
        return gone

    def poll(self) -> Span | None:
        """A span whose copy has ended, or None."""
        while self._waiting and (host_span := self.tier.readers.poll()) is not None:
            self._read(host_span)
        span = None
        if self._copying and self._streams.is_past(self._copying[0].mark):
            span = self._take()
        elif self._ahead_copy is not None and self._streams.is_past(self._ahead_copy.mark):
            self._streams.hold_compute(self._ahead_copy.mark)
            span, self._ahead_copy = self._ahead_copy.span, None
        self._begin_ahead()
        return span

    def wait(self) -> Span:
        """The next span whose copy has been queued: the compute stream waits for it, the host does not."""
        start = time.perf_counter_ns()
        while not self._copying:
            is_awaited = bool(self._backlog) or not all(transfer.is_ahead for transfer in self._waiting.values())
            if not is_awaited and self._promote_next():
                continue
            if self._waiting:
                self._read(self.tier.readers.wait())
            else:
                self._start()
        span = self._take()
        self._begin_ahead()
        self._waited_ns += time.perf_counter_ns() - start
        return span

    def used(self, span: Span) -> None:
        """Remember the kernels that read the span's slots."""
        mark = self._streams.mark_compute()
        uses = self._last_use[self._geometry.size_classes[span.layer]]
        uses.update(dict.fromkeys(range(span.slot, span.slot + span.num_segments), mark))

    def drain(self) -> None:
        """Wait for reads and copies; forget them."""
        for queue in (self._copying, self._backlog, self._ahead, self._here):
            queue.clear()
        self._waiting.clear()
        self._ahead_copy = self._demand_mark = None
        self.tier.abandon()
        self._streams.synchronize()
        self._busy.clear()
        self.tier.check()  # an interrupt in the middle of a decision shows here

    @property
    def waited_ns(self) -> int:
        """Of the host, and while the compute stream was held for copies."""
        self._waited_ns += self._streams.stall_ns()
        return self._waited_ns

    def stats(self) -> dict[str, int]:
        """What its readers moved, bytes of weights served from host memory, and bytes copied to the device."""
        return {
            **self.tier.readers.stats(),
            "host_hit_nbytes": self._hit_nbytes,
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

    # -- demands -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Begin what waits for room in the host tier."""
        while self._backlog:
            request = self.tier.request(self._backlog[0].span)
            if request is None:
                if not self._recall():
                    return
                continue
            transfer = self._backlog.popleft()
            found, reads = request
            for host_span in found:
                self._copy(transfer, host_span)
                if not transfer.was_read:
                    self._hit_nbytes += self._nbytes(host_span)
            transfer.waits_for = dict.fromkeys(reads)
            self._waiting.update(dict.fromkeys(reads, transfer))
            if not reads:
                self._copying.append(transfer)

    def _recall(self) -> bool:
        """Take room in the host tier back from what is to be read ahead and has not begun; whether there was any."""
        gone = [self._waiting.pop(host_span) for host_span in self.tier.withdraw()]
        for transfer in reversed(gone):
            transfer.waits_for.clear()
            self._ahead.appendleft(transfer)
        return bool(gone)

    def _read(self, host_span: Span) -> None:
        self.tier.arrived(host_span)
        transfer = self._waiting.pop(host_span)
        del transfer.waits_for[host_span]
        if transfer.is_ahead:
            self._here.append(transfer)
        else:
            self._copy(transfer, host_span)
            if not transfer.waits_for:
                self._copying.append(transfer)
        self._start()

    # -- ahead -------------------------------------------------------------------------------------------------

    def _begin_ahead(self) -> None:
        """Ask the host tier for what was submitted ahead, and copy a segment of it if the stream is free."""
        if self._ahead and not self._backlog:
            spared = {self._geometry.expert_id(one.span.layer, one.span.expert) for one in self._here}
            while self._ahead and (request := self.tier.request(self._ahead[0].span, True, spared)) is not None:
                transfer = self._ahead.popleft()
                _, reads = request
                if reads:
                    transfer.was_read = True
                    transfer.waits_for = dict.fromkeys(reads)
                    self._waiting.update(dict.fromkeys(reads, transfer))
                else:
                    spared.add(self._geometry.expert_id(transfer.span.layer, transfer.span.expert))
                    self._here.append(transfer)
        if self._here and self._ahead_copy is None and self._is_stream_free():
            self._copy_ahead()

    def _copy_ahead(self) -> None:
        """Queue the next copy ahead, unless kernels still read the slots it goes to."""
        while self._here:
            transfer = self._here[0]
            found = self.tier.find(transfer.span)
            if not found:  # a demand has taken its room
                transfer.was_read = False
                self._ahead.appendleft(self._here.popleft())
                continue
            if all(self._streams.is_past(mark) for mark in self._readers_of(transfer.span)):
                self._ahead_copy = self._here.popleft()
                for host_span in found:
                    self._copy(transfer, host_span)
                    if not transfer.was_read:
                        self._hit_nbytes += self._nbytes(host_span)
            return

    def _is_stream_free(self) -> bool:
        """No demand is queued on the copy stream or being copied."""
        if self._demand_mark is not None and self._streams.is_past(self._demand_mark):
            self._demand_mark = None
        return self._demand_mark is None

    def _promote_copy(self) -> None:
        """Somebody waits for the copy that was begun ahead."""
        transfer = self._ahead_copy
        assert transfer is not None
        self._ahead_copy = None
        self._copying.appendleft(transfer)  # it was queued before all demands that have not run
        if self._demand_mark is None:
            self._demand_mark = transfer.mark

    def _promote_next(self) -> bool:
        """Go on with the next one that was submitted ahead as with a demand; False where it is being read."""
        if self._ahead_copy is not None:
            self._promote_copy()
            return True
        queue = self._here or (None if self._waiting else self._ahead)
        if not queue:
            return False
        self._backlog.append(queue.popleft())
        self._backlog[-1].is_ahead = False
        self._start()
        return True

    # -- copies ------------------------------------------------------------------------------------------------

    def _copy(self, transfer: _Transfer, source: Span) -> None:
        """Queue the copy of a host span into its part of the device span, after the last use of those slots."""
        layer, span = source.layer, transfer.span
        neurons = self._geometry.neurons_per_segment(layer)
        slot = span.slot + source.segment - span.segment
        uses = self._last_use[self._geometry.size_classes[layer]]
        slots = range(slot, slot + source.num_segments)
        after = list({id(mark): mark for s in slots if (mark := uses.pop(s, None)) is not None}.values())
        target = self._views[layer][slot * neurons : (slot + source.num_segments) * neurons]
        rows = self.tier.pool.rows(layer)[source.slot * neurons : (source.slot + source.num_segments) * neurons]
        self._streams.copy(target, rows, after)
        self._copied_nbytes += self._nbytes(source)
        transfer.mark = self._busy[self._geometry.expert_id(layer, source.expert)] = self._streams.mark_copy()
        if not transfer.is_ahead:
            self._demand_mark = transfer.mark

    def _readers_of(self, span: Span) -> list[Any]:
        """Marks behind the kernels that read the span's slots last."""
        uses = self._last_use[self._geometry.size_classes[span.layer]]
        return [uses[slot] for slot in range(span.slot, span.slot + span.num_segments) if slot in uses]

    def _nbytes(self, span: Span) -> int:
        return span.num_segments * self._geometry.segment_nbytes(span.layer)

    def _take(self) -> Span:
        transfer = self._copying.popleft()
        self._streams.hold_compute(transfer.mark)
        return transfer.span

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
