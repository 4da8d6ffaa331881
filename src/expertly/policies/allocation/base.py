"""The contract of an allocation: how many slots each layer's cache has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan
from expertly.policies.base import NO_OPTIONS, Policy, PolicyOptions
from expertly.policies.known import NOTHING, Known

if TYPE_CHECKING:
    from expertly.policies.allocation.moepic.configurator import Configuration
    from expertly.policies.allocation.moepic.plan import SplitPlan
    from expertly.policies.allocation.moepic.timing import Timing

Job = Callable[["Timing"], "Configuration"]
"""From the times of a decode step to what layers should keep: plain data in and out."""


class Allocation(Policy, ABC):
    """Divides the slots of one model among its layers. Quotas are in segments, from 0 to all segments of a layer's
    experts; in each size class together at most what is kept. What no layer keeps is staging slots. None reads a clock;
    ties are as docs/conventions.md says.
    """

    family = "allocation"
    keeps: ClassVar[bool] = True
    """Whether layers keep anything."""
    needs_layers: ClassVar[bool] = False
    """Whether it works with one cache a layer only."""
    splits: ClassVar[bool] = False
    """Whether it may keep parts of experts, starting from a known SplitPlan where there is one."""
    is_configured: ClassVar[bool] = False
    """Whether anything is ever `due`."""

    is_online = False
    """Whether `ran` and `predicted` are called."""

    def __init__(self, geometry: Geometry, options: Any = PolicyOptions(), known: Known = NOTHING) -> None:
        self.geometry = geometry

    @classmethod
    def make(cls, geometry: Geometry, known: Known = NOTHING, given: Mapping[str, str] = NO_OPTIONS) -> Allocation:
        """One with these options, as the user wrote them. Raises ConfigError."""
        return cls(geometry, cls.parse(given), known)

    def __init_subclass__(cls) -> None:
        if "shares" in vars(cls):
            raise ConfigError(f"allocation {cls.__name__!r}: its method `shares` is called `quotas` now; rename it")

    @abstractmethod
    def quotas(self, kept_slots: Sequence[int]) -> list[int]:
        """The quota of each layer before anything has run, given the kept slots of each size class."""
        ...

    def begin(self, quotas: Sequence[int]) -> None:
        """The caches have these quotas now. Called once, before `ran`."""

    def tops(self, quotas: Sequence[int]) -> list[int] | None:
        """For each layer with these quotas, how many segments of an expert it keeps, from its top, 1 to P; None: whole
        experts. The rest of a quota that holds no whole top is staging slots.
        """
        return None

    def predicted(self, prediction: Prediction) -> None:
        """A layer whose router has not run was predicted."""

    def due(self) -> Job | None:
        """Between layers: what is to be worked out now, said once; None: nothing. The job may take long, beside the
        model, and holds nothing of this.
        """
        return None

    def configured(self, plan: SplitPlan) -> tuple[list[int], list[int]]:
        """Layers keep this from now on. Returns its `kept`. Raises ConfigError where the allocation takes no plan, or
        the plan is for another model.
        """
        raise ConfigError("plan: this allocation takes none; accepted: allocation=moepic")

    def ran(self, router: RouterRan, recall: Callable[[int], float]) -> list[int] | None:
        """A layer has run. Returns quotas to take from now on, of the same sum in each size class, or None.

        `recall(layer)`: the share of what the layer's decode needed so far that predictions named in time.
        """
        return None

    def facts(self) -> dict[str, object]:
        """Facts for results: plain data by names that its documentation explains."""
        return {}
