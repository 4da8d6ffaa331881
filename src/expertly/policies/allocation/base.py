"""The contract of an allocation: it says how many slots each layer's cache has, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from expertly.core.errors import ConfigError
from expertly.core.messages import Prediction, RouterRan
from expertly.policies.moepic.configurator import Configuration
from expertly.policies.moepic.plan import SplitPlan
from expertly.policies.moepic.timing import Timing

Job = Callable[[Timing], Configuration]
"""From how long the parts of a decode step take to what layers should keep: plain data in and out."""


class Allocation(ABC):
    """One model. Shares are in segments: of a layer, 0 to what its experts fill; together no more than is kept of each
    size class. What no layer keeps is the ring's. None reads a clock; ties are as docs/conventions.md says.
    """

    is_online = False
    """Whether it looks at what layers are asked for: only then are `ran` and `predicted` called."""

    is_configured = False
    """Whether anything is ever `due`."""

    @abstractmethod
    def shares(self, kept_slots: Sequence[int]) -> list[int]:
        """Before anything has run: of so many slots of each size class, those of each layer."""
        ...

    def begin(self, shares: Sequence[int]) -> None:  # noqa: B027 - most need not know
        """The caches have these shares now. Said once, before `ran`."""

    def tops(self, shares: Sequence[int]) -> list[int] | None:
        """Of each layer with these shares, how many segments of an expert are kept where it is, from its top, 1 to P;
        None: whole experts. What a share leaves that does not hold such a top is the ring's.
        """
        return None

    def predicted(self, prediction: Prediction) -> None:  # noqa: B027 - most need not know
        """Of a layer, before its router has spoken."""

    def due(self) -> Job | None:
        """Between layers: what to work out now, once; None: nothing. It may take long, and holds nothing of this."""
        return None

    def configured(self, plan: SplitPlan) -> None:
        """This is what layers keep from now on. Raises ConfigError where nobody asked for it."""
        raise ConfigError("plan: this allocation takes none; accepted: allocation=moepic")

    def ran(self, demand: RouterRan, recall: Callable[[int], float]) -> list[int] | None:
        """A layer has run. Other shares from now on, with the same sum in each size class; None: as they were.

        `recall`: of a layer, the share of what decode needed so far that predictions had named in time.
        """
        return None

    def facts(self) -> dict[str, object]:
        """What it has to say of itself, for results: plain data by names that its documentation explains."""
        return {}
