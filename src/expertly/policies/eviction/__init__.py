"""Which kept expert goes first. One policy a file; `EVICTIONS` makes one for a cache of `capacity` experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from expertly.core.geometry import Geometry
from expertly.policies.base import NO_OPTIONS, PolicyOptions, parse_options
from expertly.policies.eviction.base import EvictionPolicy
from expertly.policies.eviction.belady import Belady
from expertly.policies.eviction.eam import EAMEviction
from expertly.policies.eviction.fmoe import FMoEEviction
from expertly.policies.eviction.lcp import LCP
from expertly.policies.eviction.lfu import LFU
from expertly.policies.eviction.lru import LRU
from expertly.policies.eviction.random import RandomEviction
from expertly.policies.eviction.reuse import family
from expertly.policies.eviction.static import Static
from expertly.policies.known import Known
from expertly.policies.registry import Registry

_NOTHING = Known()


@dataclass(frozen=True, slots=True)
class MakeEviction:
    """Makes the policy of one cache."""

    make: Callable[[Geometry, int, Known], EvictionPolicy]  # for a cache of so many experts
    is_scored: bool = False  # a ScoredPolicy, which the admission `best` needs
    needs_future: bool = False
    needs_probabilities: bool = False  # predicted ones, without which it is another policy
    is_sized: bool = False  # goes by the capacity that it was made for: its cache cannot change
    needs_best: bool = False  # must be told what is needed before it is kept: has no use without the admission `best`
    takes_reuse: bool = False  # begins with Known.reuse where that is given
    family: Callable[[Geometry, Known], Callable[[int], EvictionPolicy]] | None = None  # of caches that learn together
    options: type[Any] = PolicyOptions

    def __call__(self, geometry: Geometry, capacity: int, known: Known = _NOTHING) -> EvictionPolicy:
        """Raises ConfigError where `known` lacks what the policy needs."""
        return self.of_model(geometry, known)(capacity)

    def parse(self, options: Mapping[str, str], where: str = "eviction") -> Any:
        return parse_options(self.options, options, where)

    def of_model(
        self, geometry: Geometry, known: Known = _NOTHING, options: Mapping[str, str] = NO_OPTIONS
    ) -> Callable[[int], EvictionPolicy]:
        """Makes the policies of all caches of one model, for caches of so many experts each. Raises as a call."""
        if self.family is not None:
            return self.family(geometry, known)
        return lambda capacity: self.make(geometry, capacity, known)


_BUILT_IN = {
    "lru": MakeEviction(lambda geometry, capacity, known: LRU()),
    "lfu": MakeEviction(lambda geometry, capacity, known: LFU(), is_scored=True),
    "lcp": MakeEviction(lambda geometry, capacity, known: LCP(), is_scored=True),
    "random": MakeEviction(lambda geometry, capacity, known: RandomEviction(known.seed)),
    "static": MakeEviction(lambda geometry, capacity, known: Static(capacity, known.popularity), is_sized=True),
    "belady": MakeEviction(
        lambda geometry, capacity, known: Belady(known.future),
        is_scored=True,
        needs_future=True,
        needs_best=True,
    ),
    "fmoe": MakeEviction(lambda geometry, capacity, known: FMoEEviction(), is_scored=True, needs_probabilities=True),
    "eam": MakeEviction(
        lambda geometry, capacity, known: EAMEviction(geometry), is_scored=True, needs_probabilities=True
    ),
    "reuse": MakeEviction(
        lambda geometry, capacity, known: family(geometry, known.reuse)(capacity),
        is_scored=True,
        needs_best=True,
        takes_reuse=True,
        family=lambda geometry, known: family(geometry, known.reuse),
    ),
}

EVICTIONS: Registry[MakeEviction] = Registry(
    "eviction", "expertly.evictions", _BUILT_IN, lambda one: isinstance(one, MakeEviction), "a MakeEviction"
)

__all__ = ["EVICTIONS", "EvictionPolicy", "MakeEviction"]
