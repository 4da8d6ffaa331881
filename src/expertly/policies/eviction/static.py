"""A fixed set of the most popular experts stays; the rest of the cache is a small LRU."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from expertly.policies.eviction.lru import LRU


class Static:
    """Popularity is a profile (tokens served by each expert), or what the first `profile_tokens` tokens show.

    The most popular `capacity - num_spare` experts are pinned once they are kept; the `num_spare` others are
    replaced least recently used first. While popularity is still being learned nothing is pinned, the least
    popular goes first. `capacity` counts experts.
    """

    def __init__(
        self,
        capacity: int,
        profile: Mapping[int, int] | None = None,
        num_spare: int = 2,
        profile_tokens: int = 256,
    ) -> None:
        self._num_pinned = max(0, capacity - num_spare)
        self._lru = LRU()
        self._count: dict[int, int] = dict(profile or {})
        self._tokens_to_learn = 0 if profile else profile_tokens
        self._pinned: frozenset[int] = frozenset()
        if not self._tokens_to_learn:
            self._freeze()

    def _freeze(self) -> None:
        ranked = sorted(self._count, key=lambda e: (-self._count[e], e))
        self._pinned = frozenset(ranked[: self._num_pinned])

    def admitted(self, expert: int) -> None:
        self._lru.admitted(expert)

    def removed(self, expert: int) -> None:
        self._lru.removed(expert)

    def used(self, experts: Sequence[int], num_tokens: Sequence[int], batch_tokens: int) -> None:
        self._lru.used(experts, num_tokens, batch_tokens)
        if self._tokens_to_learn > 0:
            for expert, num in zip(experts, num_tokens, strict=True):
                self._count[expert] = self._count.get(expert, 0) + num
            self._tokens_to_learn -= batch_tokens
            if self._tokens_to_learn <= 0:
                self._freeze()

    def predicted(self, first_expert: int, probabilities: Sequence[float]) -> None:
        """Nothing is learned."""

    def expected(self, outlook: Sequence[float]) -> None:
        """Nothing is learned."""

    def victims(self, protected: Container[int]) -> Iterator[int]:
        if self._tokens_to_learn > 0:
            kept = sorted(self._lru.victims(protected), key=lambda e: (self._count.get(e, 0), e))
            return iter(kept)
        return (e for e in self._lru.victims(protected) if e not in self._pinned)
