"""What a backend with a host tier needs of an accelerator: one stream that computes and one that copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """The asynchronous side of a device. Marks are events: `Any`, made and read only here."""

    def is_capturing(self) -> bool:
        """Whether what is queued on the compute stream is recorded instead of run."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: list[Any]) -> None:
        """Queue a copy on the copy stream, after these marks of the compute stream."""

    def mark_copy(self) -> Any:
        """A mark behind everything queued on the copy stream."""

    def mark_compute(self) -> Any:
        """A mark behind everything queued on the compute stream."""

    def is_past(self, mark: Any) -> bool:
        """Whether everything before the mark has run. Does not wait."""

    def hold_compute(self, mark: Any) -> None:
        """The compute stream goes on only when the mark is past. Does not wait."""

    def synchronize(self) -> None:
        """Wait for everything queued on both streams."""

    def stall_ns(self) -> int:
        """Time the compute stream was held, of holds that have ended since the last call."""

    def register(self, memory: torch.Tensor) -> Callable[[], None]:
        """Pin host memory for copies; call the result to undo."""
