"""Which kept expert goes first. `EVICTIONS` has the policies by name."""

from __future__ import annotations

from expertly.policies.eviction.base import EvictionPolicy, MakePolicy, ScoredPolicy
from expertly.policies.eviction.eam import EAMEviction
from expertly.policies.eviction.fmoe import FMoEEviction
from expertly.policies.eviction.lcp import LCP
from expertly.policies.eviction.reuse import Reuse
from expertly.policies.eviction.simple import LFU, LRU, Belady, RandomEviction
from expertly.policies.eviction.static import Static
from expertly.policies.registry import PolicyRegistry

EVICTIONS: PolicyRegistry[EvictionPolicy] = PolicyRegistry(
    EvictionPolicy,
    "expertly.evictions",
    (LRU, LFU, LCP, RandomEviction, Static, Belady, FMoEEviction, EAMEviction, Reuse),
)

__all__ = ["EVICTIONS", "EvictionPolicy", "MakePolicy", "ScoredPolicy"]
