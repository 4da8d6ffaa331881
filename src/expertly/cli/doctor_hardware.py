"""`expertly doctor --hardware-out`: this machine as a hardware file for `expertly lab simulate`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from expertly.core.costs import Link
from expertly.core.errors import ConfigError
from expertly.hardware.profile import DeviceProfile, MachineProfile
from expertly.lab.fit_decoding import fit_decoding
from expertly.sim.hardware import Hardware

if TYPE_CHECKING:
    from expertly.cli.doctor import DoctorOptions

READ_NBYTES = 4 << 20
READ_DEPTH = 4
MODEL_SECONDS = 40.0

_EACH_S = 0.5


def check_arguments(args: DoctorOptions) -> None:
    """Raises ConfigError for flags that would do nothing."""
    if args.model is not None and args.hardware_out is None:
        raise ConfigError(f"model={args.model!r}: needs --hardware-out FILE.toml, the hardware file it is measured for")
    for name in ("memory", "segments"):
        if getattr(args, name) is not None and args.model is None:
            raise ConfigError(f"{name}={getattr(args, name)!r}: only with --model, whose experts it is for")


def measure_hardware(profile: MachineProfile, args: DoctorOptions) -> tuple[Hardware, list[str]]:
    """The machine of `profile`, and its comments. Where no model is measured, fixed times are assumed and it says so.

    Raises ConfigError where the profile lacks the disk, and what loading and measuring the model raises.
    """
    hardware = machine_hardware(profile)
    about = [
        f"Measured by `expertly doctor` on {profile.cpu}, {profile.num_cpus} CPUs, {profile.created}.",
        "launch_ns, layer_ns and iteration_ns are assumed, as is that reading takes no processor from decoding; the "
        "rest of what is outside [compute] is measured.",
    ]
    if args.model is None:
        return hardware, about
    from expertly import api
    from expertly.hardware.measure import store_costs
    from expertly.lab.model_profile import measure_model

    model, _ = api.load(args.model, memory=args.memory or "25%", system="lru", segments=args.segments or 1)
    try:
        measured = measure_model(model, MODEL_SECONDS)
        store = api.handle(model).store
        disk, costs = store_costs(store) if store.codec != "none" else (None, hardware.codec)
    finally:
        api.unload(model)
    if disk is not None:  # how long its pieces take has decoding in it, which the simulator adds
        where = "link" if hardware.disk is None else "disk"
        about.append(f"[codec], all measured, and [{where}] are this model's; [compute] is for traces of it alone.")
        if hardware.disk is None and costs is not None:  # computing takes the processors that decode
            costs = fit_decoding(measured.layers, disk, costs, measured.compute, store.geometry(1))
        return replace(hardware.with_disk(disk), compute=measured.compute, codec=costs), about
    about.append("[link] is how long pieces of this model take; [compute] is used for traces of this model alone.")
    return hardware.with_model(measured.link, measured.compute), about


def machine_hardware(profile: MachineProfile) -> Hardware:
    """From the machine alone: the first accelerator and its link, or memory and the disk where there is none."""
    import torch

    from expertly.hardware.measure import machine_costs, measure_flops, measure_weights_rate

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
    )


def _device_link(device: DeviceProfile) -> Link:
    largest = max(device.link, key=lambda rate: rate.nbytes)
    smallest = min(device.link, key=lambda rate: rate.nbytes)
    return Link(largest.to_device_nbytes_per_s, smallest.to_device_ns, 0)
