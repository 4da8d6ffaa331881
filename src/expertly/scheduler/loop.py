"""One layer from the router's choice to the last expert: the loop that the engine and the simulator share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

from expertly.core.messages import Plan, RouterRan, Span
from expertly.core.observation import Began, Routed
from expertly.scheduler.channel import Channel, Seen
from expertly.scheduler.gate import Moment
from expertly.scheduler.scheduler import Scheduler


class Transport(Protocol):
    """Brings spans into their slots: a disk and threads, a link and streams, or a model of them."""

    def submit(self, spans: Sequence[Span]) -> None:
        """Bring these, in this order, before anything that is loaded ahead."""
        ...

    def poll(self) -> Span | None:
        """A span that may be computed with from now on, or None. Raises what moving it raised."""
        ...

    def wait(self) -> Span:
        """The next such span; something is in flight. Raises as `poll`."""
        ...


class AheadTransport(Transport, Protocol):
    """One that has a second priority, for what nobody waits for yet."""

    def submit_ahead(self, spans: Sequence[Span]) -> None:
        """Bring these, in this order, when no demand waits."""
        ...

    def withdraw(self, layer: int, experts: Collection[int] | None = None) -> Sequence[Span]:
        """Spans of `layer`, or of these experts of it, submitted ahead and not begun; they will not come."""
        ...


class Ahead:
    """Loads what is predicted, as predictions come. One that comes when its layer's router has spoken loads nothing;
    eviction is told its probabilities.

    Where the scheduler is synchronous, experts do not begin before all that was published has been read and what was
    predicted of it is there; what had no place by then is waited for when the layer has been computed. `catch_up`
    returns when all has been read; None: the channel reads at once. `now` is the time in nanoseconds, for a scheduler
    with a gate.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        transport: AheadTransport,
        channel: Channel,
        catch_up: Callable[[], None] | None = None,
        now: Callable[[], int] | None = None,
    ) -> None:
        self.num_late = 0
        """Predictions that came too late."""
        self._scheduler = scheduler
        self._transport = transport
        self._channel = channel
        self._catch_up = catch_up
        self._gate = scheduler.gate
        self._now = now
        assert self._gate is None or now is not None, "a gate goes by the time"
        self._num_layers = scheduler.geometry.num_layers
        self._iteration = -1
        self._step = -1  # of the last router that has spoken

    def begin_iteration(self, began: Callable[[], Began]) -> None:
        """A forward pass begins."""
        self._iteration += 1
        self._step = self._iteration * self._num_layers - 1
        self._tell(Moment.PASS_BEGAN)
        self._channel.begin_iteration(self._step, began)
        self._take()
        self.refill()

    def before_router(self, layer: int) -> Sequence[Span]:
        """Note what has arrived between layers, and take back what has not been begun of this one: where an expert that
        is missing is found late, nothing yet.
        """
        while (span := self._transport.poll()) is not None:
            is_awaited = self._scheduler.loaded(span)
            assert not is_awaited, "between layers nobody waits"
        self._take()
        self._step = self._iteration * self._num_layers + layer
        self._tell(Moment.NOW)
        return () if self._scheduler.finds_late else self._transport.withdraw(layer)

    def router_ran(self, routed: Callable[[], Routed]) -> None:
        """A router has spoken and its demands are on their way."""
        self._channel.router_ran(self._step, routed)
        self._take()
        self.refill()

    def promote(self, joined: Sequence[Span]) -> Sequence[Span]:
        """The layer waits for these: those that have not been begun are to be submitted as demands."""
        if not joined or not self._scheduler.finds_late:
            return ()
        gone = self._transport.withdraw(joined[0].layer, {span.expert for span in joined})
        if gone:
            self._scheduler.promote(gone)
        return gone

    def experts_ended(self, layer: int) -> Sequence[Span]:
        """What the layer needed has been computed: take back what has not been begun of what it did not need."""
        stale = self._scheduler.stale()
        return self._transport.withdraw(layer, stale) if stale else ()

    def end_iteration(self, ok: bool) -> None:
        """The pass ended."""
        self._channel.end_iteration(ok)

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
        scheduler = self._scheduler
        if self._take() or (scheduler.is_short and not scheduler.is_synchronous):
            self.refill()

    def arrived(self) -> None:
        """Something is there that nobody waited for: load more where there is room."""
        if not self._scheduler.is_synchronous:
            self.refill()

    def wait(self, transport: Transport) -> list[Span]:
        """With synchronous transfer: wait until all that was published has been read, and until nothing is in flight
        that was predicted. What has arrived meanwhile of what the running layer waits for. `transport`: this one, as
        who waits knows it.
        """
        awaited: list[Span] = []
        if not self._scheduler.is_synchronous:
            return awaited
        if self._catch_up is not None:
            self._catch_up()
        self._take()
        self.refill()
        while self._scheduler.speculation.num_in_flight:
            span = transport.wait()
            if self._scheduler.loaded(span):
                awaited.append(span)
            else:
                self.refill()
        return awaited

    def refill(self) -> None:
        """Load more where there is room."""
        self._tell(Moment.NOW)
        spans = self._scheduler.load_ahead()
        if spans:
            self._transport.submit_ahead(spans)

    def _tell(self, moment: Moment) -> None:
        if self._gate is not None and self._now is not None:
            self._scheduler.at(moment, self._now())

    def _take(self) -> bool:
        has_new = False
        while (seen := self._channel.take()) is not None:
            prediction = seen.prediction
            if self._due(seen) > self._step:
                self._scheduler.predict(prediction)
                has_new = True
            else:
                self.num_late += 1
                if prediction.probabilities is not None or prediction.outlook is not None:
                    self._scheduler.foresee(prediction)
        return has_new

    def _due(self, seen: Seen) -> int:
        """The step at which the predicted layer runs. A decoder's first layer is 1 ahead of its last, of the token
        before; but steps count the encoder's layers, too, which do not run between the two.
        """
        step = seen.step + seen.prediction.distance
        return step + (seen.prediction.layer - step) % self._num_layers


def run_layer(
    scheduler: Scheduler,
    transport: Transport,
    router: RouterRan,
    compute: Callable[[Span], None],
    ahead: Ahead | None = None,
    routed: Callable[[], Routed] | None = None,
    together: Callable[[Sequence[Span]], None] | None = None,
) -> None:
    """Compute every needed segment once. What has arrived is computed before what was here: its slot may be the ring's.

    `compute` queues everything that reads the span's slots. `routed` is what `ahead` may see of the router, by default
    only the demand. `together` computes several spans as `compute` does each: all that are here, when none is to come.
    """
    withdrawn = () if ahead is None else ahead.before_router(router.layer)
    step = scheduler.begin_layer(router, withdrawn)
    _submit(step, transport, ahead)
    ready = deque(step.ready)
    num_coming = len(step.loads) + len(step.joined)
    if ahead is not None:
        ahead.router_ran(routed or partial(Routed, router))
        arrived = ahead.wait(transport)
        ready.extendleft(reversed(arrived))
        num_coming -= len(arrived)
    while ready or num_coming:
        span = transport.poll() if num_coming else None
        if span is None and ready:
            span = ready.popleft()
        else:
            if span is None:
                span = transport.wait()
            if not scheduler.loaded(span):
                if ahead is not None:
                    ahead.arrived()
                continue
            num_coming -= 1
            if not num_coming and ahead is not None:
                ahead.all_came()
        spans = [span]
        if together is not None and ready and not num_coming:
            spans += ready
            ready.clear()
            together(spans)
        else:
            compute(span)
        for span in spans:
            following = scheduler.computed(span)
            if ahead is not None:
                ahead.advance()
            if following is not None:
                ready.extend(following.ready)
                num_coming += len(following.loads) + len(following.joined)
                _submit(following, transport, ahead)
    if ahead is None:
        scheduler.end_layer()
        return
    scheduler.end_layer(ahead.experts_ended(router.layer))
    ahead.layer_ended()
    awaited = ahead.wait(transport)
    assert not awaited, "between layers nobody waits"


def _submit(step: Plan, transport: Transport, ahead: Ahead | None) -> None:
    """Ask for what a step needs, in one: what goes on from what was loaded ahead, what is missing, what is to come."""
    spans: Sequence[Span] = step.loads
    if step.asked:
        spans = [*spans, *step.asked]
    if ahead is not None and step.joined:
        spans = [*ahead.promote(step.joined), *spans]
    if spans:
        transport.submit(spans)
