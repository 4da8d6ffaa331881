"""Devices: what the engine asks of one, and what it asks of a kind of device. A kind is one file, `cpu.py`, `cuda.py`.

A device has the slots of its experts' segments, brings spans into them, and says when they may be used.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.engine.numa import MemoryNode
from expertly.engine.reading import ExtentSource


class Device(Protocol):
    """One device. Not thread-safe: one forward pass at a time.

    A slot may be given to `submit` while kernels that read its old content are still queued: the device orders the new
    content after every use it was told of by `used`.
    """

    torch_device: torch.device
    dtype: torch.dtype
    """What is computed in."""
    node: MemoryNode | None
    """Where its host memory lies, on a machine with several places for it."""
    host_memory: str | None
    """Whether the RAM behind it is page-locked, and why not; None where it has none."""
    queues_uses: bool
    """Whether computing goes on behind the host, so that it must be told of `used` spans."""
    waits: list[tuple[Any, Any]]
    """Stamps around each time that computing, or the host before it, waited for a transfer. Who reads empties it."""

    def rows(self, layer: int) -> torch.Tensor:
        """The slots as rows of this layer's shape, on the device: see `layer_rows`."""

    def begin(self) -> None:
        """A forward pass begins. Raises ModelUseError where the device is in a state in which none can run."""

    def submit(self, spans: Sequence[Span]) -> None:
        """Start loading the spans into their slots, before all prefetches that have not begun."""

    def prefetch(self, spans: Sequence[Span]) -> None:
        """Prefetch these, single segments, in this order, when no load waits or moves. They come out of `poll` and
        `wait` like others, and so do their errors.
        """

    def cancel(self, layer: int, experts: Collection[int] | None = None) -> list[Span]:
        """Cancel prefetches of `layer`, or of these experts of it, that have not begun: they will not come. Those that
        have are moved like loads from now on. `layer` is about to run, or runs.
        """

    def poll(self) -> Span | None:
        """A span that may be computed with from now on, or None. Raises the TransferError of a failed one."""

    def wait(self) -> Span:
        """The next such span; returns at once when computing with it can be queued. Raises as `poll`."""

    def used(self, span: Span) -> None:
        """Everything that reads the span's slots has been queued."""

    def drain(self) -> None:
        """Drop prefetches that have not begun, wait until nothing moves; forget results and errors."""

    def stamp(self) -> Any:
        """A moment of the computing: it has come there when what was asked for before has been computed."""

    def between_ns(self, begin: Any, end: Any, /) -> int | None:
        """From one stamp to another; None where computing has not come there yet. Never waits."""

    def to_host(self, values: torch.Tensor, /) -> torch.Tensor:
        """Values of the device in host memory, valid until the next call. The host waits for what makes them, which
        counts as a synchronisation.
        """

    def stats(self) -> dict[str, int]:
        """Bytes read from disk, of these through the page cache, and other counts of this device."""

    def close(self) -> None:
        """Free threads, files and memory. Idempotent."""


class Handover:
    """Orders what the threads of several devices queue. No call makes the host wait. Marks are made and read here.

    As it is, for devices that queue nothing: what has been called has been done.
    """

    def give(self) -> Any:
        """A mark behind all that this thread has queued on the first device."""
        return None

    def take(self, mark: Any, device: torch.device) -> None:
        """What this thread queues on the first device and on `device` comes after the mark."""

    def keep(self, tensor: torch.Tensor) -> None:
        """What this thread has queued on the first device may read the tensor, which another thread has made there."""


class DeviceKind(Protocol):
    """What is asked of a kind of device, before there is a Device of it.

    Where a method says what it returns, that is so for a device which every machine has.
    """

    runs_on_host: bool
    """Whether computing takes the host's memory and processors."""

    def check(self, device: torch.device, field: str) -> None:
        """Raises ConfigError naming `field` where this machine does not have the device."""
        return None

    def name(self, device: torch.device) -> str | None:
        """As its driver has it; None: that of the processor."""
        return None

    def memory_of(self, device: torch.device) -> str:
        """Whose memory it takes: devices with equal answers share it."""

    def available_nbytes(self, device: torch.device) -> int:
        """Memory the device may still give this process."""

    def memory_node(self, device: torch.device) -> MemoryNode | None:
        """The node that a device's host memory belongs on; None where that makes no difference."""

    def host_nbytes(self, device: torch.device, host_memory: str | int, expert_nbytes: int) -> int:
        """RAM for experts behind devices of this kind, of what the user states. Raises ConfigError."""

    def make(
        self,
        device: torch.device,
        store: ExtentSource,
        geometry: Geometry,
        slots_per_class: list[int],
        dtype: torch.dtype,
        host_nbytes: int,
    ) -> Device:
        """A device with empty slots, and `host_nbytes` of RAM behind it."""

    def handover(self, home: torch.device) -> Handover:
        """Between the threads of several devices, the first of which is `home`."""
        return Handover()

    def beside(self, device: torch.device) -> AbstractContextManager[Any]:
        """Where a thread computes that does not wait for what the model has queued since."""
        return nullcontext()


_KINDS = ("cpu", "cuda")
_ACCEPTED = "cpu, cuda, cuda:N"


def kind_of(device: torch.device) -> DeviceKind:
    """The kind of a device that `choose_devices` accepts."""
    assert device.type in _KINDS
    kind: DeviceKind = importlib.import_module(f"expertly.engine.{device.type}").KIND
    return kind


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
    if name is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        name = accelerator.type if accelerator is not None else "cpu"
    try:
        target = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{field}={name!r}: unknown; accepted: {_ACCEPTED}") from None
    if target.type not in _KINDS:
        raise ConfigError(f"{field}={name!r}: no backend for it; accepted: {_ACCEPTED}")
    kind_of(target).check(target, field)
    return target
