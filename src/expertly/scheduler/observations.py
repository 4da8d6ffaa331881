"""Between a forward pass and its predictor: what the pass shows goes in, predictions come out when they are ready
(publish and subscribe: fMoE, section 4.3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Protocol

from expertly.core.messages import Prediction
from expertly.core.observation import Began, Routed
from expertly.policies.predictor.base import Predictor

PASSES_WAITING = 4
"""Forward passes whose observations may wait for a predictor that takes its time."""


class Seen(NamedTuple):
    """A prediction, and the step that it was made of. A step is one layer of one iteration, counted from the start;
    that at which an iteration begins is the last one of the iteration before."""

    step: int
    prediction: Prediction


class Channel(Protocol):
    """Nothing here makes the forward pass wait. Observations are functions, called once at most,
    where they are used.
    """

    def begin_iteration(self, step: int, began: Callable[[], Began]) -> None:
        """Publish that a forward pass begins."""
        ...

    def router_ran(self, step: int, routed: Callable[[], Routed]) -> None:
        """Publish what a router has said."""
        ...

    def end_iteration(self, ok: bool) -> None:
        """Publish that the pass ended."""
        ...

    def take(self) -> Seen | None:
        """The next prediction that is ready, in the order in which they were made. Raises what making one raised."""
        ...


class InlineChannel:
    """Predicts where it is told, at once: the same run gives the same predictions at the same moments."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._ready: deque[Seen] = deque()

    def begin_iteration(self, step: int, began: Callable[[], Began]) -> None:
        for prediction in self._predictor.begin_iteration(began()):
            self._ready.append(Seen(step, prediction))

    def router_ran(self, step: int, routed: Callable[[], Routed]) -> None:
        for prediction in self._predictor.router_ran(routed()):
            self._ready.append(Seen(step, prediction))

    def end_iteration(self, ok: bool) -> None:
        self._predictor.end_iteration(ok)

    def take(self) -> Seen | None:
        return self._ready.popleft() if self._ready else None


class Work(NamedTuple):
    """What a predictor does next: read how a pass began ("begin") or a router ("router"), or learn ("update")."""

    what: Literal["begin", "router", "update"]
    step: int
    at_ns: int  # when it was published
    do: Callable[[Predictor], Iterable[Prediction]]


class _Context(NamedTuple):
    step: int
    at_ns: int
    routed: Callable[[], Routed]


@dataclass(slots=True, eq=False)
class _Pass:
    """What has been published of a forward pass and not been read."""

    step: int
    at_ns: int
    began: Callable[[], Began] | None
    routed: deque[_Context] = field(default_factory=deque)
    ok: bool | None = None  # None: it runs, or nobody said how it ended
    ended_ns: int = 0

    @property
    def num_contexts(self) -> int:
        return len(self.routed) + (self.began is not None)


class ObservationQueue:
    """Contexts in the order in which they were published, `max_waiting` at most. Pure: it knows times as it is told.

    Of more, the oldest go, passes as a whole: all that have ended and were not begun to be read. What they would
    predict is late, and what is read next is the running pass. The pass that is being read stays, so that there is
    always one that is seen whole and can be learned from, however long the overload lasts. Only where those two are too
    much the rest of it goes, then the oldest routers of the running one, which is of use without them.
    """

    def __init__(self, max_waiting: int) -> None:
        assert max_waiting >= 1
        self.num_dropped = 0
        """Contexts that nobody read, because of too many."""
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._passes: deque[_Pass] = deque()

    @classmethod
    def of_layers(cls, num_layers: int) -> ObservationQueue:
        """With room for the contexts of PASSES_WAITING passes over so many layers."""
        return cls(PASSES_WAITING * (num_layers + 1))

    def begin_iteration(self, step: int, began: Callable[[], Began], at_ns: int = 0) -> None:
        """A pass begins."""
        self._passes.append(_Pass(step, at_ns, began))
        self._published()

    def router_ran(self, step: int, routed: Callable[[], Routed], at_ns: int = 0) -> None:
        """A router of it ran; nothing where none is open."""
        if self._passes and self._passes[-1].ok is None:
            self._passes[-1].routed.append(_Context(step, at_ns, routed))
            self._published()

    def end_iteration(self, ok: bool, at_ns: int = 0) -> None:
        """It ended. An end counts as no context."""
        if self._passes:
            self._passes[-1].ok, self._passes[-1].ended_ns = ok, at_ns

    def next(self) -> Work | None:
        """The oldest that has not been read, which now counts as read; None where nothing waits."""
        while self._passes:
            first = self._passes[0]
            if first.began is not None:
                began, first.began = first.began, None
                self._num_waiting -= 1
                return Work("begin", first.step, first.at_ns, partial(_begin, began))
            if first.routed:
                step, at_ns, routed = first.routed.popleft()
                self._num_waiting -= 1
                return Work("router", step, at_ns, partial(_router_ran, routed))
            ok = first.ok
            if ok is None and len(self._passes) == 1:
                return None  # it runs
            self._passes.popleft()
            if ok is not None:
                return Work("update", first.step, first.ended_ns, partial(_end, ok))
        return None

    def clear(self) -> None:
        """Nothing waits."""
        self._passes.clear()
        self._num_waiting = 0

    def _published(self) -> None:
        self._num_waiting += 1
        if self._num_waiting <= self._max_waiting:
            return
        first, running = self._passes[0], self._passes[-1]
        for one in [one for one in self._passes if one.began is not None and one is not running]:
            self._drop(one)
        if self._num_waiting > self._max_waiting and first.routed and first is self._passes[0] and first is not running:
            self._drop(first)
        while self._num_waiting > self._max_waiting:
            running.routed.popleft()
            self._num_waiting -= 1
            self.num_dropped += 1

    def _drop(self, one: _Pass) -> None:
        self._passes.remove(one)
        self._num_waiting -= one.num_contexts
        self.num_dropped += one.num_contexts


def _begin(began: Callable[[], Began], predictor: Predictor) -> Iterable[Prediction]:
    return predictor.begin_iteration(began())


def _router_ran(routed: Callable[[], Routed], predictor: Predictor) -> Iterable[Prediction]:
    return predictor.router_ran(routed())


def _end(ok: bool, predictor: Predictor) -> Iterable[Prediction]:
    predictor.end_iteration(ok)
    return ()
