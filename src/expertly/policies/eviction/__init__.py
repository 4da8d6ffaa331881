"""Which kept expert goes first. One policy a file; `EVICTIONS` makes one for a cache of `capacity` experts."""

from collections.abc import Callable

from expertly.policies.eviction.base import EvictionPolicy
from expertly.policies.eviction.lcp import LCP
from expertly.policies.eviction.lfu import LFU
from expertly.policies.eviction.lru import LRU
from expertly.policies.eviction.random import RandomEviction
from expertly.policies.eviction.static import Static

EVICTIONS: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda capacity: LRU(),
    "lfu": lambda capacity: LFU(),
    "lcp": lambda capacity: LCP(),
    "random": lambda capacity: RandomEviction(),
    "static": lambda capacity: Static(capacity),
}

__all__ = ["EVICTIONS", "EvictionPolicy"]
