"""What the engine needs of a device, and of a kind of device. A kind is one file: `cpu.py`, `cuda.py`.

A device holds the slots of its experts' segments, loads spans into them, and says when they may be used.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.scheduler.loop import Transport
from expertly.scheduler.tier import Tier
from expertly.store.packed import ExtentSource


class Device(Transport, Protocol):
    """One device. Not thread-safe: one forward pass at a time.

    `submit` may get a slot that queued kernels still read: the device loads the new content after every use that `used`
    has reported. Prefetches are single segments. `cancel` is of a layer that runs or is about to: prefetches of it that
    have begun are moved like loads from then on. `wait` returns as soon as kernels that use the span may be queued.
    """

    torch_device: torch.device
    dtype: torch.dtype
    """Of the experts' outputs."""
    host_memory: str | None
    """Whether the RAM behind it is page-locked, and if not, why; None if it has none."""
    queues_uses: bool
    """Whether kernels run behind the host, so that `used` must be called: it is a CudaDevice."""
    waits: list[tuple[Any, Any]]
    """Stamps before and after each time that the device, or the host, waited for a transfer. The reader empties it."""

    def rows(self, layer: int) -> torch.Tensor:
        """The slots as rows of this layer's shape, on the device: see `layer_rows`."""

    def begin(self) -> None:
        """A forward pass begins. Raises ModelUseError where the device cannot run one now."""

    def used(self, spans: Sequence[Span]) -> None:
        """All kernels that read the slots of these spans, of one layer, have been queued."""

    def drain(self) -> None:
        """Drop prefetches that have not begun, wait until nothing moves; forget results and errors."""

    def stamp(self) -> Any:
        """A point in the device's work: it is reached when everything queued before has been computed."""

    def between_ns(self, begin: Any, end: Any, /) -> int | None:
        """Time from one stamp to another; None where the device has not reached them. Never waits."""

    def to_host(self, values: torch.Tensor, /) -> torch.Tensor:
        """A copy in host memory, valid until the next call. The host waits for the values: a synchronisation."""

    def stats(self) -> dict[str, int]:
        """Bytes read from disk, of these through the page cache, and other counts of this device."""

    def close(self) -> None:
        """Free threads, files and memory. Idempotent."""


class DeviceKind(Protocol):
    """What the engine asks of a kind of device. Methods with a body are defaults that suit a CPU."""

    runs_on_host: bool
    """Whether it computes with the host's memory and processors."""

    def check(self, device: torch.device) -> None:
        """Raises ConfigError where this machine does not have the device."""
        return None

    def name(self, device: torch.device) -> str:
        """The driver's name for the accelerator."""
        return "no accelerator"

    def available_nbytes(self, device: torch.device) -> int:
        """Memory the device may still give this process."""

    def host_nbytes(self, device: torch.device, host_memory: str | int, expert_nbytes: int) -> int:
        """RAM for experts behind the device, from the option `host_memory`. Raises ConfigError."""

    def make(
        self,
        device: torch.device,
        store: ExtentSource,
        geometry: Geometry,
        slots_per_class: list[int],
        dtype: torch.dtype,
        tier: Tier | None,
    ) -> Device:
        """A device with empty slots; an accelerator with the RAM behind it of which `tier` decides."""

    def recorder(self, device: torch.device) -> Any:
        """Makes graphs of kernels: see `model.graphs.Recorder`; None where the host queues none."""
        return None

    def beside(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context, to be entered often, in which kernels do not queue behind the model's."""
        return nullcontext()


_KINDS = ("cpu", "cuda")


def kind_of(device: torch.device) -> DeviceKind:
    """The kind of a device that `choose_device` accepts."""
    assert device.type in _KINDS
    kind: DeviceKind = importlib.import_module(f"expertly.engine.{device.type}").KIND
    return kind


def choose_device(name: str | None) -> torch.device:
    """The device of the option `device`; None: the accelerator, where there is one. Raises ConfigError."""
    accepted = "cpu, cuda, cuda:N"
    if name is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        name = accelerator.type if accelerator is not None else "cpu"
    try:
        target = torch.device(name)
    except RuntimeError:
        several = "; the option workers shares the experts with other processes" if "," in name else ""
        raise ConfigError(f"device={name!r}: unknown; accepted: {accepted}{several}") from None
    if target.type not in _KINDS:
        raise ConfigError(f"device={name!r}: no backend for it; accepted: {accepted}")
    kind_of(target).check(target)
    return target
