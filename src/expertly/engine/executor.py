"""The seam between the engine and what computes a model's experts: one device, or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from expertly.core.geometry import Geometry
from expertly.core.messages import Phase
from expertly.core.observation import Began, Routed
from expertly.engine.routing import Dispatch
from expertly.scheduler.counters import LayerCounters
from expertly.scheduler.observations import Channel

if TYPE_CHECKING:
    from expertly.engine.device import Device


class Executor(Protocol):
    """All experts of one model. One call at a time."""

    @property
    def geometry(self) -> Geometry:
        """Of the model."""

    @property
    def devices(self) -> Sequence[Device]:
        """The first is where the dense part is."""

    @property
    def num_late(self) -> int:
        """Predictions that came too late, on each device."""

    def bind(self, modules: Sequence[nn.Module]) -> None:
        """Attach the experts modules, in layer order."""

    def predict_from(self, channel: Channel) -> None:
        """From now on load ahead what this channel predicts."""

    def preload(self, layer: int) -> None:
        """Load and keep every expert of a layer, before anything ran."""

    def begin(self) -> None:
        """A forward pass begins. Raises ModelUseError where a device is in a state in which none can run."""

    def begin_iteration(self, began: Callable[[], Began], layers: range | None) -> None:
        """Tell who predicts what the pass shows. Raises what predicting raised. Needs `predict_from`."""

    def end_iteration(self, ok: bool) -> None:
        """The same pass ended."""

    def run_layer(
        self, work: Dispatch, hidden: torch.Tensor, routed: Callable[[], Routed] | None
    ) -> tuple[torch.Tensor, int]:
        """The outputs of a layer's experts [T * K, H] by row, from hidden states [T, H], and the time that was spent
        waiting for transfers. `routed` is what may be seen of the router; None: nothing.

        Raises TransferError or OSError when bytes could not be brought; nothing runs any more then.
        """

    def note_times(self, layer: int, phase: Phase, stall_ns: int, expert_ns: int) -> None:
        """Count how long a forward pass waited for transfers of a layer, and was in its experts in all."""

    def layer_counters(self, layer: int) -> LayerCounters:
        """What a layer has come to, over all devices."""

    def abandon(self, is_in_doubt: bool) -> None:
        """Undo the layer that runs, once nothing moves, and drop what is loaded ahead. Raises AssertionError or
        LookupError where a decision was interrupted half-way, which is looked for where that `is_in_doubt`.
        """

    def close(self) -> None:
        """Free threads, files and memory. Idempotent."""
