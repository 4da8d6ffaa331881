"""Pins the most popular experts; the rest of the cache is a small LRU."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from expertly.core.geometry import Geometry
from expertly.policies.base import PolicyOptions, option
from expertly.policies.known import Known
from expertly.policies.lru import LRU


@dataclass(frozen=True)
class StaticOptions(PolicyOptions):
    spare: int = option(2, "places that are not pinned", least=0)
    profile_tokens: int = option(256, "tokens that show popularity, where no training part does", least=1)


class Static(LRU):
    """Popularity comes from a profile (tokens served by each expert), or from the first `profile_tokens` tokens.

    The most popular `capacity - spare` experts are pinned once they are kept; the `spare` other places are an LRU.
    While popularity is still being learned nothing is pinned, and the least popular expert is evicted first. `capacity`
    counts experts.
    """

    name = "static"
    options = StaticOptions
    is_sized = True

    def __init__(
        self, capacity: int, profile: Mapping[int, int] | None = None, options: StaticOptions = StaticOptions()
    ) -> None:
        super().__init__()
        self._num_pinned = max(0, capacity - options.spare)
        self._count: dict[int, int] = dict(profile or {})
        self._tokens_to_learn = 0 if profile else options.profile_tokens
        self._pinned: frozenset[int] = frozenset()
        if not self._tokens_to_learn:
            self._pin()

    @classmethod
    def for_cache(cls, geometry: Geometry, capacity: int, known: Known, options: Any) -> Static:
        return cls(capacity, known.popularity, options)

    def _pin(self) -> None:
        ranked = sorted(self._count, key=lambda e: (-self._count[e], e))
        self._pinned = frozenset(ranked[: self._num_pinned])

    def used(self, experts: Sequence[int], num_tokens: Sequence[int], batch_tokens: int) -> None:
        super().used(experts, num_tokens, batch_tokens)
        if self._tokens_to_learn > 0:
            for expert, num in zip(experts, num_tokens, strict=True):
                self._count[expert] = self._count.get(expert, 0) + num
            self._tokens_to_learn -= batch_tokens
            if self._tokens_to_learn <= 0:
                self._pin()

    def victims(self, protected: Container[int]) -> Iterator[int]:
        if self._tokens_to_learn > 0:
            return iter(sorted(super().victims(protected), key=lambda e: (self._count.get(e, 0), e)))
        return (e for e in super().victims(protected) if e not in self._pinned)
