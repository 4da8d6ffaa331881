"""The contract of a predictor: it watches a forward pass and says what later layers will need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from expertly.core.messages import Prediction, RouterRan


class Predictor(Protocol):
    """One model. It sees layers in order and answers for layers that have not run; none reads a clock."""

    def begin_iteration(self) -> Iterable[Prediction]:
        """A forward pass begins: what its first layers will need."""
        ...

    def router_ran(self, router: RouterRan) -> Iterable[Prediction]:
        """A router has spoken: what the layers after it will need."""
        ...
