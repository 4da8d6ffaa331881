"""Publish and subscribe: what a pass shows goes in, predictions come out when they are ready (fMoE, section 4.3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from expertly.core.messages import Prediction
from expertly.core.observation import Began, Routed
from expertly.policies.predictor.base import Predictor


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
