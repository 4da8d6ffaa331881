"""The loop over one layer, from its router's choice to its last expert, that engine and simulator share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from expertly.core.messages import Prediction, RouterRan, Span
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

    `compute` queues everything that reads the slots of some spans: of all that are there, with `together` or where no
    other can come, else of one. `routed` returns what the predictor may see of the router; None: the predictor does not
    follow this pass.
    """
    cancelled: Sequence[Span] = ()
    if prefetcher is not None:
        while (span := transport.poll()) is not None:
            computable = scheduler.loaded(span)
            assert computable is None, "between layers nobody waits for a span"
        cancelled = transport.cancel(router.layer)
    plan = scheduler.begin_layer(router, cancelled)
    if plan.loads:
        transport.submit(plan.loads)
    if prefetcher is not None:
        prefetcher.router_ran(routed)
    _compute_all(scheduler, transport, plan.ready, compute, prefetcher, together=together)
    scheduler.end_layer()
    if prefetcher is not None:
        prefetcher.layer_ended()


def _compute_all(
    scheduler: Scheduler,
    transport: Transport,
    ready: list[Span],
    compute: Callable[[Sequence[Span]], None],
    prefetcher: Prefetcher | None,
    *,
    together: bool,
) -> None:
    """Compute what is ready, and what arrives as it arrives: that goes first, since it may hold staging slots."""
    # Nearly always nothing can come while something is computed.
    takes_all = together or (prefetcher is None and not scheduler.num_coming and not scheduler.deferred)
    while ready or scheduler.num_coming:
        spans: list[Span] = []
        if scheduler.num_coming:
            spans = _arrivals(scheduler, transport, prefetcher, together=together, may_wait=not ready)
        if not spans or (takes_all and not scheduler.num_coming):
            num = len(ready) if takes_all else 1
            spans += ready[:num]
            ready = ready[num:]
        if takes_all:
            compute(spans)
        else:
            for span in spans:
                compute((span,))
        following = scheduler.computed(spans)
        if prefetcher is not None:
            prefetcher.computed()
        if following:
            transport.submit(following)


def _arrivals(
    scheduler: Scheduler, transport: Transport, prefetcher: Prefetcher | None, *, together: bool, may_wait: bool
) -> list[Span]:
    """What can be computed of the next span that has arrived, `together` of all that have. Waits where that is nothing
    and it `may_wait`.
    """
    spans: list[Span] = []
    while scheduler.num_coming and (together or not spans):
        arrived = transport.poll()
        if arrived is None:
            if spans or not may_wait:
                break
            arrived = transport.wait()
        computable = scheduler.loaded(arrived)
        if computable is not None:
            spans += computable
        elif prefetcher is not None:  # there is room for more
            prefetcher.refill()
    return spans


class Prefetcher:
    """Shows a forward pass to a predictor, and loads what that says. It predicts within the pass, at once: the same run
    gives the same predictions at the same moments. An observation is a function that is called where it is used.

    An exception of the predictor fails one pass; from then on nothing is predicted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        transport: Transport,
        predictor: Predictor,
        around: AbstractContextManager[object] | None = None,
    ) -> None:
        """`around`: entered while the predictor is asked."""
        self._scheduler, self._transport, self._predictor = scheduler, transport, predictor
        self._around = nullcontext() if around is None else around
        self.error: Exception | None = None
        """The predictor's exception."""

    def begin_iteration(self, began: Callable[[], Began]) -> None:
        """A forward pass begins. Raises, as the next two, what the predictor raises."""
        self._ask(lambda: self._predictor.begin_iteration(began()))
        self.refill()

    def router_ran(self, routed: Callable[[], Routed] | None) -> None:
        """The router ran and its layer's loads are submitted: show it to the predictor, and prefetch more."""
        if routed is not None:
            self._ask(lambda: self._predictor.router_ran(routed()))
        self.refill()

    def end_iteration(self, ok: bool) -> None:
        self._ask(lambda: self._predictor.end_iteration(ok))

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

    def _ask(self, ask: Callable[[], Iterable[Prediction] | None]) -> None:
        if self.error is not None:
            return
        try:
            with self._around:
                predictions = list(ask() or ())
        except Exception as error:
            self.error = error
            raise
        for prediction in predictions:
            self._scheduler.predict(prediction)
