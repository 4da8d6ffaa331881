"""The CPU: slots in RAM, filled straight from disk."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.core.resources import available_host_nbytes
from expertly.engine.device import Device, DeviceKind
from expertly.engine.slots import HostPool
from expertly.engine.transfer import Readers
from expertly.scheduler.budget import class_segment_nbytes
from expertly.scheduler.tier import Tier
from expertly.store.packed import ExtentSource


class CpuDevice:
    """Computing is synchronous: a span can be used once it is read, and its slots are free once `compute` returns."""

    queues_uses = False
    host_memory: str | None = None

    def __init__(self, store: ExtentSource, geometry: Geometry, slots_per_class: list[int], dtype: torch.dtype) -> None:
        self.torch_device = torch.device("cpu")
        self.dtype = dtype
        self._pool = HostPool(geometry, slots_per_class, class_segment_nbytes(geometry), dtype)
        self.rows = self._pool.rows
        self._readers = readers = Readers(store.layer_file, geometry, self._pool.memory)
        self.submit, self.prefetch, self.cancel = readers.submit, readers.prefetch, readers.cancel
        self.poll, self.drain, self.stats = readers.poll, readers.drain, readers.stats
        self.wait, self.waits = readers.wait, readers.waits
        self.stamp = time.perf_counter_ns
        self.to_host = torch.Tensor.detach  # they are in host memory

    def begin(self) -> None:
        """A CPU can always run a pass."""

    def between_ns(self, begin: int, end: int) -> int:
        return end - begin

    def used(self, spans: Sequence[Span]) -> None:
        """Nothing is queued, so no later load has to wait for the use."""

    def close(self) -> None:
        self._readers.close()
        self._pool.close()


class _Cpu(DeviceKind):
    runs_on_host = True

    def available_nbytes(self, device: torch.device) -> int:
        return available_host_nbytes()

    def host_nbytes(self, device: torch.device, host_memory: str | int, expert_nbytes: int) -> int:
        if host_memory != "auto":
            raise ConfigError(f"host_memory={host_memory!r}: there is no host tier behind {device}; accepted: auto")
        return 0

    def make(
        self,
        device: torch.device,
        store: ExtentSource,
        geometry: Geometry,
        slots_per_class: list[int],
        dtype: torch.dtype,
        tier: Tier | None,
    ) -> Device:
        return CpuDevice(store, geometry, slots_per_class, dtype)


KIND = _Cpu()
