"""The seam between the engine and a device: where slots live, how spans get there, when they may be used."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

import torch

from expertly.core.messages import Span
from expertly.engine.numa import MemoryNode


class Device(Protocol):
    """One device. Not thread-safe: one forward pass at a time.

    A slot may be given to `submit` while kernels that read its old content are still queued: the backend orders
    the new content after every use it was told of by `used`.
    """

    torch_device: torch.device
    node: MemoryNode | None
    """Where its host memory lies, on a machine with several places for it."""
    queues_uses: bool
    """Whether computing goes on behind the host, so that it must be told of `used` spans."""

    def rows(self, layer: int) -> torch.Tensor:
        """The slots as rows of this layer's shape, [S * I/P, M, H], on `device`."""

    def begin(self) -> None:
        """A forward pass begins. Raises ModelUseError where the device is in a state in which none can run."""

    def submit(self, spans: Iterable[Span]) -> None:
        """Start bringing the spans into their slots, before anything that was submitted ahead and not begun."""

    def submit_ahead(self, spans: Iterable[Span]) -> None:
        """Bring these, single segments, in this order, when no demand waits or moves. They come out of `poll` and
        `wait` like others, and so do their errors.
        """

    def withdraw(self, layer: int, experts: Collection[int] | None = None) -> list[Span]:
        """Spans of `layer`, or of these experts of it, submitted ahead and not begun; they will not come. The others
        of them are from now on moved like demands. `layer` is about to run, or runs.
        """

    def poll(self) -> Span | None:
        """A span that may be computed with from now on, or None. Raises the TransferError of a failed one."""

    def wait(self) -> Span:
        """The next such span; returns at once when computing with it can be queued. Raises as `poll`."""

    def used(self, span: Span) -> None:
        """Everything that reads the span's slots has been queued."""

    def drain(self) -> None:
        """Drop what was submitted ahead and not begun, wait until nothing moves; forget results and errors."""

    @property
    def waited_ns(self) -> int:
        """Time that the host, and the device behind it, have waited for transfers so far."""

    def stats(self) -> dict[str, int]:
        """Bytes read from disk, of these through the page cache, and other counts of this backend."""

    def close(self) -> None:
        """Free threads, files and memory. Idempotent."""
