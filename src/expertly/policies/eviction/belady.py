"""What is used again last goes first (Belady, 1966): the bound on what any demand-only policy can load."""

from __future__ import annotations

from collections.abc import Sequence

from expertly.core.errors import ConfigError
from expertly.core.messages import RouterRan
from expertly.policies.eviction.base import ScoredPolicy
from expertly.policies.known import NEVER, Future


class Belady(ScoredPolicy):
    """Needs the future, which only a simulation has. Optimal together with the admission `best`: after a layer has run,
    what is kept of (kept + needed) is what is used again soonest.
    """

    def __init__(self, future: Future | None) -> None:
        super().__init__()
        if future is None:
            raise ConfigError("eviction 'belady': needs to know the demands to come; only a simulation does")
        self._future = future
        self._next_use: dict[int, int] = {}

    def needed(self, experts: Sequence[int], router: RouterRan) -> None:
        """The running layer needs these: their next use is the one after it."""
        for expert in experts:
            self._next_use[expert] = self._future.next_use(expert)
        self.rescore(experts)

    def used(self, experts: Sequence[int], num_tokens: Sequence[int], batch_tokens: int) -> None:
        """Nothing is learned."""

    def score(self, expert: int) -> float:
        return -self._next_use.get(expert, NEVER)
