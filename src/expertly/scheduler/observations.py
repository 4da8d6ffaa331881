"""The queue between a forward pass and its predictor: observations go in, predictions come out when they are ready
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
"""Forward passes whose observations may wait for a slow predictor."""


class Seen(NamedTuple):
    """A prediction, and the step whose observation it was made of. A step is one layer of one iteration, counted from
    the start; an iteration begins at the last step of the one before."""

    step: int
    prediction: Prediction


class Channel(Protocol):
    """Takes observations from a forward pass and gives it predictions, without making it wait. An observation is a
    function that is called where it is used, once at most.
    """

    def begin_iteration(self, step: int, began: Callable[[], Began]) -> None: ...

    def router_ran(self, step: int, routed: Callable[[], Routed]) -> None:
        """Publish what a router chose."""
        ...

    def end_iteration(self, ok: bool) -> None: ...

    def take(self) -> Seen | None:
        """The next prediction that is ready, in the order in which they were made. Raises what making one raised."""
        ...


class InlineChannel:
    """Predicts within the pass, at once: the same run gives the same predictions at the same moments."""

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
    """What a predictor does next: read how a pass began ("begin"), read a router ("router"), or learn ("update")."""

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
    """Observations of a forward pass that were published and not read yet."""

    step: int
    at_ns: int
    began: Callable[[], Began] | None
    routed: deque[_Context] = field(default_factory=deque)
    ok: bool | None = None  # None: it runs, or its end was never published
    ended_ns: int = 0

    @property
    def num_contexts(self) -> int:
        return len(self.routed) + (self.began is not None)


class ObservationQueue:
    """Observations in the order in which they were published, `max_waiting` at most. Pure: it is told the time.

    When there are more, whole passes are dropped first: all that ended and were not begun to be read, since their
    predictions would be late. The pass that is being read stays, so that even under lasting overload some passes are
    seen whole and learned from. If that is not enough, the rest of the pass being read is dropped, then the oldest
    routers of the running pass, which can be predicted from without them.
    """

    def __init__(self, max_waiting: int) -> None:
        assert max_waiting >= 1
        self.num_dropped = 0
        """Observations that were dropped."""
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._passes: deque[_Pass] = deque()

    @classmethod
    def of_layers(cls, num_layers: int) -> ObservationQueue:
        """A queue with room for PASSES_WAITING passes over so many layers."""
        return cls(PASSES_WAITING * (num_layers + 1))

    def begin_iteration(self, step: int, began: Callable[[], Began], at_ns: int = 0) -> None:
        self._passes.append(_Pass(step, at_ns, began))
        self._published()

    def router_ran(self, step: int, routed: Callable[[], Routed], at_ns: int = 0) -> None:
        """A router of the running pass ran; ignored where no pass runs."""
        if self._passes and self._passes[-1].ok is None:
            self._passes[-1].routed.append(_Context(step, at_ns, routed))
            self._published()

    def end_iteration(self, ok: bool, at_ns: int = 0) -> None:
        """The pass ended. An end does not count as an observation."""
        if self._passes:
            self._passes[-1].ok, self._passes[-1].ended_ns = ok, at_ns

    def next(self) -> Work | None:
        """Take the oldest observation; None where nothing waits."""
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
