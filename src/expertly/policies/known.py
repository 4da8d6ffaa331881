"""What policies may know before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from expertly.core.messages import RouterRan

T = TypeVar("T")


class RoutingObserver(Protocol):
    """Watches the routing of a trace's training part, before anything is simulated."""

    max_rows: int | None  # of the training part, from its first on, that are enough

    def observe(self, router: RouterRan) -> None: ...


@dataclass(frozen=True, slots=True)
class Known:
    """Given to the makers of policies and predictors. Each takes what it needs, and says so where it is missing."""

    popularity: Mapping[int, int] = field(default_factory=dict)  # tokens that each expert served in a training part
    seed: int = 0
    future: Any = None  # the demands to come, which only simulations have (expertly_lab.sim.future)
    items: tuple[object, ...] = ()  # anything else, told apart by its class: trained weights, what an observer saw, ...

    def get(self, kind: type[T]) -> T | None:
        """The first thing of this class that was given; None: there is none."""
        return next((item for item in self.items if isinstance(item, kind)), None)

    def giving(self, *more: object) -> Known:
        """A copy with more behind what was given."""
        return replace(self, items=(*self.items, *more))


NOTHING = Known()
