"""One layer from the router's choice to the last expert: the loop that the engine and the simulator share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

from expertly.core.geometry import Geometry
from expertly.core.messages import Plan, Prediction, RouterRan, Span
from expertly.core.observation import Began, Routed
from expertly.scheduler.observations import Channel, Seen
from expertly.scheduler.prefetch import PrefetchQueue
from expertly.scheduler.prefetch_gate import Moment, PrefetchGate


class Decisions(Protocol):
    """What the loop asks: of a Scheduler, whose docstrings say more, or of a recorder that stands before one."""

    @property
    def geometry(self) -> Geometry: ...
    @property
    def queue(self) -> PrefetchQueue: ...
    @property
    def gate(self) -> PrefetchGate | None: ...
    @property
    def is_synchronous(self) -> bool: ...
    @property
    def finds_late(self) -> bool: ...
    @property
    def computes_tops(self) -> bool: ...
    @property
    def computed(self) -> Callable[[Sequence[Span]], Plan | None]: ...
    def begin_layer(self, router: RouterRan, cancelled: Sequence[Span] = ...) -> Plan: ...
    def promote(self, spans: Sequence[Span]) -> None: ...
    def loaded(self, span: Span) -> bool: ...
    def end_layer(self, cancelled: Sequence[Span] = ...) -> None: ...
    def predict(self, prediction: Prediction) -> None: ...
    def foresee(self, prediction: Prediction) -> None: ...
    def prefetch(self) -> list[Span]: ...
    def cancellable(self) -> list[int]: ...
    def at(self, moment: Moment, now_ns: int) -> None: ...


class Transport(Protocol):
    """Brings spans into their slots: a disk and threads, a link and streams, or a model of them."""

    def submit(self, spans: Sequence[Span]) -> None:
        """Bring these, in this order, before anything that is prefetched."""
        ...

    def poll(self) -> Span | None:
        """A span that may be computed with from now on, or None. Raises what moving it raised."""
        ...

    def wait(self) -> Span:
        """The next such span; something is in flight. Raises as `poll`."""
        ...


class PrefetchTransport(Transport, Protocol):
    """One that has a second priority, for what nobody waits for yet."""

    def prefetch(self, spans: Sequence[Span]) -> None:
        """Bring these, in this order, when no load waits."""
        ...

    def cancel(self, layer: int, experts: Collection[int] | None = None) -> Sequence[Span]:
        """Cancel what was prefetched for `layer`, or these experts of it, and not begun; it will not come."""
        ...


def run_layer(
    scheduler: Decisions,
    transport: Transport,
    router: RouterRan,
    compute: Callable[[Sequence[Span]], None],
    prefetcher: Prefetcher | None = None,
    routed: Callable[[], Routed] | None = None,
    *,
    together: bool = False,
) -> None:
    """Compute every needed segment once. What has arrived goes before what was here: it may be in staging slots. Chunks
    are for transfers: an expert is computed whole, unless what is kept of it is a top, in decode (see `_Chunks`).

    `compute` queues everything that reads the slots of some spans: one at a time, or, `together`, all that are here.
    `routed` is what the predictor may see of the router; None: the layer is no part of the pass that it follows.
    """
    cancelled = () if prefetcher is None else prefetcher.before_router(router.layer)
    plan = scheduler.begin_layer(router, cancelled)
    chunks: _Chunks | None = None
    if scheduler.geometry.segments_per_expert > 1 and (scheduler.queue.is_used or scheduler.computes_tops):
        chunks = _Chunks(computes_tops=scheduler.computes_tops and router.serves_decode)
    ready = plan.ready if chunks is None else chunks.begin(plan)
    num_coming = _submit(plan, transport, prefetcher)  # segments
    if prefetcher is not None:
        prefetcher.router_ran(routed)
        arrived = prefetcher.wait(transport)
        num_coming -= sum(span.num_segments for span in arrived)
        if chunks is not None:
            arrived = [whole for span in arrived for whole in chunks.arrived(span)]
        ready = arrived + ready
    next_ready = 0  # those before it were computed
    spans: Sequence[Span]
    while num_coming or next_ready < len(ready):
        span = transport.poll() if num_coming else None
        if span is None and next_ready == len(ready):
            span = transport.wait()
        if span is not None:
            if not scheduler.loaded(span):
                if prefetcher is not None:
                    prefetcher.arrived()
                continue
            num_coming -= span.num_segments
            spans = (span,) if chunks is None else chunks.arrived(span)
            if together and not num_coming:
                spans = [*spans, *ready[next_ready:]]
                next_ready = len(ready)
            if not spans:
                continue
        elif together:
            spans = ready[next_ready:]
            next_ready = len(ready)
        else:
            spans = ready[next_ready : next_ready + 1]
            next_ready += 1
        each: Sequence[Sequence[Span]] = (spans,) if len(spans) == 1 else [(span,) for span in spans]
        for some in (spans,) if together else each:
            compute(some)
        # What one span frees may be prefetched into before the next: as where spans are computed one at a time.
        for some in (spans,) if prefetcher is None else each:
            following = scheduler.computed(some)
            if prefetcher is not None:
                prefetcher.advance()
            if following is not None:
                ready += following.ready if chunks is None else chunks.begin(following)
                num_coming += _submit(following, transport, prefetcher)
    if prefetcher is None:
        scheduler.end_layer()
    else:
        scheduler.end_layer(prefetcher.experts_ended(router.layer))
        prefetcher.layer_ended(transport)


class _Chunks:
    """Of the running layer's experts, what is here and waits for the rest that is on its way. What waits for a slot
    that only computing frees is not on its way. `computes_tops`: what was here when the router ran does not wait
    (MoEpic, section 3.1).
    """

    def __init__(self, *, computes_tops: bool) -> None:
        self._computes_tops = computes_tops
        self._num_coming: dict[int, int] = {}  # expert -> segments
        self._here: dict[int, list[Span]] = {}

    def begin(self, plan: Plan) -> list[Span]:
        """What of the plan is to be computed now."""
        coming = self._num_coming
        for spans in (plan.loads, plan.in_flight):
            for span in spans:
                coming[span.expert] = coming.get(span.expert, 0) + span.num_segments
        if self._computes_tops:
            return plan.ready
        for span in plan.ready:
            if coming.get(span.expert):
                self._here.setdefault(span.expert, []).append(span)
        return [span for span in plan.ready if not coming.get(span.expert)]

    def arrived(self, span: Span) -> list[Span]:
        """With this one, what is to be computed now: nothing, or an expert in as few spans as its slots allow."""
        expert = span.expert
        here = self._here.setdefault(expert, [])
        here.append(span)
        self._num_coming[expert] -= span.num_segments
        if self._num_coming[expert]:
            return []
        del self._num_coming[expert], self._here[expert]
        here.sort(key=lambda one: one.segment)
        spans = here[:1]
        for one in here[1:]:
            last = spans[-1]
            if (one.segment - last.segment, one.slot - last.slot) == (last.num_segments, last.num_segments):
                spans[-1] = Span(last.layer, expert, last.segment, last.num_segments + one.num_segments, last.slot)
            else:
                spans.append(one)
        return spans


def _submit(plan: Plan, transport: Transport, prefetcher: Prefetcher | None) -> int:
    """Ask for what a plan needs: prefetches that it waits for now, what is missing, what is requested. The segments
    that the layer waits for.
    """
    spans: Sequence[Span] = plan.loads
    num_segments = 0
    for span in plan.loads:
        num_segments += span.num_segments
    for span in plan.in_flight:
        num_segments += span.num_segments
    if plan.requested:
        spans = [*spans, *plan.requested]
    if plan.in_flight and prefetcher is not None:
        spans = [*prefetcher.promote(plan.in_flight), *spans]
    if spans:
        transport.submit(spans)
    return num_segments


class Prefetcher:
    """Loads what is predicted, as predictions come. One that comes when its layer's router ran loads nothing; eviction
    is told its probabilities.

    Where the scheduler is synchronous, experts do not begin before all that was published has been read and what was
    predicted of it is there; what had no room by then is waited for when the layer has been computed. `catch_up`
    returns when all has been read; None: the channel reads at once. `now` is the time in nanoseconds, for a scheduler
    with a gate.
    """

    def __init__(
        self,
        scheduler: Decisions,
        transport: PrefetchTransport,
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
        assert scheduler.gate is None or now is not None, "a gate goes by the time"
        self._now = None if scheduler.gate is None else now
        self._num_layers = scheduler.geometry.num_layers
        self._layers = range(self._num_layers)  # of the stack that runs
        self._iteration = -1
        self._step = -1  # of the last router that ran: see Seen

    # -- one forward pass --------------------------------------------------------------------------------------

    def begin_iteration(self, began: Callable[[], Began], layers: range | None = None) -> None:
        """A forward pass begins, of the stack with these layers (an encoder and a decoder are two); None: all."""
        self._layers = range(self._num_layers) if layers is None else layers
        self._iteration += 1
        self._step = self._iteration * self._num_layers - 1
        self._tell(Moment.PASS_BEGAN)
        self._channel.begin_iteration(self._step, began)
        self._take()
        self.refill()

    def end_iteration(self, ok: bool) -> None:
        """The pass ended."""
        self._channel.end_iteration(ok)
        if ok:
            self._tell(Moment.PASS_ENDED)

    # -- one layer, in this order ------------------------------------------------------------------------------

    def before_router(self, layer: int) -> Sequence[Span]:
        """Note what has arrived between layers, and cancel what was not begun for this one: where a missing expert is
        found late, nothing yet.
        """
        while (span := self._transport.poll()) is not None:
            is_awaited = self._scheduler.loaded(span)
            assert not is_awaited, "between layers nobody waits"
        self._take()
        self._step = self._iteration * self._num_layers + layer
        return () if self._scheduler.finds_late else self._transport.cancel(layer)

    def router_ran(self, routed: Callable[[], Routed] | None) -> None:
        """A router ran and its loads are on their way."""
        gate = self._scheduler.gate
        if routed is not None and (gate is None or gate.observes):
            self._channel.router_ran(self._step, routed)
        self._take()
        self.refill()

    def promote(self, awaited: Sequence[Span]) -> Sequence[Span]:
        """The layer waits for these: those that were not begun are to be submitted as loads."""
        if not self._scheduler.finds_late:
            return ()
        cancelled = self._transport.cancel(awaited[0].layer, {span.expert for span in awaited})
        if cancelled:
            self._scheduler.promote(cancelled)
        return cancelled

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
        while self._scheduler.queue.num_in_flight:
            span = transport.wait()
            if self._scheduler.loaded(span):
                awaited.append(span)
            else:
                self.refill()
        return awaited

    def arrived(self) -> None:
        """Something is there that nobody waited for: prefetch more where there is room."""
        if not self._scheduler.is_synchronous:
            self.refill()

    def advance(self) -> None:
        """Something was computed. Take the predictions that are ready; if there are, or slots were lacking, prefetch
        more where there is room.
        """
        if self._take() or (self._scheduler.queue.needs_slots and not self._scheduler.is_synchronous):
            self.refill()

    def experts_ended(self, layer: int) -> Sequence[Span]:
        """What the layer needed was computed: cancel what was not begun of what it did not need."""
        experts = self._scheduler.cancellable()
        return self._transport.cancel(layer, experts) if experts else ()

    def layer_ended(self, transport: Transport) -> None:
        """A layer was computed: take what is ready, prefetch more."""
        self._take()
        self.refill()
        awaited = self.wait(transport)
        assert not awaited, "between layers nobody waits"

    def refill(self) -> None:
        """Prefetch more where there is room."""
        spans = self._scheduler.prefetch()
        if spans:
            self._transport.prefetch(spans)

    def _tell(self, moment: Moment) -> None:
        if self._now is not None:
            self._scheduler.at(moment, self._now())

    def _take(self) -> bool:
        """Take what the predictor has said; whether anything of it is in time."""
        got_prediction = False
        while (seen := self._channel.take()) is not None:
            prediction = seen.prediction
            if prediction.layer not in self._layers:
                continue
            if self._due(seen) > self._step:
                self._scheduler.predict(prediction)
                got_prediction = True
            else:
                self.num_late += 1
                if prediction.probabilities is not None or prediction.outlook is not None:
                    self._scheduler.foresee(prediction)
        return got_prediction

    def _due(self, seen: Seen) -> int:
        """The step at which the predicted layer runs. A decoder's first layer is 1 ahead of its last, of the token
        before; but steps count the encoder's layers, too, which do not run between the two.
        """
        step = seen.step + seen.prediction.distance
        return step + (seen.prediction.layer - step) % self._num_layers


def only_demand(router: RouterRan) -> Callable[[], Routed]:
    """For a predictor that wants to see no more of a router than its choice."""
    return partial(Routed, router)
