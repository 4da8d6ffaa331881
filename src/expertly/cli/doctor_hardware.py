"""`expertly doctor --hardware-out`: this machine as a hardware file for `expertly lab simulate`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from expertly.core.errors import ConfigError
from expertly.hardware.profile import MachineProfile
from expertly.sim.hardware import Hardware

if TYPE_CHECKING:
    from expertly.cli.doctor import DoctorOptions

MODEL_SECONDS = 40.0


def check_arguments(args: DoctorOptions) -> None:
    """Raises ConfigError for flags that would do nothing."""
    for name in ("memory", "segments"):
        if getattr(args, name) is not None and (args.model is None or args.hardware_out is None):
            raise ConfigError(
                f"{name}={getattr(args, name)!r}: only with a MODEL that is measured into --hardware-out FILE.toml"
            )


def measure_hardware(profile: MachineProfile, args: DoctorOptions) -> tuple[Hardware, list[str]]:
    """The machine of `profile`, and its comments. Where no model is measured, fixed times are assumed and it says so.

    Raises ConfigError where the profile lacks the disk, and what loading and measuring the model raises.
    """
    from expertly.hardware.simulated import machine_hardware

    hardware = machine_hardware(profile)
    about = [
        f"Measured by `expertly doctor` on {profile.cpu}, {profile.num_cpus} CPUs, {profile.created}.",
        "launch_ns, layer_ns and iteration_ns are assumed, as is that reading takes no processor from decoding; the "
        "rest of what is outside [compute] is measured.",
    ]
    if args.model is None:
        return hardware, about
    from expertly import api
    from expertly.lab.model_profile import compressed_costs, measure_model

    model, _ = api.load(args.model, memory=args.memory or "25%", system="lru", segments=args.segments or 1)
    try:
        measured = measure_model(model, MODEL_SECONDS)
        compressed = compressed_costs(model, measured)
    finally:
        api.unload(model)
    if compressed is not None:
        where = "link" if hardware.disk is None else "disk"
        about.append(f"[codec], all measured, and [{where}] are this model's; [compute] is for traces of it alone.")
        disk, costs = compressed
        return replace(hardware.with_disk(disk), compute=measured.compute, codec=costs), about
    about.append("[link] is how long pieces of this model take; [compute] is used for traces of this model alone.")
    return hardware.with_model(measured.link, measured.compute), about
