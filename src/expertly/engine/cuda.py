"""CUDA: a copy stream, events, and page-locked host memory. The only file of the engine that uses torch.cuda."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from expertly.core.errors import ConfigError


class CudaStreams:
    """See device_streams.Streams. No call but `synchronize` makes the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy_stream = torch.cuda.Stream(device)
        self._holds: deque[tuple[Any, Any]] = deque()  # (before, after) each hold of the compute stream
        self._spare: list[Any] = []

    def is_capturing(self) -> bool:
        """A CUDA graph is being made."""
        return torch.cuda.is_current_stream_capturing()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: list[Any]) -> None:
        """Asynchronous, because the source is page-locked."""
        for mark in after:
            self._copy_stream.wait_event(mark)
        with torch.cuda.stream(self._copy_stream):
            target.copy_(source, non_blocking=True)

    def mark_copy(self) -> Any:
        """An event on the copy stream."""
        return self._copy_stream.record_event()

    def mark_compute(self) -> Any:
        """An event on the current stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def is_past(self, mark: Any) -> bool:
        """Ask the event."""
        return bool(mark.query())

    def hold_compute(self, mark: Any) -> None:
        """Make the current stream wait, and time how long it does."""
        if mark.query():
            return
        stream = torch.cuda.current_stream(self._device)
        before, after = self._timer(), self._timer()
        before.record(stream)
        stream.wait_event(mark)
        after.record(stream)
        self._holds.append((before, after))

    def synchronize(self) -> None:
        """Wait for the copy stream and the current stream."""
        self._copy_stream.synchronize()
        torch.cuda.current_stream(self._device).synchronize()

    def stall_ns(self) -> int:
        """Sum the holds that have ended."""
        total = 0
        while self._holds and self._holds[0][1].query():
            before, after = self._holds.popleft()
            total += int(before.elapsed_time(after) * 1e6)  # milliseconds
            self._spare += (before, after)
        return total

    def register(self, memory: torch.Tensor) -> Callable[[], None]:
        """cudaHostRegister; the caching allocator would round a large region up to a power of two."""
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


class CudaHandover:
    """See device_group.Handover; `home` is the first device. Which stream is current is each thread's own."""

    def __init__(self, home: torch.device) -> None:
        self._home = home

    def give(self) -> Any:
        """An event on this thread's stream of the first device."""
        return torch.cuda.current_stream(self._home).record_event()

    def take(self, mark: Any, device: torch.device) -> None:
        """Both streams wait for the event, whichever device it is of."""
        for one in dict.fromkeys((self._home, device)):
            torch.cuda.current_stream(one).wait_event(mark)

    def keep(self, tensor: torch.Tensor) -> None:
        """Its memory is used again only behind what this thread's stream has queued until it is freed."""
        tensor.record_stream(torch.cuda.current_stream(self._home))


def pci_address(device: torch.device) -> str | None:
    """As sysfs spells it: domain:bus:device.function; None where torch does not say."""
    found: Any = torch.cuda.get_device_properties(device)
    domain, bus, number = (getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    return None if None in (domain, bus, number) else f"{domain:04x}:{bus:02x}:{number:02x}.0"


def available_device_nbytes(device: torch.device) -> int:
    """Device memory that is free now, what torch caches and does not use included."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
