"""MoEpic: `policy.py` is the allocation; what it keeps is a `SplitPlan`, which `configure` works out from what
`LayerStatistics` saw and how long a step takes (`Timing`).
"""

from __future__ import annotations

from expertly.policies.allocation.moepic.configurator import DEFAULT_ZETA, Configuration, configure, uniform_plan
from expertly.policies.allocation.moepic.plan import LayerSplit, SplitPlan, read_plan, save_plan
from expertly.policies.allocation.moepic.policy import MoEpic, MoEpicOptions, SplitExperts, SplitOptions
from expertly.policies.allocation.moepic.statistics import LayerRates, LayerStatistics
from expertly.policies.allocation.moepic.timing import Timing

__all__ = [
    "DEFAULT_ZETA",
    "Configuration",
    "LayerRates",
    "LayerSplit",
    "LayerStatistics",
    "MoEpic",
    "MoEpicOptions",
    "SplitExperts",
    "SplitOptions",
    "SplitPlan",
    "Timing",
    "configure",
    "read_plan",
    "save_plan",
    "uniform_plan",
]
