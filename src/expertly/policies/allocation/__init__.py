"""How many slots each layer keeps. `ALLOCATIONS` has the policies by name."""

from __future__ import annotations

from expertly.policies.allocation.adapmoe import AdapMoE
from expertly.policies.allocation.base import Allocation, Job
from expertly.policies.allocation.moepic import MoEpic, SplitExperts
from expertly.policies.allocation.uniform import NoneKept, Uniform
from expertly.policies.registry import PolicyRegistry

ALLOCATIONS: PolicyRegistry[Allocation] = PolicyRegistry(
    Allocation, "expertly.allocations", (Uniform, NoneKept, AdapMoE, SplitExperts, MoEpic)
)

__all__ = ["ALLOCATIONS", "Allocation", "Job"]
