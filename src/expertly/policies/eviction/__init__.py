"""Which kept expert goes first. One policy a file; `EVICTIONS` makes one for a cache of `capacity` experts."""

from __future__ import annotations

from typing import Protocol

from expertly.policies.eviction.base import EvictionPolicy
from expertly.policies.eviction.belady import Belady
from expertly.policies.eviction.lcp import LCP
from expertly.policies.eviction.lfu import LFU
from expertly.policies.eviction.lru import LRU
from expertly.policies.eviction.random import RandomEviction
from expertly.policies.eviction.static import Static
from expertly.policies.known import Known


class MakeEviction(Protocol):
    """Makes the policy of one cache. Raises ConfigError where `known` lacks what the policy needs."""

    def __call__(self, capacity: int, known: Known = ...) -> EvictionPolicy: ...


_NOTHING = Known()

EVICTIONS: dict[str, MakeEviction] = {
    "lru": lambda capacity, known=_NOTHING: LRU(),
    "lfu": lambda capacity, known=_NOTHING: LFU(),
    "lcp": lambda capacity, known=_NOTHING: LCP(),
    "random": lambda capacity, known=_NOTHING: RandomEviction(known.seed),
    "static": lambda capacity, known=_NOTHING: Static(capacity, known.popularity),
    "belady": lambda capacity, known=_NOTHING: Belady(known.future),
}

__all__ = ["EVICTIONS", "EvictionPolicy", "MakeEviction"]
