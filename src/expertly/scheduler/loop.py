"""The loop over one layer, from its router's choice to its last expert, that engine and simulator share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from expertly.core.messages import Plan, Prediction, RouterRan, Span
from expertly.core.observation import Began, Routed
from expertly.policies.prediction import Predictor
from expertly.scheduler.scheduler import Scheduler


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

    def prefetch(self, spans: Sequence[Span]) -> None:
        """Load these, in this order, when nothing that was submitted waits."""
        ...

    def cancel(self, layer: int) -> Sequence[Span]:
        """Take back prefetches for `layer` that did not begin; returns their spans."""
        ...


def run_layer(
    scheduler: Scheduler,
    transport: Transport,
    router: RouterRan,
    compute: Callable[[Sequence[Span]], None],
    prefetcher: Prefetcher | None = None,
    routed: Callable[[], Routed] | None = None,
    *,
    together: bool = False,
) -> None:
    """Compute every needed unit once.

    `compute` queues everything that reads the slots of some spans: of one span, or, with `together`, of all that are
    there. `routed` returns what the predictor may see of the router; None: the predictor does not follow this pass.
    """

    def compute_each(spans: Sequence[Span]) -> None:
        for span in spans:
            compute((span,))

    use = compute if together else compute_each
    cancelled: Sequence[Span] = ()
    if prefetcher is not None:
        while (span := transport.poll()) is not None:
            is_awaited = scheduler.loaded(span)
            assert not is_awaited, "between layers nobody waits for a span"
        cancelled = transport.cancel(router.layer)
    plan = scheduler.begin_layer(router, cancelled)
    # All is there, as nearly always where memory is enough: a short way.
    if prefetcher is None and not (plan.loads or plan.in_flight or scheduler.deferred):
        if plan.ready:
            use(plan.ready)
            scheduler.computed(plan.ready)
        scheduler.end_layer()
        return
    if plan.loads:
        transport.submit(plan.loads)
    if prefetcher is not None:
        prefetcher.router_ran(routed)
    for spans in _computing(scheduler, transport, plan, prefetcher, together=together):
        use(spans)
    scheduler.end_layer()
    if prefetcher is not None:
        prefetcher.layer_ended()


def _computing(
    scheduler: Scheduler, transport: Transport, plan: Plan, prefetcher: Prefetcher | None, *, together: bool
) -> Iterator[Sequence[Span]]:
    """What the running layer is to compute next, `together` all that is there; the caller has computed it when it asks
    again. Waits where nothing is there.

    Spans that arrive go before resident ones, since they may hold staging slots. An expert that arrives in several
    spans is computed when all of it is there that has a slot: only computing may free one for the rest. Where layers
    keep parts of experts, decode computes at once what is resident (MoEpic, section 3.1).
    """
    held: dict[int, list[Span]] = {}  # by expert: what waits for the rest of it

    def holds(span: Span) -> bool:
        """Keep a span back where more of its expert is coming; returns whether."""
        is_held = scheduler.is_coming(span)
        if is_held:
            held.setdefault(span.expert, []).append(span)
        return is_held

    num_parts = scheduler.slots.num_parts
    num_coming = 0
    for span in (*plan.loads, *plan.in_flight):
        num_coming += span.num_segments
    ready = list(plan.ready)
    if num_parts > 1 and num_coming and not (scheduler.cache.is_split and scheduler.cache.is_decoding):
        ready = [span for span in plan.ready if span.num_segments == num_parts or not holds(span)]
    while True:
        spans: list[Span] = []
        while num_coming and (together or not spans):
            arrived = transport.poll()
            if arrived is None:
                if spans or ready:
                    break
                arrived = transport.wait()
            if scheduler.loaded(arrived):
                num_coming -= arrived.num_segments
                if arrived.num_segments == num_parts:
                    spans.append(arrived)
                elif not holds(arrived):
                    spans += joined([*held.pop(arrived.expert, ()), arrived])
            elif prefetcher is not None:  # there is room for more
                prefetcher.refill()
        if not spans or (together and not num_coming):
            num = len(ready) if together else 1
            spans += ready[:num]
            del ready[:num]
        if not spans:
            return
        yield spans
        following = scheduler.computed(spans)
        if prefetcher is not None:
            prefetcher.computed()
        if following:
            num_coming += sum([span.num_segments for span in following])
            transport.submit(following)


def joined(spans: Sequence[Span]) -> Sequence[Span]:
    """Spans of one expert, with those that are adjacent in the expert and in their slots as one."""
    result: list[Span] = []
    for span in sorted(spans, key=lambda span: span.segment):
        last = result[-1] if result else None
        if last and (span.segment - last.segment, span.slot - last.slot) == (last.num_segments, last.num_segments):
            result[-1] = last._replace(num_segments=last.num_segments + span.num_segments)
        else:
            result.append(span)
    return result


class Channel(Protocol):
    """Shows a forward pass to a predictor. An observation is a function that is called where it is used."""

    def begin_iteration(self, began: Callable[[], Began]) -> Iterable[Prediction]: ...

    def router_ran(self, routed: Callable[[], Routed]) -> Iterable[Prediction]:
        """What is predicted now that a router has chosen. Raises what the predictor raises."""
        ...

    def end_iteration(self, ok: bool) -> None: ...


class InlineChannel:
    """Predicts within the pass, at once: the same run gives the same predictions at the same moments."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self.end_iteration = predictor.end_iteration

    def begin_iteration(self, began: Callable[[], Began]) -> Iterable[Prediction]:
        return list(self._predictor.begin_iteration(began()))

    def router_ran(self, routed: Callable[[], Routed]) -> Iterable[Prediction]:
        return list(self._predictor.router_ran(routed()))


class Prefetcher:
    """Loads what is predicted."""

    def __init__(self, scheduler: Scheduler, transport: Transport, channel: Channel) -> None:
        self.end_iteration = channel.end_iteration
        self._scheduler = scheduler
        self._transport = transport
        self._channel = channel
        self._layers = range(scheduler.geometry.num_layers)  # those of the running stack

    def begin_iteration(self, began: Callable[[], Began], layers: range | None = None) -> None:
        """A forward pass begins, over these layers (an encoder and a decoder are two passes); None: all layers."""
        self._layers = range(self._scheduler.geometry.num_layers) if layers is None else layers
        self._predict(self._channel.begin_iteration(began))
        self.refill()

    def router_ran(self, routed: Callable[[], Routed] | None) -> None:
        """The router ran and its layer's loads are submitted: show it to the predictor, and prefetch more."""
        if routed is not None:
            self._predict(self._channel.router_ran(routed))
        self.refill()

    def computed(self) -> None:
        """Something was computed. If slots were lacking, prefetch more."""
        if self._scheduler.queue.needs_slots:
            self.refill()

    def layer_ended(self) -> None:
        self.refill()

    def refill(self) -> None:
        """Prefetch as much as there is room for."""
        spans = self._scheduler.prefetch()
        if spans:
            self._transport.prefetch(spans)

    def _predict(self, predictions: Iterable[Prediction]) -> None:
        for prediction in predictions:
            if prediction.layer in self._layers:
                self._scheduler.predict(prediction)
