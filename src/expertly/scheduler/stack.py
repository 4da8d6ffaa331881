"""A forward pass runs one stack of its model: an encoder and a decoder are two."""

from __future__ import annotations

from collections.abc import Callable

from expertly.core.observation import Began, Routed
from expertly.scheduler.channel import Channel, Seen


class StackChannel:
    """A Channel that leaves out what is no part of the running pass: routers while `is_listening` is false (layers that
    run by themselves), and predictions for layers that the running stack does not have.
    """

    def __init__(self, channel: Channel, num_layers: int) -> None:
        self.is_listening = True
        self._channel = channel
        self._all_layers = self._layers = range(num_layers)

    def run(self, layers: range | None) -> None:
        """The pass that begins next runs these layers; None: all."""
        self._layers = self._all_layers if layers is None else layers

    def begin_iteration(self, step: int, began: Callable[[], Began]) -> None:
        """See Channel."""
        self._channel.begin_iteration(step, began)

    def router_ran(self, step: int, routed: Callable[[], Routed]) -> None:
        """See Channel."""
        if self.is_listening:
            self._channel.router_ran(step, routed)

    def end_iteration(self, ok: bool) -> None:
        """See Channel."""
        self._channel.end_iteration(ok)

    def take(self) -> Seen | None:
        """See Channel."""
        while (seen := self._channel.take()) is not None and seen.prediction.layer not in self._layers:
            pass
        return seen
