"""CUDA and ROCm: slots on an accelerator, filled from host memory over a copy stream, which is filled from disk.

The only file of the engine that uses torch.cuda, for what torch.accelerator lacks. CudaDevice and HostTier use both
through CudaStreams alone, so that they run without an accelerator, too, on one that tests simulate.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from expertly.core.errors import ConfigError, ModelUseError, TransferError
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.core.resources import available_host_nbytes, parse_memory
from expertly.core.units import format_nbytes
from expertly.engine.device import Device, DeviceKind
from expertly.engine.memory import WORKING_NBYTES
from expertly.engine.slots import HostPool, layer_rows
from expertly.engine.transfer import Readers
from expertly.scheduler.budget import class_segment_nbytes
from expertly.scheduler.cache import LOADING
from expertly.scheduler.tier import Tier
from expertly.store.packed import ExtentSource

AHEAD_NBYTES = 8 << 20
"""While no more prefetched bytes are on the copy stream another segment joins them: the link does not wait for the
copy thread to wake up, and a load finds a third of a millisecond of PCIe 4 before it, or one segment.
"""

_MAX_STAGED = 1 << 12
"""Most values for which pinned memory is kept, some for each number of them: the choices of a few tokens."""

_LOOK_EVERY_S = 1.0
"""Who waits for the copy thread checks this often whether that still runs."""

_WAKE = object()

# -- the device ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Transfer:
    """A device span under way."""

    span: Span
    is_prefetch: bool = False
    was_read: bool = False  # from disk, for this transfer
    num_reads: int = 0  # host spans that it still waits for
    mark: Any = None  # behind its last copy


@dataclass(slots=True)
class _UnderWay:
    """Transfers by what comes next for them; `HostTier.loading` has those that are being read."""

    needed: deque[Transfer] = field(default_factory=deque)  # loads for which the host tier has no room yet
    copying: deque[Transfer] = field(default_factory=deque)  # loads whose last copy is queued
    prefetches: deque[Transfer] = field(default_factory=deque)  # not asked of the host tier, or it had no room
    in_host: deque[Transfer] = field(default_factory=deque)  # prefetches that it has, and may yet evict for a load
    on_stream: deque[Transfer] = field(default_factory=deque)  # prefetches that are being copied, or have been
    load_mark: Any = None  # behind the last copy of a load
    watched: Any = None  # the mark of kernels behind which the next prefetch begins
    failure: Exception | None = None  # of what went on by itself


class CudaDevice:
    """disk -> host tier -> device.

    Disk and copy stream each serve loads first. A copy that is queued cannot be recalled: prefetches are on the stream
    only where no load is queued, and more than one segment only while few bytes are there, so that a load finds little
    before it.

    What moves goes on by itself: when a copy or a read has ended, the copy thread begins what comes next, whatever the
    forward thread does. Both do so under one lock, which neither holds while it waits for the device.
    """

    queues_uses = True

    def __init__(
        self,
        device: torch.device,
        streams: CudaStreams,
        store: ExtentSource,
        geometry: Geometry,
        slots_per_class: list[int],
        dtype: torch.dtype,
        tier: Tier,
    ) -> None:
        """`tier`: decides about the RAM behind the device, which is pinned where the system allows it."""
        self.torch_device, self.dtype = device, dtype
        self.waits: list[tuple[Any, Any]] = []
        self.streams = streams
        self.stamp, self.between_ns, self.to_host = streams.stamp, streams.between_ns, streams.to_host
        self._geometry = geometry
        sizes = zip(slots_per_class, class_segment_nbytes(geometry), strict=True)
        flats = [torch.empty(num * nbytes, dtype=torch.uint8, device=device) for num, nbytes in sizes]
        self._rows = [layer_rows(flats[c], geometry, layer, dtype) for layer, c in enumerate(geometry.size_classes)]
        made = streams.mark_compute()  # their memory may be what kernels that are still queued read last
        self._last_use: list[dict[int, Any]] = [dict.fromkeys(range(count), made) for count in slots_per_class]
        self._changed = threading.Condition()  # re-entrant: a garbage collection may close another model's device
        self._under_way = _UnderWay()
        self._nbytes = {"host_hit_nbytes": 0, "copied_nbytes": 0}
        self.tier = HostTier(streams, store, tier, dtype)
        self.host_memory: str | None = self.tier.pinning
        streams.watch(self._ended)

    def rows(self, layer: int) -> torch.Tensor:
        return self._rows[layer]

    def begin(self) -> None:
        if self.streams.is_capturing():
            raise ModelUseError("CUDA graphs cannot capture experts whose weights come and go; call the model eagerly")

    def submit(self, spans: Sequence[Span]) -> None:
        """Copy what the host has at once; the rest when it has been read."""
        with self._changed:
            self._under_way.needed.extend([Transfer(span) for span in spans])
            self._start()

    def prefetch(self, spans: Sequence[Span]) -> None:
        with self._changed:
            for span in spans:
                assert span.num_segments == 1, "a load never waits for more than a segment"
                self._under_way.prefetches.append(Transfer(span, is_prefetch=True))
            self._begin_prefetches()

    def cancel(self, layer: int) -> list[Span]:
        """What is neither being read nor copied has not begun."""
        with self._changed:
            way = self._under_way
            cancelled = [transfer for transfer in (*way.in_host, *way.prefetches) if transfer.span.layer == layer]
            way.in_host = deque(transfer for transfer in way.in_host if transfer.span.layer != layer)
            way.prefetches = deque(transfer for transfer in way.prefetches if transfer.span.layer != layer)
            cancelled += self.tier.cancel(layer)
            for transfer in self.tier.loading.values():
                if transfer.span.layer == layer:
                    transfer.is_prefetch = False
            self._promote([transfer for transfer in way.on_stream if transfer.span.layer == layer])
        return [transfer.span for transfer in cancelled]

    def poll(self) -> Span | None:
        with self._changed:
            self._advance()
            transfer = self._next()
            if transfer is None and (copying := self._under_way.copying) and self.streams.is_past(copying[0].mark):
                transfer = copying.popleft()
        return None if transfer is None else transfer.span

    def wait(self) -> Span:
        """The next span whose copy has been queued: the compute stream waits for it, the host does not."""
        begin: Any = None
        with self._changed:
            self._advance()
            way = self._under_way
            while (transfer := self._next() or (way.copying.popleft() if way.copying else None)) is None:
                is_awaited = bool(way.needed) or not all(each.is_prefetch for each in self.tier.loading.values())
                if is_awaited or not self._promote_next():
                    begin = self.stamp() if begin is None else begin
                    self.streams.block(self._changed)
                self._advance()
        if not self.streams.is_past(transfer.mark):
            begin = self.stamp() if begin is None else begin
            self.streams.hold_compute(transfer.mark)
        if begin is not None:
            self.waits.append((begin, self.stamp()))
        return transfer.span

    def used(self, spans: Sequence[Span]) -> None:
        mark = self.streams.mark_compute()
        uses = self._last_use[self._geometry.size_classes[spans[0].layer]]
        with self._changed:
            for span in spans:
                uses.update(dict.fromkeys(range(span.slot, span.slot + span.num_segments), mark))

    def drain(self) -> None:
        with self._changed:
            self.tier.abandon()
            self._under_way = _UnderWay()

    def stats(self) -> dict[str, int]:
        """What its readers moved; bytes of host memory's hits, and of copies; how often the forward thread waited."""
        return {**self.tier.readers.stats(), **self._nbytes, "synchronisations": self.streams.num_synchronised}

    def close(self) -> None:
        self._rows = []
        self.waits.clear()
        self.streams.close()
        self.tier.close()

    # -- what goes on by itself, under the lock ------------------------------------------------------------------------

    def _ended(self) -> None:
        """In the copy thread: a copy or a read has ended."""
        with self._changed:
            if self._under_way.failure is None:
                try:
                    self._go_on()
                except Exception as error:  # a thread's entry: the forward thread raises it
                    self._under_way.failure = error
            self._changed.notify_all()

    def _advance(self) -> None:
        """Raises what a read or a copy raised."""
        if self._under_way.failure is not None:
            raise self._under_way.failure
        self._go_on()

    def _go_on(self) -> None:
        while self.tier.loading and (host_span := self.tier.readers.poll()) is not None:
            self._read(host_span)
        if self._under_way.needed:
            self._start()
        self._begin_prefetches()

    def _next(self) -> Transfer | None:
        """A prefetch that has been copied."""
        on_stream = self._under_way.on_stream
        return on_stream.popleft() if on_stream and self.streams.is_past(on_stream[0].mark) else None

    # -- loads ---------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Begin what waits for room in the host tier."""
        way = self._under_way
        while way.needed:
            resident = self.tier.request(way.needed[0])
            if resident is None:
                recalled = self.tier.cancel()  # the room of prefetches whose reads have not begun
                way.prefetches.extendleft(reversed(recalled))
                if not recalled:
                    return
                continue
            transfer = way.needed.popleft()
            self._copy_all(transfer, resident)
            if not transfer.num_reads:
                way.copying.append(transfer)

    def _read(self, host_span: Span) -> None:
        transfer = self.tier.arrived(host_span)
        if transfer.is_prefetch:
            self._under_way.in_host.append(transfer)
        else:
            self._copy(transfer, host_span)
            if not transfer.num_reads:
                self._under_way.copying.append(transfer)
        self._start()

    # -- prefetches ----------------------------------------------------------------------------------------------------

    def _begin_prefetches(self) -> None:
        """Ask the host tier for prefetches, and copy what it has while the stream is free."""
        way = self._under_way
        spared = {self.tier.expert(transfer.span) for transfer in way.in_host}
        while way.prefetches and not way.needed:
            transfer = way.prefetches[0]
            if self.tier.request(transfer, spared) is None:
                break
            way.prefetches.popleft()
            transfer.was_read = transfer.num_reads > 0
            if not transfer.num_reads:
                spared.add(self.tier.expert(transfer.span))
                way.in_host.append(transfer)
        while way.in_host and self._is_stream_free() and self._begin_copy():
            pass

    def _begin_copy(self) -> bool:
        """Queue the next copy of a prefetch, unless kernels still read the slots it goes to; whether to go on."""
        way, transfer = self._under_way, self._under_way.in_host[0]
        resident = self.tier.find(transfer.span)
        if not resident:  # a load has taken its room
            way.prefetches.appendleft(way.in_host.popleft())
            return True
        for mark in self._uses_of(transfer.span):
            if not self.streams.is_past(mark):
                if way.watched is not mark:
                    way.watched = mark
                    self.streams.notice(mark)
                return False
        way.on_stream.append(way.in_host.popleft())
        self._copy_all(transfer, resident)
        return True

    def _is_stream_free(self) -> bool:
        """No load is queued on the copy stream or being copied, and not many prefetches are."""
        way, is_past = self._under_way, self.streams.is_past
        if way.load_mark is not None:
            if not is_past(way.load_mark):
                return False
            way.load_mark = None
        coming = [transfer.span for transfer in way.on_stream if not is_past(transfer.mark)]
        return not coming or sum(map(self._span_nbytes, coming)) < AHEAD_NBYTES

    def _promote(self, transfers: Sequence[Transfer]) -> None:
        """Somebody waits for these prefetches, which are on the stream."""
        way = self._under_way
        for transfer in transfers:
            way.on_stream.remove(transfer)
        way.copying.extendleft(reversed(transfers))  # they were queued before all loads that have not run
        if transfers and way.load_mark is None:
            way.load_mark = transfers[-1].mark

    def _promote_next(self) -> bool:
        """Go on with the next prefetch as with a load; False where it is being read."""
        way = self._under_way
        if way.on_stream:
            self._promote([way.on_stream[0]])
            return True
        queue = way.in_host or (None if self.tier.loading else way.prefetches)
        if not queue:
            return False
        way.needed.append(queue.popleft())
        way.needed[-1].is_prefetch = False
        self._start()
        return True

    # -- copies --------------------------------------------------------------------------------------------------------

    def _copy(self, transfer: Transfer, source: Span) -> None:
        """Queue the copy of a host span into its part of the device span, after the last use of those slots."""
        layer, span = source.layer, transfer.span
        blocks = self._geometry.blocks_per_segment(layer)
        slot = span.slot + source.segment - span.segment
        uses = self._last_use[self._geometry.size_classes[layer]]
        slots = range(slot, slot + source.num_segments)
        after = list({id(mark): mark for s in slots if (mark := uses.pop(s, None)) is not None}.values())
        target = self._rows[layer][slot * blocks : (slot + source.num_segments) * blocks]
        rows = self.tier.pool.rows(layer)[source.slot * blocks : (source.slot + source.num_segments) * blocks]
        self._nbytes["copied_nbytes"] += self._span_nbytes(source)
        transfer.mark = self.streams.copy(target, rows, after)
        self.tier.copied(source, transfer.mark)
        if not transfer.is_prefetch:
            self._under_way.load_mark = transfer.mark

    def _copy_all(self, transfer: Transfer, sources: Sequence[Span]) -> None:
        """Copy what the host tier had: a hit, unless it was read for this transfer."""
        for source in sources:
            self._copy(transfer, source)
            self._nbytes["host_hit_nbytes"] += 0 if transfer.was_read else self._span_nbytes(source)

    def _span_nbytes(self, span: Span) -> int:
        return span.num_segments * self._geometry.unit_nbytes[span.layer]

    def _uses_of(self, span: Span) -> list[Any]:
        """Marks behind the kernels that read the span's slots last."""
        uses = self._last_use[self._geometry.size_classes[span.layer]]
        return [uses[slot] for slot in range(span.slot, span.slot + span.num_segments) if slot in uses]


# -- the RAM behind it ---------------------------------------------------------------------------------------------


class HostTier:
    """Brings the segments of a device span into host slots, as a Tier decides. Its spans carry host slots, not device
    slots. An expert is not evicted while a copy out of its slots may still be running.
    """

    def __init__(self, streams: CudaStreams, store: ExtentSource, tier: Tier, dtype: torch.dtype) -> None:
        self.loading: dict[Span, Transfer] = {}
        """Host spans that are being read, and for which transfer."""
        self._tier, self._streams = tier, streams
        self.memory_nbytes = tier.memory_nbytes
        self._copied: dict[int, Any] = {}  # expert id -> mark of the last copy out of its slots, in their order
        with contextlib.ExitStack() as opened:  # closed from the last to the first
            self.pool = HostPool(tier.geometry, tier.slots, class_segment_nbytes(tier.geometry), dtype)
            opened.callback(self.pool.close)
            self.pinning = "registered"
            """How it is page-locked. From memory that is not, copies are slower and make who queues them wait."""
            with contextlib.ExitStack() as pinned:
                try:
                    for memory in self.pool.regions:
                        pinned.callback(streams.register(memory))
                    opened.push(pinned.pop_all())
                except OSError as error:
                    self.pinning = f"pageable; {error}"
            opened.callback(streams.synchronize)
            self.readers = Readers(store.layer_file, tier.geometry, self.pool.memory, arrived=streams.wake)
            opened.callback(self.readers.close)
            self._opened = opened.pop_all()

    def request(self, transfer: Transfer, spared: Collection[int] = ()) -> list[Span] | None:
        """The host spans of a transfer that are here; what is not is read from now on. None: no room until reads or
        copies end. A prefetch is read behind all others, and has room only where nothing must be waited for and no
        expert of `spared` (ids) goes.
        """
        decided = self._tier.request(transfer.span, partial(self._busy, spared))
        if decided is None:
            return None
        resident, reads = decided
        transfer.num_reads = len(reads)
        self.loading.update(dict.fromkeys(reads, transfer))
        self.readers.submit(reads, is_prefetch=transfer.is_prefetch)
        return resident

    def _busy(self, spared: Collection[int]) -> Iterable[int]:
        """Experts that must not go now."""
        while self._copied and self._streams.is_past(next(iter(self._copied.values()))):
            del self._copied[next(iter(self._copied))]
        return (*spared, *self._copied, *map(self.expert, self.loading))

    def find(self, wanted: Span) -> list[Span]:
        """The host spans of a device span that is here; none where a part of it is not."""
        return self._tier.find(wanted)

    def cancel(self, layer: int | None = None) -> list[Transfer]:
        """Give up prefetches of this layer, or all, that no reader has begun."""
        cancelled = []
        for span in self.readers.cancel(layer):
            cancelled.append(self.loading.pop(span))
            self._tier.cancelled(span)
        return cancelled

    def arrived(self, span: Span) -> Transfer:
        """A host span has been read; for which transfer."""
        self._tier.arrived(span)
        transfer = self.loading.pop(span)
        transfer.num_reads -= 1
        return transfer

    def copied(self, span: Span, mark: Any) -> None:
        """A copy of a host span has been queued before this mark."""
        eid = self.expert(span)
        self._copied.pop(eid, None)
        self._copied[eid] = mark

    def abandon(self) -> None:
        """Nothing is read or copied any more; what had not arrived is absent again."""
        self.readers.drain()
        for span in self.loading:
            self._tier.cancelled(span)
        self.loading.clear()
        self._streams.synchronize()
        self._copied.clear()

    def close(self) -> None:
        """Free threads, files and memory. Idempotent."""
        self._opened.close()

    @property
    def resident_nbytes(self) -> int:
        """Of the segments that are here. Any thread may ask."""
        return self._tier.cache.resident_nbytes()

    def check(self) -> None:
        """Slots, units and budget agree."""
        cache = self._tier.cache
        self._tier.check()
        loading = sorted(unit for span in self.loading for unit in cache.units_of(span))
        assert loading == [unit for unit, state in enumerate(cache.state) if state == LOADING]

    def expert(self, span: Span) -> int:
        """Its id."""
        return self._tier.geometry.expert_id(span.layer, span.expert)


# -- streams -------------------------------------------------------------------------------------------------------


class CopyThread:
    """Waits for marks, one after the other, so that what moves goes on whatever the forward thread does."""

    def __init__(self) -> None:
        self._awaited: SimpleQueue[Any] = SimpleQueue()  # marks; _WAKE, or None, which ends the thread
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # what ended it

    def watch(self, ended: Callable[[], None]) -> None:
        """From now on `ended` is called in this thread: whenever what is before a mark of `notice` has run, or `wake`
        was called.
        """
        self._thread = threading.Thread(target=self._serve, args=(ended,), name="expertly-copies", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Any thread may call it."""
        self._awaited.put(_WAKE)

    def notice(self, mark: Any) -> None:
        self._awaited.put(mark)

    def block(self, changed: threading.Condition) -> None:
        """Wait, a second at most, until `ended` has been called. Raises TransferError where its thread has ended."""
        changed.wait(_LOOK_EVERY_S)
        if self._error is not None:
            raise TransferError(f"the thread that copies experts has ended: {self._error}") from self._error

    def close(self) -> None:
        """End the thread. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._awaited.put(None)
            if thread is not threading.current_thread():  # a garbage collection in the thread itself
                thread.join()

    def _serve(self, ended: Callable[[], None]) -> None:
        try:
            with torch.inference_mode():  # slots may have been made in it
                while (mark := self._awaited.get()) is not None:
                    if mark is not _WAKE:
                        mark.synchronize()
                    ended()
        except BaseException as error:  # a thread's entry: the waiter raises it
            self._error = error


class CudaStreams(CopyThread):
    """One stream that computes, whichever is current where a method is called, and one that copies, whose marks the
    thread waits for. Marks and stamps are events: `Any`, made and read only here. The forward thread waits in `block`,
    `to_host`, `wait_for` and `synchronize` alone.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.num_synchronised = 0
        """How often the forward thread waited for what it had queued."""
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self._device = torch.device(device.type, index)
        self._copy_stream = torch.Stream(self._device)
        self._staging: dict[tuple[torch.dtype, int], torch.Tensor] = {}  # pinned, by their number

    def is_capturing(self) -> bool:
        """Whether what is queued on the compute stream is recorded instead of run."""
        return torch.cuda.is_current_stream_capturing()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: list[Any]) -> Any:
        """Queue a copy on the copy stream, after these marks of the compute stream. The mark behind it. The host waits
        where the source is not page-locked.
        """
        for mark in after:
            self._copy_stream.wait_event(mark)
        with self._copy_stream:
            target.copy_(source, non_blocking=True)
        done = torch.Event(self._device, blocking=True)  # whoever waits for it takes no processor
        done.record(self._copy_stream)
        self.notice(done)
        return done

    def mark_compute(self) -> Any:
        """A mark behind everything queued on the compute stream."""
        return torch.accelerator.current_stream(self._device).record_event()

    def is_past(self, mark: Any) -> bool:
        """Whether everything before the mark has run."""
        return bool(mark.query())

    def hold_compute(self, mark: Any) -> None:
        """The compute stream goes on only when the mark is past."""
        torch.accelerator.current_stream(self._device).wait_event(mark)

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, until the next call. The host waits for nothing but what makes these values."""
        on_host, done = self.to_host_later(values)
        self.wait_for(done)
        return on_host

    def to_host_later(self, values: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The same without waiting: a copy that is there once the mark is reached."""
        key = values.dtype, values.numel()
        staging = self._staging.get(key)
        if staging is None:
            staging = torch.empty(values.numel(), dtype=values.dtype, pin_memory=True)
            if values.numel() <= _MAX_STAGED:
                self._staging[key] = staging
        on_host = staging.view(values.shape).copy_(values, non_blocking=True)
        return on_host, self.mark_compute()

    def wait_for(self, mark: Any) -> None:
        """Wait for a mark, in the forward thread."""
        mark.synchronize()
        self.num_synchronised += 1

    def reach(self, mark: Any) -> None:
        """Wait for a mark of the compute stream, in any thread."""
        mark.synchronize()

    def synchronize(self) -> None:
        """Wait for everything queued on any stream of the device: the forward pass may have had others."""
        torch.accelerator.synchronize(self._device)

    def stamp(self) -> Any:
        """A moment of the compute stream: when it comes here."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def between_ns(self, begin: Any, end: Any) -> int | None:
        """From one stamp to another; None where the stream has not come there."""
        return int(begin.elapsed_time(end) * 1e6) if end.query() else None  # of milliseconds

    def register(self, memory: torch.Tensor) -> Callable[[], object]:
        """Pin host memory; call the result to undo. Raises OSError."""
        runtime = torch.cuda.cudart()  # HIP's, where torch is built for it
        address, nbytes = memory.data_ptr(), memory.numel()
        error = runtime.cudaHostRegister(address, nbytes, 0)
        if int(error) != 0:
            with contextlib.suppress(RuntimeError):  # else whoever launches the next kernel is told of this error
                torch.zeros(1, device=self._device).add_(1)
            raise OSError(f"{format_nbytes(nbytes)} cannot be registered ({error})")
        return lambda: runtime.cudaHostUnregister(address)


class CudaGraphs:
    """See `model.graphs.Recorder`. The default stream records nothing, and other threads go on with what they do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.Stream(device)
        self._within = contextlib.ExitStack()
        self._graph: Any = None

    def begin(self) -> None:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        self._within.enter_context(self._stream)
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(self._pool, "thread_local")

    def end(self) -> Callable[[], None]:
        graph, self._graph = self._graph, None
        try:
            graph.capture_end()
        finally:
            self._within.close()
        replay: Callable[[], None] = graph.replay
        return replay

    def abandon(self) -> None:
        with contextlib.suppress(RuntimeError), self._within:
            if self._graph is not None:
                self.end()


# -- the kind --------------------------------------------------------------------------------------------------------


class _Cuda(DeviceKind):
    runs_on_host = False

    def check(self, device: torch.device) -> None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type != device.type:
            raise ConfigError(f"device={str(device)!r}: this machine (or this torch) has no CUDA device; accepted: cpu")
        count = torch.accelerator.device_count()
        if device.index is not None and device.index >= count:
            accepted = ", ".join(f"cuda:{i}" for i in range(count))
            raise ConfigError(f"device={str(device)!r}: there is no such device; accepted: {accepted}")

    def name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def available_nbytes(self, device: torch.device) -> int:
        """What is free now, what torch caches and does not use included."""
        free, _ = torch.accelerator.get_memory_info(device)
        return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)

    def host_nbytes(self, device: torch.device, host_memory: str | int, expert_nbytes: int) -> int:
        nbytes = parse_memory(host_memory, expert_nbytes)
        return max(0, min(expert_nbytes, available_host_nbytes() - WORKING_NBYTES)) if nbytes is None else nbytes

    def make(
        self,
        device: torch.device,
        store: ExtentSource,
        geometry: Geometry,
        slots_per_class: list[int],
        dtype: torch.dtype,
        tier: Tier | None,
    ) -> Device:
        assert tier is not None
        # cuDNN's attention makes a plan for each new length, which takes longer than several tokens; torch has others.
        torch.backends.cuda.enable_cudnn_sdp(False)
        return CudaDevice(device, CudaStreams(device), store, geometry, slots_per_class, dtype, tier)

    def recorder(self, device: torch.device) -> CudaGraphs:
        return CudaGraphs(device)

    def beside(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        return torch.Stream(device)


KIND = _Cuda()
