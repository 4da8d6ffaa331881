"""The loop over one layer, from its router's choice to its last expert, that engine and simulator share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from expertly.core.messages import Plan, RouterRan, Span
from expertly.core.observation import Began, Routed
from expertly.scheduler.observations import Channel, Seen
from expertly.scheduler.prefetch_gate import Moment
from expertly.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from expertly.scheduler.decisions import DecisionRecorder


class Transport(Protocol):
    """Brings spans into their slots: reader threads, copy streams, or a model of them."""

    def submit(self, spans: Sequence[Span]) -> None:
        """Load these, in this order, before anything that is prefetched."""
        ...

    def poll(self) -> Span | None:
        """A span whose bytes have arrived, or None. Raises what moving it raised."""
        ...

    def wait(self) -> Span:
        """Wait for the next span; something is in flight. Raises what moving it raised."""
        ...


class PrefetchTransport(Transport, Protocol):
    """A transport with a second priority, for prefetches."""

    def prefetch(self, spans: Sequence[Span]) -> None:
        """Load these, in this order, when nothing that was submitted waits."""
        ...

    def cancel(self, layer: int, experts: Collection[int] | None = None) -> Sequence[Span]:
        """Take back prefetches for `layer`, or for these experts of it, that did not begin; returns their spans."""
        ...


class Host(Protocol):
    """Computes missing experts where they lie, in the host's memory, beside the device."""

    def begin(self, router: RouterRan, experts: Sequence[int]) -> None:
        """Begin with these experts of the running layer. Raises what bringing them into memory raised."""
        ...

    def end(self) -> None:
        """Their outputs are there when this returns. Raises what computing them raised."""
        ...


def run_layer(
    scheduler: Scheduler | DecisionRecorder,
    transport: Transport,
    router: RouterRan,
    compute: Callable[[Sequence[Span]], None],
    prefetcher: Prefetcher | None = None,
    routed: Callable[[], Routed] | None = None,
    *,
    together: bool = False,
    host: Host | None = None,
) -> None:
    """Compute every needed segment once. Spans that arrive go before resident ones, since they may hold staging slots.
    An expert that arrives in several spans is computed when it is whole, except split-cached tops in decode (`_Parts`).

    `compute` queues everything that reads the slots of some spans: of one span, or, with `together`, of all that are
    there. `routed` returns what the predictor may see of the router; None: the predictor does not follow this pass.
    `host`: computes misses where the scheduler splits them; the transport is a PrefetchTransport then.
    """
    cancelled: Sequence[Span] = ()
    if prefetcher is not None:
        cancelled = prefetcher.before_router(router.layer)
    elif host is not None:
        _note_arrivals(scheduler, transport)
        cancelled = cast(PrefetchTransport, transport).cancel(router.layer)
    plan = scheduler.begin_layer(router, cancelled)
    parts: _Parts | None = None
    if scheduler.geometry.segments_per_expert > 1 and (scheduler.queue.is_used or scheduler.cache.is_split):
        parts = _Parts(computes_tops=scheduler.cache.is_split and router.serves_decode)
    ready = plan.ready if parts is None else parts.begin(plan)
    num_coming = _submit(plan, transport, prefetcher) if plan.loads or plan.in_flight or plan.requested else 0
    if plan.on_host:
        assert host is not None
        host.begin(router, plan.on_host)
    if prefetcher is not None:
        prefetcher.router_ran(routed)
        arrived = prefetcher.wait(transport)
        num_coming -= sum(span.num_segments for span in arrived)
        if parts is not None:
            arrived = [whole for span in arrived for whole in parts.arrived(span)]
        ready = arrived + ready
    num_ready = 0  # of `ready`, that were computed
    while num_coming or num_ready < len(ready):
        spans: list[Span] = []
        while num_coming and (together or not spans):
            span = transport.poll()
            if span is None:
                if spans or num_ready < len(ready):
                    break
                span = transport.wait()
            if scheduler.loaded(span):
                num_coming -= span.num_segments
                spans += (span,) if parts is None else parts.arrived(span)
            elif prefetcher is not None:
                prefetcher.arrived()
        if num_ready < len(ready) and (not spans or (together and not num_coming)):
            end = len(ready) if together else num_ready + 1
            spans += ready[num_ready:end]
            num_ready = end
        each: Sequence[Sequence[Span]] = (spans,)
        if len(spans) != 1 and not (together and prefetcher is None):
            each = [(span,) for span in spans]
        for some in (spans,) if together else each:
            compute(some)
        # The slots that one span frees may be prefetched into before the next span counts as computed.
        for some in (spans,) if prefetcher is None else each:
            following = scheduler.computed(some)
            if prefetcher is not None:
                prefetcher.advance()
            if following is not None:
                ready += following.ready if parts is None else parts.begin(following)
                num_coming += _submit(following, transport, prefetcher)
    if plan.on_host:
        assert host is not None
        host.end()
        if plan.following:
            cast(PrefetchTransport, transport).prefetch(plan.following)
    if prefetcher is None:
        scheduler.end_layer()
    else:
        scheduler.end_layer(prefetcher.experts_ended(router.layer))
        prefetcher.layer_ended(transport)


def _note_arrivals(scheduler: Scheduler | DecisionRecorder, transport: Transport) -> None:
    """Take what has arrived between layers."""
    while (span := transport.poll()) is not None:
        is_awaited = scheduler.loaded(span)
        assert not is_awaited, "between layers nobody waits for a span"


class _Parts:
    """Holds back the parts of an expert that are resident until the rest of it has arrived. A part that still waits for
    a slot is not waited for: only computing may free one. `computes_tops`: parts that were resident when the router ran
    are computed at once (MoEpic, section 3.1).
    """

    def __init__(self, *, computes_tops: bool) -> None:
        self._computes_tops = computes_tops
        self._num_coming: dict[int, int] = {}  # expert -> segments
        self._resident: dict[int, list[Span]] = {}

    def begin(self, plan: Plan) -> list[Span]:
        """The spans of the plan to compute now."""
        coming = self._num_coming
        for spans in (plan.loads, plan.in_flight):
            for span in spans:
                coming[span.expert] = coming.get(span.expert, 0) + span.num_segments
        if self._computes_tops:
            return plan.ready
        for span in plan.ready:
            if coming.get(span.expert):
                self._resident.setdefault(span.expert, []).append(span)
        return [span for span in plan.ready if not coming.get(span.expert)]

    def arrived(self, span: Span) -> list[Span]:
        """A span has arrived. Returns what to compute now: nothing, or an expert in as few spans as its slots allow."""
        expert = span.expert
        resident = self._resident.setdefault(expert, [])
        resident.append(span)
        self._num_coming[expert] -= span.num_segments
        if self._num_coming[expert]:
            return []
        del self._num_coming[expert], self._resident[expert]
        resident.sort(key=lambda one: one.segment)
        spans = resident[:1]
        for one in resident[1:]:
            last = spans[-1]
            if (one.segment - last.segment, one.slot - last.slot) == (last.num_segments, last.num_segments):
                spans[-1] = Span(last.layer, expert, last.segment, last.num_segments + one.num_segments, last.slot)
            else:
                spans.append(one)
        return spans


def _submit(plan: Plan, transport: Transport, prefetcher: Prefetcher | None) -> int:
    """Submit what a plan needs: prefetches that it waits for and that did not begin, missing spans, requested spans.
    Returns how many segments the layer waits for.
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
    """Loads what is predicted, as predictions come. A prediction that comes after its layer's router ran loads nothing;
    eviction policies are still told of it.

    Where the scheduler is synchronous, experts are not computed before the predictor has read everything published so
    far and all its predictions have arrived; those that had no room are waited for after the layer. `catch_up` returns
    when the predictor has read everything; None: it reads at once. `now` returns nanoseconds; a scheduler with a gate
    needs it.
    """

    def __init__(
        self,
        scheduler: Scheduler | DecisionRecorder,
        transport: PrefetchTransport,
        channel: Channel,
        catch_up: Callable[[], None] | None = None,
        now: Callable[[], int] | None = None,
    ) -> None:
        self.num_late = 0
        """Predictions that came after their layer's router ran."""
        self._scheduler = scheduler
        self._transport = transport
        self._channel = channel
        self._catch_up = catch_up
        assert scheduler.gate is None or now is not None, "a gate goes by the time"
        self._now = None if scheduler.gate is None else now
        self._num_layers = scheduler.geometry.num_layers
        self._layers = range(self._num_layers)  # those of the running stack
        self._iteration = -1
        self._step = -1  # of the last router that ran, as in Seen

    # -- one forward pass --------------------------------------------------------------------------------------

    def begin_iteration(self, began: Callable[[], Began], layers: range | None = None) -> None:
        """A forward pass begins, over these layers (an encoder and a decoder are two passes); None: all layers."""
        self._layers = range(self._num_layers) if layers is None else layers
        self._iteration += 1
        self._step = self._iteration * self._num_layers - 1
        self._tell(Moment.PASS_BEGAN)
        self._channel.begin_iteration(self._step, began)
        self._take()
        self.refill()

    def end_iteration(self, ok: bool) -> None:
        self._channel.end_iteration(ok)
        if ok:
            self._tell(Moment.PASS_ENDED)

    # -- one layer, in this order ------------------------------------------------------------------------------

    def before_router(self, layer: int) -> Sequence[Span]:
        """Note what has arrived between layers, and cancel prefetches for this layer that did not begin; not yet where
        the scheduler finds missing experts late.
        """
        _note_arrivals(self._scheduler, self._transport)
        self._take()
        self._step = self._iteration * self._num_layers + layer
        return () if self._scheduler.finds_late else self._transport.cancel(layer)

    def router_ran(self, routed: Callable[[], Routed] | None) -> None:
        """The router ran and its layer's loads are submitted: publish it, and prefetch more."""
        gate = self._scheduler.gate
        if routed is not None and (gate is None or gate.observes):
            self._channel.router_ran(self._step, routed)
        self._take()
        self.refill()

    def promote(self, awaited: Sequence[Span]) -> Sequence[Span]:
        """The layer waits for these prefetches. Returns those that did not begin, to be submitted as loads."""
        if not self._scheduler.finds_late:
            return ()
        cancelled = self._transport.cancel(awaited[0].layer, {span.expert for span in awaited})
        if cancelled:
            self._scheduler.promote(cancelled)
        return cancelled

    def wait(self, transport: Transport) -> list[Span]:
        """With synchronous transfer: wait until the predictor has read everything and no prefetch is in flight.
        Returns the spans of the running layer that arrived meanwhile. `transport`: where its driver waits.
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
        """A prefetched span has arrived: prefetch more where there is room."""
        if not self._scheduler.is_synchronous:
            self.refill()

    def advance(self) -> None:
        """Something was computed. If there are new predictions, or slots were lacking, prefetch more."""
        if self._take() or (self._scheduler.queue.needs_slots and not self._scheduler.is_synchronous):
            self.refill()

    def experts_ended(self, layer: int) -> Sequence[Span]:
        """The layer's experts were computed: cancel prefetches for it that it did not need and that did not begin."""
        experts = self._scheduler.cancellable()
        return self._transport.cancel(layer, experts) if experts else ()

    def layer_ended(self, transport: Transport) -> None:
        """The layer ended: take new predictions, prefetch more."""
        self._take()
        self.refill()
        awaited = self.wait(transport)
        assert not awaited, "between layers nobody waits for a span"

    def refill(self) -> None:
        spans = self._scheduler.prefetch()
        if spans:
            self._transport.prefetch(spans)

    def _tell(self, moment: Moment) -> None:
        if self._now is not None:
            self._scheduler.at(moment, self._now())

    def _take(self) -> bool:
        """Take new predictions; returns whether any of them is in time."""
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
        """The step at which the predicted layer runs. From a decoder's last layer to its first one of the next token
        the distance is 1, but steps also count the layers of the encoder, which does not run between the two.
        """
        step = seen.step + seen.prediction.distance
        return step + (seen.prediction.layer - step) % self._num_layers
