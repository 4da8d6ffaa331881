"""Which backend serves which device."""

from __future__ import annotations

import torch

from expertly.core.amounts import parse_memory
from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.engine.backend import Backend
from expertly.engine.backend_cpu import CpuBackend
from expertly.engine.backend_tiered import TieredBackend
from expertly.engine.memory import WORKING_NBYTES, available_host_nbytes
from expertly.store.packed import PackedStore


def available_nbytes(device: torch.device) -> int:
    """Memory the device may still give this process."""
    if device.type == "cuda":
        from expertly.engine.backend_cuda import available_device_nbytes

        return available_device_nbytes(device)
    return available_host_nbytes()


def make_backend(
    device: torch.device,
    store: PackedStore,
    geometry: Geometry,
    slots_per_class: list[int],
    dtype: torch.dtype,
    host_memory: str | int,
) -> Backend:
    """The backend of a device; `host_memory` is the pinned RAM for experts behind an accelerator."""
    if device.type != "cuda":
        if host_memory != "auto":
            raise ConfigError(f"host_memory={host_memory!r}: there is no host tier behind {device}; accepted: auto")
        return CpuBackend(store, geometry, slots_per_class, dtype)
    from expertly.engine.backend_cuda import CudaStreams

    nbytes = parse_memory(host_memory, geometry.nbytes)
    if nbytes is None:
        nbytes = max(0, min(geometry.nbytes, available_host_nbytes() - WORKING_NBYTES))
    return TieredBackend(device, CudaStreams(device), store, geometry, slots_per_class, dtype, nbytes)
