"""The file of a split plan, which `expertly configure` writes and a system that takes one begins with: allocation
`split` keeps to it, `moepic` configures anew after every tau tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from expertly.core.errors import ConfigError
from expertly.core.files import disk_errors, json_bytes, read_json_object, write_atomic
from expertly.core.geometry import Geometry
from expertly.policies.allocation import ALLOCATIONS
from expertly.policies.moepic.plan import SplitPlan
from expertly.scheduler.budget import Budget
from expertly.scheduler.system import System

ABOUT = "about"
"""What a file says of itself, beside the plan: for people."""


def save_plan(path: Path, plan: SplitPlan, about: Mapping[str, str | int | float | None]) -> None:
    """Replace the file at `path`; after a crash it is what it was before. Raises ConfigError where it cannot be."""
    with disk_errors(path, "writing the plan", ConfigError, ""):
        write_atomic(path, json_bytes({**plan.to_dict(), ABOUT: dict(about)}))


def read_plan(path: str | Path) -> SplitPlan:
    """Raises ConfigError naming the file, the field, its value and what is accepted."""
    path = Path(path).expanduser()
    raw = read_json_object(path, ConfigError)
    raw.pop(ABOUT, None)
    try:
        return SplitPlan.from_dict(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def check_plan(plan: SplitPlan, system: System, geometry: Geometry, budget: Budget) -> None:
    """Raises ConfigError where the system makes nothing of it, where it is of other experts or segments, or keeps more
    than there are slots for.
    """
    if not system.takes_plan:
        takers = ", ".join(name for name, one in ALLOCATIONS.items() if one.takes_plan) or "there are none"
        raise ConfigError(
            f"plan: system {system.name!r} takes none (allocation={system.allocation}); accepted: allocation={takers}"
        )
    if "theta" in dict(system.options):
        raise ConfigError(
            f"plan: system {system.name!r} says theta, as a plan does of every layer; accepted: one of them"
        )
    plan.check_fits(geometry)
    for size_class, accepted in enumerate(budget.kept_slots):
        layers = zip(plan.layers, geometry.size_classes, strict=True)
        planned = sum(layer.budget_segments for layer, its_class in layers if its_class == size_class)
        if planned > accepted:
            raise ConfigError(
                f"plan field layers: budgets of {planned} segments together; must be at most the {accepted} that "
                f"{budget.memory_nbytes} bytes of memory keep beside the ring"
            )
