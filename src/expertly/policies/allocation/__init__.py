"""How many slots each layer keeps. One allocation a file; `ALLOCATIONS` makes one for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from expertly.core.geometry import Geometry
from expertly.policies.allocation.adapmoe import AdapMoE
from expertly.policies.allocation.base import Allocation, Job
from expertly.policies.allocation.moepic import MoEpic, MoEpicOptions
from expertly.policies.allocation.none import NoneKept
from expertly.policies.allocation.split import Split, SplitOptions
from expertly.policies.allocation.uniform import Uniform
from expertly.policies.base import NO_OPTIONS, PolicyOptions, parse_options
from expertly.policies.known import Known
from expertly.policies.registry import Registry

_NOTHING = Known()


@dataclass(frozen=True, slots=True)
class MakeAllocation:
    """Makes the allocation of one model."""

    make: Callable[[Geometry, Known, Any], Allocation]
    options: type[Any] = PolicyOptions  # a dataclass (policies.base)
    keeps: bool = True  # False: all slots are the ring's
    needs_layers: bool = False  # one cache a layer: over all layers there is nothing to share out
    takes_usage: bool = False  # Known.usage, where there is a training part
    splits: bool = False  # may keep parts of experts
    takes_plan: bool = False  # Known.plan, where there is one

    def __call__(
        self, geometry: Geometry, known: Known = _NOTHING, options: Mapping[str, str] = NO_OPTIONS
    ) -> Allocation:
        """Raises ConfigError where an option is not one."""
        return self.make(geometry, known, self.parse(options))

    def parse(self, options: Mapping[str, str], where: str = "allocation") -> Any:
        """The options as the dataclass. Raises ConfigError naming the key, its value and what is accepted; `where`
        begins its message.
        """
        return parse_options(self.options, options, where)


_BUILT_IN = {
    "uniform": MakeAllocation(lambda geometry, known, options: Uniform(geometry)),
    "none": MakeAllocation(lambda geometry, known, options: NoneKept(geometry), keeps=False),
    "adapmoe": MakeAllocation(
        lambda geometry, known, options: AdapMoE(geometry, known.usage),
        needs_layers=True,
        takes_usage=True,
    ),
    "split": MakeAllocation(
        lambda geometry, known, options: Split(geometry, options, known.plan),
        SplitOptions,
        needs_layers=True,
        splits=True,
        takes_plan=True,
    ),
    "moepic": MakeAllocation(
        lambda geometry, known, options: MoEpic(geometry, options, known.plan),
        MoEpicOptions,
        needs_layers=True,
        splits=True,
        takes_plan=True,
    ),
}

ALLOCATIONS: Registry[MakeAllocation] = Registry(
    "allocation",
    "expertly.allocations",
    _BUILT_IN,
    lambda one: isinstance(one, MakeAllocation) and is_dataclass(one.options),
    "a MakeAllocation whose options are a dataclass",
)

__all__ = ["ALLOCATIONS", "Allocation", "Job", "MakeAllocation"]
