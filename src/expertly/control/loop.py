"""One layer from the router's choice to the last expert: the loop that the engine and the simulator share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from expertly.control.channel import Channel
from expertly.control.controller import Controller
from expertly.core.messages import Piece, RouterRan
from expertly.core.observation import Began, Routed


class Transport(Protocol):
    """Brings pieces into their slots: a disk and threads, a link and streams, or a model of them."""

    def submit(self, pieces: Sequence[Piece]) -> None:
        """Bring these, in this order, before anything that is loaded ahead."""
        ...

    def poll(self) -> Piece | None:
        """A piece that may be computed with from now on, or None. Raises what moving it raised."""
        ...

    def wait(self) -> Piece:
        """The next such piece; something is in flight. Raises as `poll`."""
        ...


class AheadTransport(Transport, Protocol):
    """One that has a second priority, for what nobody waits for yet."""

    def submit_ahead(self, pieces: Sequence[Piece]) -> None:
        """Bring these, in this order, when no demand waits."""
        ...

    def withdraw(self, layer: int) -> Sequence[Piece]:
        """Pieces of `layer` submitted ahead that have not been begun; they will not come."""
        ...


class Ahead:
    """Loads what is predicted, as predictions come. One that comes when its layer's router has spoken loads nothing;
    eviction is told its probabilities.
    """

    def __init__(self, controller: Controller, transport: AheadTransport, channel: Channel) -> None:
        self.num_late = 0
        """Predictions that came too late."""
        self._controller = controller
        self._transport = transport
        self._channel = channel
        self._num_layers = controller.geometry.num_layers
        self._iteration = -1
        self._step = -1  # of the last router that has spoken

    def begin_iteration(self, began: Callable[[], Began]) -> None:
        """A forward pass begins."""
        self._iteration += 1
        self._step = self._iteration * self._num_layers - 1
        self._channel.begin_iteration(self._step, began)
        self._take()
        self.refill()

    def before_router(self, layer: int) -> Sequence[Piece]:
        """Note what has arrived between layers, and take back what has not been begun of this one."""
        while (piece := self._transport.poll()) is not None:
            is_awaited = self._controller.loaded(piece)
            assert not is_awaited, "between layers nobody waits"
        self._take()
        self._step = self._iteration * self._num_layers + layer
        return self._transport.withdraw(layer)

    def router_ran(self, routed: Callable[[], Routed]) -> None:
        """A router has spoken and its demands are on their way."""
        self._channel.router_ran(self._step, routed)
        self._take()
        self.refill()

    def end_iteration(self, ok: bool) -> None:
        """The pass ended."""
        self._channel.end_iteration(ok)

    def layer_ended(self) -> None:
        """A layer has been computed: take what is ready, load more."""
        self._take()
        self.refill()

    def advance(self) -> None:
        """Take the predictions that are ready; if there are, load more where there is room."""
        if self._take():
            self.refill()

    def refill(self) -> None:
        """Load more where there is room."""
        pieces = self._controller.load_ahead()
        if pieces:
            self._transport.submit_ahead(pieces)

    def _take(self) -> bool:
        has_new = False
        while (seen := self._channel.take()) is not None:
            prediction = seen.prediction
            if seen.step + prediction.distance > self._step:
                self._controller.predict(prediction)
                has_new = True
            else:
                self.num_late += 1
                if prediction.probabilities is not None or prediction.outlook is not None:
                    self._controller.foresee(prediction)
        return has_new


def run_layer(
    controller: Controller,
    transport: Transport,
    router: RouterRan,
    compute: Callable[[Piece], None],
    ahead: Ahead | None = None,
    routed: Callable[[], Routed] | None = None,
) -> None:
    """Compute every needed segment once. What has arrived is computed before what was here: its slot may be the ring's.

    `compute` queues everything that reads the piece's slots. `routed` is what `ahead` may see of the router, by default
    only the demand.
    """
    withdrawn = () if ahead is None else ahead.before_router(router.layer)
    step = controller.begin_layer(router, withdrawn)
    if step.loads:
        transport.submit(step.loads)
    if ahead is not None:
        ahead.router_ran(routed or partial(Routed, router))
    ready = deque(step.ready)
    num_coming = len(step.loads) + len(step.joined)
    while ready or num_coming:
        piece = transport.poll() if num_coming else None
        if piece is None and ready:
            piece = ready.popleft()
        else:
            if piece is None:
                piece = transport.wait()
            if not controller.loaded(piece):
                assert ahead is not None
                ahead.refill()
                continue
            num_coming -= 1
        compute(piece)
        following = controller.computed(piece)
        if ahead is not None:
            ahead.advance()
        if following is not None:
            ready.extend(following.ready)
            num_coming += len(following.loads) + len(following.joined)
            if following.loads:
                transport.submit(following.loads)
    controller.end_layer()
    if ahead is not None:
        ahead.layer_ended()
