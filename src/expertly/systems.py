"""The presets: a system as a choice of parts (docs/conventions.md). Adding one here is adding it everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from expertly.core.errors import ConfigError
from expertly.policies.eviction import EVICTIONS, EvictionPolicy

DEFAULT_SYSTEM = "lru"


@dataclass(frozen=True, slots=True)
class System:
    """A named choice of parts. The fields are what `expertly systems` prints."""

    name: str
    summary: str
    eviction: str  # a key of EVICTIONS, or "none": nothing ever goes
    scope: str  # "layer": one cache a layer; "global": one over all layers
    allocation: str = "uniform"
    prediction: str = "none"
    transfer: str = "demand"
    keeps_everything: bool = False

    def make_policy(self) -> Callable[[int], EvictionPolicy]:
        """A factory of this system's eviction policy for a cache of so many experts."""
        return EVICTIONS["lru" if self.keeps_everything else self.eviction]


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System(
            "on-demand",
            "loads what is missing when it is needed (DeepSpeed-Inference, as fMoE builds it)",
            eviction="lru",
            scope="global",
        ),
        System("lru", "keeps the most recently used experts of each layer", eviction="lru", scope="layer"),
        System("lfu", "keeps the most frequently used experts of each layer", eviction="lfu", scope="layer"),
        System(
            "lcp", "keeps the experts of highest frequency x decayed recency (MoEpic)", eviction="lcp", scope="layer"
        ),
        System("random", "keeps any experts: the baseline every policy must beat", eviction="random", scope="layer"),
        System(
            "static",
            "pins each layer's most popular experts, with two spare places",
            eviction="static",
            scope="layer",
        ),
        System(
            "resident",
            "keeps every expert: the speed of enough memory",
            eviction="none",
            scope="global",
            transfer="at load",
            keeps_everything=True,
        ),
    )
}


def get_system(name: str) -> System:
    """The preset of that name. Raises ConfigError with the names that exist."""
    try:
        return SYSTEMS[name]
    except KeyError:
        raise ConfigError(f"system={name!r}: unknown; accepted: {', '.join(SYSTEMS)}") from None
