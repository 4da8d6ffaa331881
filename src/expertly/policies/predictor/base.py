"""The contract of a predictor: it watches forward passes and says what later layers will need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from expertly.core.messages import Prediction
from expertly.core.observation import Began, History, Routed, Want


@dataclass(slots=True)
class Work:
    """What predicting has cost so far; a simulation turns it into time."""

    num_calls: int = 0
    read_nbytes: int = 0
    flops: int = 0


class Predictor(ABC):
    """One model. It sees layers in order and answers for layers that have not run; none reads a clock.

    Under overload a driver leaves out observations: a layer may be missing in an iteration, and its end.
    """

    wants: frozenset[Want] = frozenset()
    """What it needs to see; of the rest it may be told, too."""

    def __init__(self) -> None:
        self.work = Work()

    def begin_iteration(self, began: Began) -> Iterable[Prediction]:
        """A forward pass begins: what its first layers will need. A layer's distance is its number + 1."""
        return ()

    @abstractmethod
    def router_ran(self, routed: Routed) -> Iterable[Prediction]:
        """A router has spoken: what the layers after it will need; past the last one, the first of the next pass."""
        ...

    def end_iteration(self, ok: bool) -> None:  # noqa: B027 - most learn nothing
        """The pass ended; what it showed may be learned from, unless it failed. All predictions have been read."""

    def finish(self) -> None:  # noqa: B027 - most learn nothing
        """Nothing runs any more: what waited for more of a request is learned."""

    def learn(self, history: History) -> None:  # noqa: B027 - most learn nothing
        """Learn from passes of a training part, before anything runs."""

    def facts(self) -> dict[str, int | float | None]:
        """What it has to say of itself, by names that its documentation explains."""
        return {}
