"""Files that some systems begin with: weights that were trained, and plans of splits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from expertly.core.errors import ConfigError
from expertly.scheduler.presets import get_system

if TYPE_CHECKING:
    from expertly.policies.allocation.moepic import SplitPlan
    from expertly.policies.learned import LearnedFile
    from expertly.policies.predictor.learned import LearnedWeights


def predictor_for(systems: Sequence[str], path: Path | None) -> LearnedFile[LearnedWeights] | None:
    """What the file holds. Raises ConfigError where none of the systems takes it, and what reading it raises."""
    from expertly.policies.learned import read_learned
    from expertly.policies.predictor.learned import LearnedWeights

    if path is None:
        return None
    if not any(get_system(name).takes_weights for name in systems):
        raise ConfigError(f"predictor={str(path)!r}: no system of {', '.join(systems)} takes trained weights")
    return read_learned(path, LearnedWeights)


def plan_for(systems: Sequence[str], path: Path | None) -> SplitPlan | None:
    """What the file holds. Raises ConfigError where none of the systems takes it, and what reading it raises."""
    from expertly.policies.allocation.moepic import read_plan

    if path is None:
        return None
    if not any(get_system(name).takes_plan for name in systems):
        raise ConfigError(f"plan={str(path)!r}: no system of {', '.join(systems)} begins with a plan")
    return read_plan(path)
