"""Which devices a model runs on, from what a user writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from expertly.core.errors import ConfigError

_ACCEPTED = "cpu, cuda, cuda:N"


def choose_devices(device: str | None, devices: str | Sequence[str] | None) -> list[torch.device]:
    """One device, or several with a number each; the first is where the dense part goes. None of both: the accelerator,
    where there is one. The same device may be named twice. Raises ConfigError naming what is accepted.
    """
    if devices is None:
        return [_device(device, "device")]
    if device is not None:
        raise ConfigError(f"device={device!r} and devices={devices!r}: accepted: one of the two")
    names = devices.split(",") if isinstance(devices, str) else list(devices)
    found = [_device(name.strip(), "devices") for name in names]
    if not found:
        raise ConfigError("devices=[]: accepted: cpu:0,cpu:1,... or cuda:0,cuda:1,...")
    if len(found) == 1:
        return found
    for name, one in zip(names, found, strict=True):
        if one.index is None:
            raise ConfigError(f"devices={name!r}: which one? accepted: {one.type}:N, as in {one.type}:0,{one.type}:1")
    if len({one.type for one in found}) > 1:
        raise ConfigError(f"devices={','.join(names)!r}: accepted: devices of one kind, all cpu:N or all cuda:N")
    return found


def _device(name: str | None, field: str) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        name = accelerator.type if accelerator is not None else "cpu"
    try:
        target = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{field}={name!r}: unknown; accepted: {_ACCEPTED}") from None
    if target.type not in ("cpu", "cuda"):
        raise ConfigError(f"{field}={name!r}: no backend for it; accepted: {_ACCEPTED}")
    if target.type == "cuda":
        if accelerator is None or accelerator.type != "cuda":
            raise ConfigError(f"{field}={name!r}: this machine (or this torch) has no CUDA device; accepted: cpu")
        count = torch.accelerator.device_count()
        if target.index is not None and target.index >= count:
            accepted = ", ".join(f"cuda:{i}" for i in range(count))
            raise ConfigError(f"{field}={name!r}: there is no such device; accepted: {accepted}")
    return target
