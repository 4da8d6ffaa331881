"""A model of two stacks, an encoder and a decoder, runs one of them in a pass."""

from __future__ import annotations

from collections.abc import Callable

from expertly.control.channel import Channel, Seen
from expertly.core.observation import Began, Routed


class StackChannel:
    """A Channel without predictions for layers outside `layers`, the stack of the running pass: as in the engine."""

    def __init__(self, channel: Channel, num_layers: int) -> None:
        self.layers = range(num_layers)
        self._channel = channel

    def begin_iteration(self, step: int, began: Callable[[], Began]) -> None:
        """See Channel."""
        self._channel.begin_iteration(step, began)

    def router_ran(self, step: int, routed: Callable[[], Routed]) -> None:
        """See Channel."""
        self._channel.router_ran(step, routed)

    def end_iteration(self, ok: bool) -> None:
        """See Channel."""
        self._channel.end_iteration(ok)

    def take(self) -> Seen | None:
        """See Channel."""
        while (seen := self._channel.take()) is not None and seen.prediction.layer not in self.layers:
            pass
        return seen
