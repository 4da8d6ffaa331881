"""One layer from the router's choice to the last expert: the loop that the engine and the simulator share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

from expertly.control.channel import Channel, Seen
from expertly.control.controller import Controller
from expertly.control.gate import Moment
from expertly.core.messages import Piece, RouterRan, Step
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

    def withdraw(self, layer: int, experts: Collection[int] | None = None) -> Sequence[Piece]:
        """Pieces of `layer`, or of these experts of it, submitted ahead and not begun; they will not come."""
        ...


class Ahead:
    """Loads what is predicted, as predictions come. One that comes when its layer's router has spoken loads nothing;
    eviction is told its probabilities.

    Where the controller is synchronous, experts do not begin before all that was published has been read and what was
    predicted of it is there; what had no place by then is waited for when the layer has been computed. `catch_up`
    returns when all has been read; None: the channel reads at once. `now` is the time in nanoseconds, for a controller
    with a gate.
    """

    def __init__(
        self,
        controller: Controller,
        transport: AheadTransport,
        channel: Channel,
        catch_up: Callable[[], None] | None = None,
        now: Callable[[], int] | None = None,
    ) -> None:
        self.num_late = 0
        """Predictions that came too late."""
        self._controller = controller
        self._transport = transport
        self._channel = channel
        self._catch_up = catch_up
        self._gate = controller.gate
        self._now = now
        assert self._gate is None or now is not None, "a gate goes by the time"
        self._num_layers = controller.geometry.num_layers
        self._asks = self.is_asking  # in the running pass
        self._iteration = -1
        self._step = -1  # of the last router that has spoken

    @property
    def is_asking(self) -> bool:
        """Whether the channel hears of a pass that begins now: not while a gate keeps who predicts from it."""
        return self._gate is None or self._gate.is_asking

    def begin_iteration(self, began: Callable[[], Began]) -> None:
        """A forward pass begins."""
        self._iteration += 1
        self._step = self._iteration * self._num_layers - 1
        self._tell(Moment.PASS_BEGAN)
        self._asks = self.is_asking
        if self._asks:
            self._channel.begin_iteration(self._step, began)
        self._take()
        self.refill()

    def before_router(self, layer: int) -> Sequence[Piece]:
        """Note what has arrived between layers, and take back what has not been begun of this one: where an expert that
        is missing is found late, nothing yet.
        """
        while (piece := self._transport.poll()) is not None:
            is_awaited = self._controller.loaded(piece)
            assert not is_awaited, "between layers nobody waits"
        self._take()
        self._step = self._iteration * self._num_layers + layer
        self._tell(Moment.NOW)
        return () if self._controller.finds_late else self._transport.withdraw(layer)

    def router_ran(self, routed: Callable[[], Routed]) -> None:
        """A router has spoken and its demands are on their way."""
        if self._asks:
            self._channel.router_ran(self._step, routed)
        self._take()
        self.refill()

    def promote(self, joined: Sequence[Piece]) -> Sequence[Piece]:
        """The layer waits for these: those that have not been begun are to be submitted as demands."""
        if not joined or not self._controller.finds_late:
            return ()
        gone = self._transport.withdraw(joined[0].layer, {piece.expert for piece in joined})
        if gone:
            self._controller.promote(gone)
        return gone

    def experts_ended(self, layer: int) -> Sequence[Piece]:
        """What the layer needed has been computed: take back what has not been begun of what it did not need."""
        stale = self._controller.stale()
        return self._transport.withdraw(layer, stale) if stale else ()

    def end_iteration(self, ok: bool) -> None:
        """The pass ended."""
        if self._asks:
            self._channel.end_iteration(ok)
        if ok:
            self._tell(Moment.PASS_ENDED)

    def all_came(self) -> None:
        """What the running layer waited for is here."""
        self._tell(Moment.ALL_CAME)

    def layer_ended(self) -> None:
        """A layer has been computed: take what is ready, load more."""
        self._take()
        self.refill()

    def advance(self) -> None:
        """Something has been computed. Take the predictions that are ready; if there are, or places were lacking, load
        more where there is room.
        """
        controller = self._controller
        if self._take() or (controller.is_short and not controller.is_synchronous):
            self.refill()

    def arrived(self) -> None:
        """Something is there that nobody waited for: load more where there is room."""
        if not self._controller.is_synchronous:
            self.refill()

    def wait(self, transport: Transport) -> list[Piece]:
        """With synchronous transfer: wait until all that was published has been read, and until nothing is in flight
        that was predicted. What has arrived meanwhile of what the running layer waits for. `transport`: this one, as
        who waits knows it.
        """
        awaited: list[Piece] = []
        if not self._controller.is_synchronous:
            return awaited
        if self._catch_up is not None:
            self._catch_up()
        self._take()
        self.refill()
        while self._controller.speculation.num_in_flight:
            piece = transport.wait()
            if self._controller.loaded(piece):
                awaited.append(piece)
            else:
                self.refill()
        return awaited

    def refill(self) -> None:
        """Load more where there is room; where nothing is, what fills the shares of layers."""
        controller = self._controller
        self._tell(Moment.NOW)
        pieces = controller.load_ahead()
        if pieces and controller.speculation.fills:
            self._unfill()
        elif not pieces and controller.can_fill:
            pieces = controller.fill()
        if pieces:
            self._transport.submit_ahead(pieces)

    def _unfill(self) -> None:
        """What was predicted goes before what fills shares: take that back, as far as it has not been begun."""
        controller, waiting = self._controller, self._controller.speculation.waiting
        first = controller.geometry.first_expert_id
        gone: list[Piece] = []
        for piece in list(controller.speculation.fills):
            if piece not in gone and first(piece.layer) + piece.expert not in waiting:
                gone += self._transport.withdraw(piece.layer, (piece.expert,))
        if gone:
            controller.unfill(gone)

    def _tell(self, moment: Moment) -> None:
        if self._gate is not None and self._now is not None:
            self._controller.at(moment, self._now())

    def _take(self) -> bool:
        has_new = False
        while (seen := self._channel.take()) is not None:
            prediction = seen.prediction
            if self._due(seen) > self._step:
                self._controller.predict(prediction)
                has_new = True
            else:
                self.num_late += 1
                if prediction.probabilities is not None or prediction.outlook is not None:
                    self._controller.foresee(prediction)
        return has_new

    def _due(self, seen: Seen) -> int:
        """The step at which the predicted layer runs. A decoder's first layer is 1 ahead of its last, of the token
        before; but steps count the encoder's layers, too, which do not run between the two.
        """
        step = seen.step + seen.prediction.distance
        return step + (seen.prediction.layer - step) % self._num_layers


def run_layer(
    controller: Controller,
    transport: Transport,
    router: RouterRan,
    compute: Callable[[Piece], None],
    ahead: Ahead | None = None,
    routed: Callable[[], Routed] | None = None,
    together: Callable[[Sequence[Piece]], None] | None = None,
) -> None:
    """Compute every needed segment once. What has arrived is computed before what was here: its slot may be the ring's.

    `compute` queues everything that reads the piece's slots. `routed` is what `ahead` may see of the router, by default
    only the demand. `together` computes several pieces as `compute` does each: all that are here, when none is to come.
    """
    withdrawn = () if ahead is None else ahead.before_router(router.layer)
    step = controller.begin_layer(router, withdrawn)
    _submit(step, transport, ahead)
    ready = deque(step.ready)
    num_coming = len(step.loads) + len(step.joined)
    if ahead is not None:
        ahead.router_ran(routed or partial(Routed, router))
        arrived = ahead.wait(transport)
        ready.extendleft(reversed(arrived))
        num_coming -= len(arrived)
    while ready or num_coming:
        piece = transport.poll() if num_coming else None
        if piece is None and ready:
            piece = ready.popleft()
        else:
            if piece is None:
                piece = transport.wait()
            if not controller.loaded(piece):
                if ahead is not None:
                    ahead.arrived()
                continue
            num_coming -= 1
            if not num_coming and ahead is not None:
                ahead.all_came()
        pieces = [piece]
        if together is not None and ready and not num_coming:
            pieces += ready
            ready.clear()
            together(pieces)
        else:
            compute(piece)
        for piece in pieces:
            following = controller.computed(piece)
            if ahead is not None:
                ahead.advance()
            if following is not None:
                ready.extend(following.ready)
                num_coming += len(following.loads) + len(following.joined)
                _submit(following, transport, ahead)
    if ahead is None:
        controller.end_layer()
        return
    controller.end_layer(ahead.experts_ended(router.layer))
    ahead.layer_ended()
    awaited = ahead.wait(transport)
    assert not awaited, "between layers nobody waits"


def _submit(step: Step, transport: Transport, ahead: Ahead | None) -> None:
    """Ask for what a step needs, in one: what goes on from what was loaded ahead, what is missing, what is to come."""
    pieces: Sequence[Piece] = step.loads
    if step.asked:
        pieces = [*pieces, *step.asked]
    if ahead is not None and step.joined:
        pieces = [*ahead.promote(step.joined), *pieces]
    if pieces:
        transport.submit(pieces)
