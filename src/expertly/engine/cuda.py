"""CUDA: slots on an accelerator, filled from host memory over a copy stream, which is filled from disk.

The only file of the engine that uses torch.cuda. CudaDevice and HostTier do so through CudaStreams alone, so that they
run without an accelerator, too, on streams that tests make up.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from expertly.core.errors import BudgetError, ConfigError, ModelUseError
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.core.resources import parse_memory
from expertly.engine.device import Device, DeviceKind, Handover
from expertly.engine.memory import WORKING_NBYTES, available_host_nbytes
from expertly.engine.numa import MemoryNode, node_of_pci_device
from expertly.engine.reading import ExtentSource, HostPool, layer_rows
from expertly.engine.transfer import Readers
from expertly.policies.eviction.simple import LRU
from expertly.scheduler.budget import class_segment_nbytes, split_budget
from expertly.scheduler.cache import Partition
from expertly.scheduler.slots import SlotTable

# -- the device ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Transfer:
    """A device span under way: the host spans it still waits for, and the mark behind its last copy."""

    span: Span
    is_prefetch: bool = False
    was_read: bool = False  # from disk, for this transfer
    waits_for: dict[Span, None] = field(default_factory=dict)
    mark: Any = None


class CudaDevice:
    """disk -> host tier -> device.

    Disk and copy stream each serve loads first. A copy that is queued cannot be recalled: one prefetched segment is on
    the stream at a time, and only behind kernels and loads that have run, so that a load finds one segment before it at
    most. Prefetches move on when `poll` or `wait` is called.
    """

    def __init__(
        self,
        device: torch.device,
        streams: CudaStreams,
        store: ExtentSource,
        geometry: Geometry,
        slots_per_class: list[int],
        dtype: torch.dtype,
        host_nbytes: int,
        node: MemoryNode | None = None,
    ) -> None:
        """`host_nbytes`: pinned RAM."""
        self.torch_device = device
        self.dtype = dtype
        self.queues_uses = True
        self.node = node
        self._waited_ns = 0
        self._streams = streams
        self._geometry = geometry
        sizes = class_segment_nbytes(geometry)
        flats = [
            torch.empty(num_slots * nbytes, dtype=torch.uint8, device=device)
            for num_slots, nbytes in zip(slots_per_class, sizes, strict=True)
        ]
        self._rows = [layer_rows(flats[c], geometry, layer, dtype) for layer, c in enumerate(geometry.size_classes)]
        self._last_use: list[dict[int, Any]] = [{} for _ in sizes]  # slot -> mark of the last kernels that read it
        self.tier = HostTier(streams, store, geometry, host_nbytes, dtype, node)
        self._waiting: dict[Span, _Transfer] = {}  # by host span being read
        self._copying: deque[_Transfer] = deque()  # loads whose last copy is queued
        self._needed: deque[_Transfer] = deque()  # loads for which the host tier has no room yet
        self._load_mark: Any = None  # behind the last copy of a load
        self._prefetches: deque[_Transfer] = deque()  # not asked of the host tier, or it had no room
        self._in_host: deque[_Transfer] = deque()  # prefetches that the host tier has, and may yet evict for a load
        self._prefetch_copy: _Transfer | None = None  # the one on the stream
        self._copied_nbytes = 0
        self._hit_nbytes = 0

    def rows(self, layer: int) -> torch.Tensor:
        return self._rows[layer]

    def begin(self) -> None:
        if self._streams.is_capturing():
            raise ModelUseError("CUDA graphs cannot capture experts whose weights come and go; call the model eagerly")

    def submit(self, spans: Sequence[Span]) -> None:
        """Copy what the host has at once; the rest when it has been read."""
        self._needed.extend([_Transfer(span) for span in spans])
        self._start()

    def prefetch(self, spans: Sequence[Span]) -> None:
        for span in spans:
            assert span.num_segments == 1, "a load never waits for more than a segment"
            self._prefetches.append(_Transfer(span, is_prefetch=True))
        self._begin_prefetches()

    def cancel(self, layer: int, experts: Collection[int] | None = None) -> list[Span]:
        """What is neither being read nor copied has not begun."""

        def is_meant(transfer: _Transfer) -> bool:
            return transfer.span.layer == layer and (experts is None or transfer.span.expert in experts)

        cancelled: list[Span] = []
        for queue in (self._in_host, self._prefetches):
            cancelled += [transfer.span for transfer in queue if is_meant(transfer)]
            left = [transfer for transfer in queue if not is_meant(transfer)]
            queue.clear()
            queue.extend(left)
        cancelled += [self._waiting.pop(host_span).span for host_span in self.tier.cancel(layer, experts)]
        for transfer in self._waiting.values():
            if is_meant(transfer):
                transfer.is_prefetch = False
        if self._prefetch_copy is not None and is_meant(self._prefetch_copy):
            self._promote_copy()
        return cancelled

    def poll(self) -> Span | None:
        while self._waiting and (host_span := self.tier.readers.poll()) is not None:
            self._read(host_span)
        span = None
        if self._copying and self._streams.is_past(self._copying[0].mark):
            span = self._take()
        elif self._prefetch_copy is not None and self._streams.is_past(self._prefetch_copy.mark):
            self._streams.hold_compute(self._prefetch_copy.mark)
            span, self._prefetch_copy = self._prefetch_copy.span, None
        self._begin_prefetches()
        return span

    def wait(self) -> Span:
        """The next span whose copy has been queued: the compute stream waits for it, the host does not."""
        start = time.perf_counter_ns()
        while not self._copying:
            is_awaited = bool(self._needed) or not all(transfer.is_prefetch for transfer in self._waiting.values())
            if not is_awaited and self._promote_next():
                continue
            if self._waiting:
                self._read(self.tier.readers.wait())
            else:
                self._start()
        span = self._take()
        self._begin_prefetches()
        self._waited_ns += time.perf_counter_ns() - start
        return span

    def used(self, span: Span) -> None:
        mark = self._streams.mark_compute()
        uses = self._last_use[self._geometry.size_classes[span.layer]]
        uses.update(dict.fromkeys(range(span.slot, span.slot + span.num_segments), mark))

    def drain(self) -> None:
        for queue in (self._copying, self._needed, self._prefetches, self._in_host):
            queue.clear()
        self._waiting.clear()
        self._prefetch_copy = self._load_mark = None
        self.tier.abandon()

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
        self._rows = []
        self.tier.close()

    # -- loads ---------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Begin what waits for room in the host tier."""
        while self._needed:
            request = self.tier.request(self._needed[0].span)
            if request is None:
                if not self._recall():
                    return
                continue
            transfer = self._needed.popleft()
            found, reads = request
            self._copy_found(transfer, found)
            self._await(transfer, reads)
            if not reads:
                self._copying.append(transfer)

    def _await(self, transfer: _Transfer, reads: Sequence[Span]) -> None:
        transfer.waits_for = dict.fromkeys(reads)
        self._waiting.update(dict.fromkeys(reads, transfer))

    def _recall(self) -> bool:
        """Take the host tier's room back from prefetches whose reads have not begun; whether there was any."""
        recalled = [self._waiting.pop(host_span) for host_span in self.tier.cancel()]
        for transfer in reversed(recalled):
            transfer.waits_for.clear()
            self._prefetches.appendleft(transfer)
        return bool(recalled)

    def _read(self, host_span: Span) -> None:
        self.tier.arrived(host_span)
        transfer = self._waiting.pop(host_span)
        del transfer.waits_for[host_span]
        if transfer.is_prefetch:
            self._in_host.append(transfer)
        else:
            self._copy(transfer, host_span)
            if not transfer.waits_for:
                self._copying.append(transfer)
        self._start()

    # -- prefetches ----------------------------------------------------------------------------------------------------

    def _begin_prefetches(self) -> None:
        """Ask the host tier for prefetches, and copy a segment of one if the stream is free."""
        if self._prefetches and not self._needed:
            spared = {self._geometry.expert_id(one.span.layer, one.span.expert) for one in self._in_host}
            while self._prefetches:
                request = self.tier.request(self._prefetches[0].span, True, spared)
                if request is None:
                    break
                transfer, (_, reads) = self._prefetches.popleft(), request
                if reads:
                    transfer.was_read = True
                    self._await(transfer, reads)
                else:
                    spared.add(self._geometry.expert_id(transfer.span.layer, transfer.span.expert))
                    self._in_host.append(transfer)
        if self._in_host and self._prefetch_copy is None and self._is_stream_free():
            self._begin_copy()

    def _begin_copy(self) -> None:
        """Queue the next copy of a prefetch, unless kernels still read the slots it goes to."""
        while self._in_host:
            transfer = self._in_host[0]
            found = self.tier.find(transfer.span)
            if not found:  # a load has taken its room
                transfer.was_read = False
                self._prefetches.appendleft(self._in_host.popleft())
                continue
            if all(self._streams.is_past(mark) for mark in self._uses_of(transfer.span)):
                self._prefetch_copy = self._in_host.popleft()
                self._copy_found(transfer, found)
            return

    def _is_stream_free(self) -> bool:
        """No load is queued on the copy stream or being copied."""
        if self._load_mark is not None and self._streams.is_past(self._load_mark):
            self._load_mark = None
        return self._load_mark is None

    def _promote_copy(self) -> None:
        """Somebody waits for the prefetch that is on the stream."""
        transfer = self._prefetch_copy
        assert transfer is not None
        self._prefetch_copy = None
        self._copying.appendleft(transfer)  # it was queued before all loads that have not run
        if self._load_mark is None:
            self._load_mark = transfer.mark

    def _promote_next(self) -> bool:
        """Go on with the next prefetch as with a load; False where it is being read."""
        if self._prefetch_copy is not None:
            self._promote_copy()
            return True
        queue = self._in_host or (None if self._waiting else self._prefetches)
        if not queue:
            return False
        self._needed.append(queue.popleft())
        self._needed[-1].is_prefetch = False
        self._start()
        return True

    # -- copies --------------------------------------------------------------------------------------------------------

    def _copy(self, transfer: _Transfer, source: Span) -> None:
        """Queue the copy of a host span into its part of the device span, after the last use of those slots."""
        layer, span = source.layer, transfer.span
        blocks = self._geometry.blocks_per_segment(layer)
        slot = span.slot + source.segment - span.segment
        uses = self._last_use[self._geometry.size_classes[layer]]
        slots = range(slot, slot + source.num_segments)
        after = list({id(mark): mark for s in slots if (mark := uses.pop(s, None)) is not None}.values())
        target = self._rows[layer][slot * blocks : (slot + source.num_segments) * blocks]
        rows = self.tier.pool.rows(layer)[source.slot * blocks : (source.slot + source.num_segments) * blocks]
        self._streams.copy(target, rows, after)
        self._copied_nbytes += self._nbytes(source)
        transfer.mark = self._streams.mark_copy()
        self.tier.copied(source, transfer.mark)
        if not transfer.is_prefetch:
            self._load_mark = transfer.mark

    def _copy_found(self, transfer: _Transfer, found: Sequence[Span]) -> None:
        """Copy what the host tier had: a hit, unless it was read for this transfer."""
        for host_span in found:
            self._copy(transfer, host_span)
            if not transfer.was_read:
                self._hit_nbytes += self._nbytes(host_span)

    def _uses_of(self, span: Span) -> list[Any]:
        """Marks behind the kernels that read the span's slots last."""
        uses = self._last_use[self._geometry.size_classes[span.layer]]
        return [uses[slot] for slot in range(span.slot, span.slot + span.num_segments) if slot in uses]

    def _nbytes(self, span: Span) -> int:
        return span.num_segments * self._geometry.segment_nbytes(span.layer)

    def _take(self) -> Span:
        transfer = self._copying.popleft()
        self._streams.hold_compute(transfer.mark)
        return transfer.span


# -- the RAM behind it ---------------------------------------------------------------------------------------------


class HostTier:
    """Brings the segments of a device span into pinned host slots. Its spans carry host slots, not device slots. An
    expert is not evicted while a copy out of its slots may still be running.
    """

    def __init__(
        self,
        streams: CudaStreams,
        store: ExtentSource,
        geometry: Geometry,
        memory_nbytes: int,
        dtype: torch.dtype,
        node: MemoryNode | None = None,
    ) -> None:
        try:
            slots = split_budget(geometry, memory_nbytes).pool_slots()
        except BudgetError as error:
            raise BudgetError(f"host_{error}") from None
        self._slot_nbytes = class_segment_nbytes(geometry)
        self.memory_nbytes = sum(num * nbytes for num, nbytes in zip(slots, self._slot_nbytes, strict=True))
        """Of all its slots."""
        self._geometry = geometry
        self._slots = SlotTable(geometry, slots)
        self._caches = [Partition(num_slots, LRU()) for num_slots in slots]
        self._streams = streams
        self._loading: dict[Span, None] = {}
        self._copied: dict[int, Any] = {}  # expert id -> mark of the last copy out of its slots, in their order
        with contextlib.ExitStack() as opened:  # closed from the last to the first
            self.pool = HostPool(geometry, slots, self._slot_nbytes, dtype, node)
            opened.callback(self.pool.close)
            for memory in self.pool.regions:
                opened.callback(streams.register(memory))
            opened.callback(streams.synchronize)
            self.readers = Readers(store, geometry, self.pool.buffer, node=node)
            opened.callback(self.readers.close)
            self._opened = opened.pop_all()

    def request(
        self, wanted: Span, is_prefetch: bool = False, spared: Collection[int] = ()
    ) -> tuple[list[Span], list[Span]] | None:
        """(host spans that are here, host spans now to be read) of a device span; None: no room until reads end.

        `is_prefetch`: read behind all others, and have room only where nothing must be waited for and no expert of
        `spared` (ids) goes.
        """
        geometry, slots = self._geometry, self._slots
        eid, mask = self._segments(wanted)
        cache = self._caches[geometry.size_classes[wanted.layer]]
        here, missing = mask & slots.resident[eid], mask & ~slots.resident[eid]
        assert not missing & slots.in_flight[eid], "a device span is asked for once"
        if missing:
            if not self._make_room(cache, missing.bit_count(), eid, is_prefetch, spared):
                return None
            cache.keep(eid, missing)
        cache.policy.used([eid], [1], 1)
        found = slots.spans(eid, here) if here else []
        reads = slots.allocate(eid, missing, slots.awaited) if missing else []
        self._loading.update(dict.fromkeys(reads))
        (self.readers.prefetch if is_prefetch else self.readers.submit)(reads)
        return found, reads

    def find(self, wanted: Span) -> list[Span]:
        """The host spans of a device span that is here; none where a part of it is not."""
        eid, mask = self._segments(wanted)
        if self._slots.resident[eid] & mask != mask:
            return []
        return self._slots.spans(eid, mask)

    def cancel(self, layer: int | None = None, experts: Collection[int] | None = None) -> list[Span]:
        """Give up prefetched host spans of this layer, or of these experts of it, or all, that no reader has begun."""
        cancelled = self.readers.cancel(layer, experts)
        for span in cancelled:
            del self._loading[span]
            self._release(span)
        return cancelled

    def arrived(self, span: Span) -> None:
        """A host span has been read."""
        del self._loading[span]
        eid, mask = self._segments(span)
        self._slots.arrived(eid, mask, self._slots.awaited)

    def copied(self, span: Span, mark: Any) -> None:
        """A copy of a host span has been queued before this mark."""
        eid, _ = self._segments(span)
        self._copied.pop(eid, None)
        self._copied[eid] = mark

    def abandon(self) -> None:
        """Nothing is read or copied any more; what had not arrived is absent again."""
        self.readers.drain()
        for span in self._loading:
            self._release(span)
        self._loading.clear()
        self._streams.synchronize()
        self._copied.clear()
        self.check()  # an interrupt in the middle of a decision shows here

    def close(self) -> None:
        """Free threads, files and memory. Idempotent."""
        self._opened.close()

    @property
    def resident_nbytes(self) -> int:
        """Of the segments that are here. Any thread may ask."""
        geometry = self._geometry
        return sum(
            mask.bit_count() * self._slot_nbytes[geometry.size_classes[geometry.layer_of_expert(eid)]]
            for eid, mask in enumerate(self._slots.resident)
        )

    def check(self) -> None:
        """Slots, masks and budget agree."""
        slots = self._slots
        slots.check()
        kept: dict[int, int] = {}
        for cache in self._caches:
            assert cache.used == sum(mask.bit_count() for mask in cache.kept.values()) <= cache.capacity
            kept.update(cache.kept)
        loading = [0] * self._geometry.num_experts
        for span in self._loading:
            eid, mask = self._segments(span)
            loading[eid] |= mask
        assert loading == slots.in_flight
        held = [here | coming for here, coming in zip(slots.resident, slots.in_flight, strict=True)]
        assert [kept.get(eid, 0) for eid in range(self._geometry.num_experts)] == held

    def _segments(self, span: Span) -> tuple[int, int]:
        """The expert id and the mask of its segments."""
        eid = self._geometry.expert_id(span.layer, span.expert)
        return eid, ((1 << span.num_segments) - 1) << span.segment

    def _release(self, span: Span) -> None:
        eid, mask = self._segments(span)
        self._caches[self._geometry.size_classes[span.layer]].drop(eid, mask)
        self._slots.release(eid, mask)

    def _make_room(
        self, cache: Partition, num_segments: int, wanted: int, is_prefetch: bool, spared: Collection[int]
    ) -> bool:
        short = num_segments - cache.room
        if short <= 0:
            return True
        while self._copied and self._streams.is_past(next(iter(self._copied.values()))):
            del self._copied[next(iter(self._copied))]
        loading = (self._geometry.expert_id(span.layer, span.expert) for span in self._loading)
        victims = cache.evict(short, {wanted, *spared, *self._copied, *loading})
        if victims is None:
            if is_prefetch or self._loading:
                return False
            self._streams.synchronize()
            self._copied.clear()
            victims = cache.evict(short, {wanted})
        assert victims is not None, "the host tier holds at least one token's experts"
        for eid, mask in victims:
            self._slots.release(eid, mask)
        return True


# -- streams -------------------------------------------------------------------------------------------------------


class CudaStreams:
    """One stream that computes and one that copies. Marks are events: `Any`, made and read only here. No call but
    `synchronize` makes the host wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy_stream = torch.cuda.Stream(device)
        self._holds: deque[tuple[Any, Any]] = deque()  # (before, after) each hold of the compute stream
        self._spare: list[Any] = []

    def is_capturing(self) -> bool:
        """Whether what is queued on the compute stream is recorded instead of run."""
        return torch.cuda.is_current_stream_capturing()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: list[Any]) -> None:
        """Queue a copy on the copy stream, after these marks of the compute stream. The source must be pinned."""
        for mark in after:
            self._copy_stream.wait_event(mark)
        with torch.cuda.stream(self._copy_stream):
            target.copy_(source, non_blocking=True)

    def mark_copy(self) -> Any:
        """A mark behind everything queued on the copy stream."""
        return self._copy_stream.record_event()

    def mark_compute(self) -> Any:
        """A mark behind everything queued on the compute stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def is_past(self, mark: Any) -> bool:
        """Whether everything before the mark has run."""
        return bool(mark.query())

    def hold_compute(self, mark: Any) -> None:
        """The compute stream goes on only when the mark is past; how long that takes is timed."""
        if mark.query():
            return
        stream = torch.cuda.current_stream(self._device)
        before, after = self._timer(), self._timer()
        before.record(stream)
        stream.wait_event(mark)
        after.record(stream)
        self._holds.append((before, after))

    def synchronize(self) -> None:
        """Wait for everything queued on both streams."""
        self._copy_stream.synchronize()
        torch.cuda.current_stream(self._device).synchronize()

    def stall_ns(self) -> int:
        """Time the compute stream was held, of holds that have ended since the last call."""
        total = 0
        while self._holds and self._holds[0][1].query():
            before, after = self._holds.popleft()
            total += int(before.elapsed_time(after) * 1e6)  # milliseconds
            self._spare += (before, after)
        return total

    def register(self, memory: torch.Tensor) -> Callable[[], object]:
        """Pin host memory; call the result to undo. The caching allocator would round a large region up to a power of
        two. Raises ConfigError.
        """
        runtime = torch.cuda.cudart()
        address, nbytes = memory.data_ptr(), memory.numel()
        error = runtime.cudaHostRegister(address, nbytes, 0)
        if int(error) != 0:
            raise ConfigError(
                f"host_memory={nbytes} bytes: cannot be page-locked ({error}); state less, or raise ulimit -l"
            )
        return lambda: runtime.cudaHostUnregister(address)

    def _timer(self) -> Any:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)


class CudaHandover(Handover):
    """`home` is the first device. Which stream is current is each thread's own."""

    def __init__(self, home: torch.device) -> None:
        self._home = home

    def give(self) -> Any:
        return torch.cuda.current_stream(self._home).record_event()

    def take(self, mark: Any, device: torch.device) -> None:
        for one in dict.fromkeys((self._home, device)):
            torch.cuda.current_stream(one).wait_event(mark)  # whichever device it is of

    def keep(self, tensor: torch.Tensor) -> None:
        """Its memory is used again only behind what this thread's stream has queued until it is freed."""
        tensor.record_stream(torch.cuda.current_stream(self._home))


# -- the kind --------------------------------------------------------------------------------------------------------


class _Cuda(DeviceKind):
    runs_on_host = False

    def check(self, device: torch.device, field: str) -> None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type != device.type:
            why = "this machine (or this torch) has no CUDA device"
            raise ConfigError(f"{field}={str(device)!r}: {why}; accepted: cpu")
        count = torch.accelerator.device_count()
        if device.index is not None and device.index >= count:
            accepted = ", ".join(f"cuda:{i}" for i in range(count))
            raise ConfigError(f"{field}={str(device)!r}: there is no such device; accepted: {accepted}")

    def name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def memory_of(self, device: torch.device) -> str:
        return str(device)

    def available_nbytes(self, device: torch.device) -> int:
        """What is free now, what torch caches and does not use included."""
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def memory_node(self, device: torch.device) -> MemoryNode | None:
        """By the PCI address, as sysfs spells it: domain:bus:device.function; None where torch does not say."""
        found: Any = torch.cuda.get_device_properties(device)
        domain, bus, number = (getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
        if None in (domain, bus, number):
            return None
        return node_of_pci_device(f"{domain:04x}:{bus:02x}:{number:02x}.0")

    def host_nbytes(self, device: torch.device, host_memory: str | int, expert_nbytes: int) -> int:
        nbytes = parse_memory(host_memory, expert_nbytes)
        if nbytes is None:
            nbytes = max(0, min(expert_nbytes, available_host_nbytes() - WORKING_NBYTES))
        return nbytes

    def make(
        self,
        device: torch.device,
        store: ExtentSource,
        geometry: Geometry,
        slots_per_class: list[int],
        dtype: torch.dtype,
        host_nbytes: int,
    ) -> Device:
        node, streams = self.memory_node(device), CudaStreams(device)
        return CudaDevice(device, streams, store, geometry, slots_per_class, dtype, host_nbytes, node)

    def handover(self, home: torch.device) -> CudaHandover:
        return CudaHandover(home)

    def beside(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        return torch.Stream(device)


KIND = _Cuda()
