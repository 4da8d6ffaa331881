"""Which backend serves which device."""

from __future__ import annotations

import torch

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.resources import parse_memory
from expertly.engine.cpu import CpuDevice
from expertly.engine.device import Device
from expertly.engine.memory import WORKING_NBYTES, available_host_nbytes
from expertly.engine.numa import MemoryNode, node_of_cpu_device, node_of_pci_device
from expertly.engine.reads import ExtentSource
from expertly.engine.tiered import CudaDevice


def available_nbytes(device: torch.device) -> int:
    """Memory the device may still give this process."""
    if device.type == "cuda":
        from expertly.engine.cuda import available_device_nbytes

        return available_device_nbytes(device)
    return available_host_nbytes()


def make_backend(
    device: torch.device,
    store: ExtentSource,
    geometry: Geometry,
    slots_per_class: list[int],
    dtype: torch.dtype,
    host_memory: str | int,
) -> Device:
    """The backend of a device; `host_memory` is the pinned RAM for experts behind an accelerator. A device cpu:i is a
    logical one: slots and threads of its own.
    """
    if device.type != "cuda":
        if host_memory != "auto":
            raise ConfigError(f"host_memory={host_memory!r}: there is no host tier behind {device}; accepted: auto")
        return CpuDevice(store, geometry, slots_per_class, dtype, memory_node(device))
    from expertly.engine.cuda import CudaStreams

    node, streams = memory_node(device), CudaStreams(device)
    nbytes = parse_memory(host_memory, geometry.nbytes)
    if nbytes is None:
        nbytes = max(0, min(geometry.nbytes, available_host_nbytes() - WORKING_NBYTES))
    return CudaDevice(device, streams, store, geometry, slots_per_class, dtype, nbytes, node)


def memory_node(device: torch.device) -> MemoryNode | None:
    """The node that a device's host memory belongs on; None where that makes no difference."""
    if device.type == "cuda":
        from expertly.engine.cuda import pci_address

        address = pci_address(device)
        return None if address is None else node_of_pci_device(address)
    return None if device.index is None else node_of_cpu_device(device.index)
