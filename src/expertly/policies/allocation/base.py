"""The contract of an allocation: it says how many slots each layer's cache has, and nothing else."""

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
"""From how long the parts of a decode step take to what layers should keep: plain data in and out."""


class Allocation(Policy, ABC):
    """Of one model. Quotas are in segments: of a layer, 0 to what its experts fill; together no more than is kept of
    each size class. What no layer keeps is staging slots. None reads a clock; ties are as docs/conventions.md says.
    """

    family = "allocation"
    keeps: ClassVar[bool] = True
    """False: no layer keeps anything."""
    needs_layers: ClassVar[bool] = False
    """Works with one cache a layer only: over all layers there is nothing to share out."""
    splits: ClassVar[bool] = False
    """May keep parts of experts, and begins with a known SplitPlan where there is one."""
    is_configured: ClassVar[bool] = False
    """Whether anything is ever `due`."""

    is_online = False
    """Whether it looks at what layers are asked for: only then are `ran` and `predicted` called."""

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
        """Before anything has run: of so many slots of each size class, those of each layer."""
        ...

    def begin(self, quotas: Sequence[int]) -> None:
        """The caches have these quotas now. Said once, before `ran`."""

    def tops(self, quotas: Sequence[int]) -> list[int] | None:
        """Of each layer with these quotas, how many segments of an expert the cache keeps, from its top, 1 to P; None:
        whole experts. What a quota leaves that does not hold such a top is staging slots.
        """
        return None

    def predicted(self, prediction: Prediction) -> None:
        """Of a layer, before its router has run."""

    def due(self) -> Job | None:
        """Between layers: what to work out now, once; None: nothing. It may take long, and holds nothing of this."""
        return None

    def configured(self, plan: SplitPlan) -> tuple[list[int], list[int]]:
        """Layers keep this from now on. Returns its `kept`. Raises ConfigError where the allocation takes no plan, or
        the plan is for another model.
        """
        raise ConfigError("plan: this allocation takes none; accepted: allocation=moepic")

    def ran(self, router: RouterRan, recall: Callable[[int], float]) -> list[int] | None:
        """A layer has run. Other quotas from now on, with the same sum in each size class; None: as they were.

        `recall`: of a layer, the share of what decode needed so far that predictions had named in time.
        """
        return None

    def facts(self) -> dict[str, object]:
        """What it has to say of itself, for results: plain data by names that its documentation explains."""
        return {}
