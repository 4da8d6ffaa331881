"""What policies may know before anything runs: a profile, a seed, what was trained or found in a training part and, in
simulations only, the future.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, TypeVar

from expertly.core.messages import Prediction, RouterRan

T = TypeVar("T")

NEVER = 1 << 62
"""The step of a next use that does not come."""


class Future(Protocol):
    """The demands to come. A step is one layer of one iteration, counted over the run; experts are dense ids."""

    step: int  # the running one

    def next_use(self, expert: int) -> int:
        """The step at which an expert that the running step needs is needed again, or NEVER."""
        ...

    def needs(self, ahead: int) -> tuple[int, list[int]] | None:
        """(layer, experts by their number in the layer, in router order) of step `step + ahead`; None: past the end."""
        ...


class Training(ABC):
    """Watches the training part of a trace for a policy, before anything is simulated. See `Policy.training`."""

    max_rows: ClassVar[int | None] = None
    """Rows of the training part that are enough, from its first on; None: all."""
    needs_predictions: ClassVar[bool] = False
    """Whether the system's predictor runs beside the training part, for `predicted`."""

    def predicted(self, prediction: Prediction) -> None:  # noqa: B027 - most need not
        """The predictor named these experts, before their layer's router ran."""

    @abstractmethod
    def router_ran(self, router: RouterRan) -> None:
        """A router ran."""

    @abstractmethod
    def found(self, origin: str) -> object:
        """The result, which its policy gets in `Known.given`. `origin`: the training part, in words."""


@dataclass(frozen=True, slots=True)
class Known:
    """Given to the makers of policies and predictors. Each takes what it needs, and says so where it is missing."""

    popularity: Mapping[int, int] = field(default_factory=dict)  # tokens that each expert served in a training part
    seed: int = 0
    future: Future | None = None
    given: tuple[object, ...] = ()  # anything else, told apart by its class: trained weights, a split plan, ...

    def get(self, kind: type[T]) -> T | None:
        """The first thing of this class that was given; None: there is none."""
        return next((one for one in self.given if isinstance(one, kind)), None)

    def giving(self, *more: object) -> Known:
        """A copy with more behind what was given."""
        return replace(self, given=(*self.given, *more))


NOTHING = Known()
