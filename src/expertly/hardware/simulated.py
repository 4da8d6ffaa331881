"""Turns a measured machine into the simulator's."""

from __future__ import annotations

import torch

from expertly.core.costs import Link
from expertly.hardware.measure import machine_costs, measure_flops, measure_weights_rate
from expertly.hardware.profile import DeviceProfile, MachineProfile
from expertly.sim.hardware import Hardware

READ_NBYTES = 4 << 20
READ_DEPTH = 4

_EACH_S = 0.5


def machine_hardware(profile: MachineProfile) -> Hardware:
    """From the machine alone: the first accelerator and its link, or memory and the disk where there is none."""
    disk_latency_ns = round(64 * 1024 / profile.disk_nbytes_per_s(64 * 1024, 1) * 1e9)
    disk = Link(profile.disk_nbytes_per_s(READ_NBYTES, READ_DEPTH), disk_latency_ns, 0)
    device = torch.device(profile.devices[0].device if profile.devices else "cpu")
    if profile.devices:
        weights_rate = measure_weights_rate(device, torch.bfloat16, _EACH_S)
    else:
        most = max(rate.num_threads for rate in profile.matvec)
        rates = {(rate.dtype, rate.num_threads): rate.nbytes_per_s for rate in profile.matvec}
        weights_rate = rates["bfloat16", most]
    return Hardware(
        name=profile.devices[0].name if profile.devices else profile.cpu,
        memory_nbytes_per_s=weights_rate,
        flops_per_s=measure_flops(device, torch.bfloat16, _EACH_S),
        efficiency=1.0,
        launch_ns=30_000,
        layer_ns=400_000,
        iteration_ns=1_000_000,
        link=_device_link(profile.devices[0]) if profile.devices else disk,
        disk=disk if profile.devices else None,
        host_memory_nbytes=profile.available_nbytes if profile.devices else None,
        compute=None,
        codec=machine_costs(profile),
        host=profile.devices[0].host if profile.devices else None,
    )


def _device_link(device: DeviceProfile) -> Link:
    largest = max(device.link, key=lambda rate: rate.nbytes)
    smallest = min(device.link, key=lambda rate: rate.nbytes)
    return Link(largest.to_device_nbytes_per_s, smallest.to_device_ns, 0)
