"""One layer from the router's choice to the last expert: the loop that the engine and the simulator share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from expertly.control.controller import Controller
from expertly.core.messages import Piece, Prediction, RouterRan
from expertly.policies.predictor.base import Predictor


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
    """Loads what is predicted. Predictions made here are inline: a layer's experts wait for the predictor, though not
    for what it asks to load.
    """

    def __init__(self, controller: Controller, transport: AheadTransport, predictor: Predictor) -> None:
        self._controller = controller
        self._transport = transport
        self._predictor = predictor

    def begin_iteration(self) -> None:
        """A forward pass begins."""
        self._take(self._predictor.begin_iteration())

    def before_router(self, layer: int) -> Sequence[Piece]:
        """Note what has arrived between layers, and take back what has not been begun of this one."""
        while (piece := self._transport.poll()) is not None:
            is_awaited = self._controller.loaded(piece)
            assert not is_awaited, "between layers nobody waits"
        return self._transport.withdraw(layer)

    def router_ran(self, router: RouterRan) -> None:
        """Predict, and load what there is room for."""
        self._take(self._predictor.router_ran(router))

    def refill(self) -> None:
        """Load more where there is room."""
        self._transport.submit_ahead(self._controller.load_ahead())

    def _take(self, predictions: Iterable[Prediction]) -> None:
        for prediction in predictions:
            self._controller.predict(prediction)
        self.refill()


def run_layer(
    controller: Controller,
    transport: Transport,
    router: RouterRan,
    compute: Callable[[Piece], None],
    ahead: Ahead | None = None,
) -> None:
    """Compute every needed segment once. What has arrived is computed before what was here: its slot may be the ring's.

    `compute` queues everything that reads the piece's slots.
    """
    withdrawn = () if ahead is None else ahead.before_router(router.layer)
    step = controller.begin_layer(router, withdrawn)
    if step.loads:
        transport.submit(step.loads)
    if ahead is not None:
        ahead.router_ran(router)
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
        if following is not None:
            ready.extend(following.ready)
            num_coming += len(following.loads) + len(following.joined)
            if following.loads:
                transport.submit(following.loads)
    controller.end_layer()
    if ahead is not None:
        ahead.refill()
