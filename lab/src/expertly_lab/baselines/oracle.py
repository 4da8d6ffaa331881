"""Eviction and prediction from the demands to come, which only a simulation has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Routed
from expertly.policies.eviction import ScoredPolicy
from expertly.policies.known import Known
from expertly.policies.prediction import Predictor

NEVER = 1 << 62
"""The step of a next use that does not come."""


class Belady(ScoredPolicy):
    """Evicts the expert that is used again last (Belady, 1966). Needs the future, which only a simulation has. Optimal
    with the admission `best`: after a layer has run, the cache holds those of the kept and needed experts that are used
    again soonest.
    """

    name = "belady"
    needs_future = True
    needs_best = True

    def __init__(self, future: Any) -> None:
        super().__init__()
        self._future = future
        self._next_use: dict[int, int] = {}

    @classmethod
    def for_cache(cls, geometry: Geometry, capacity: int, known: Known, options: Any) -> Belady:
        return cls(future_of(known, "eviction 'belady'"))

    def needed(self, experts: Sequence[int], router: RouterRan) -> None:
        for expert in experts:
            self._next_use[expert] = self._future.next_use(expert)  # after the running layer
        self.rescore(experts)

    def score(self, expert: int) -> float:
        return -self._next_use.get(expert, NEVER)


class Perfect(Predictor):
    """Names what each of the next `distance` layers needs, the next layer first, across iterations."""

    name = "perfect"
    needs = ("future",)
    gives_probabilities = False

    def __init__(self, geometry: Geometry, distance: int, options: Any, known: Known) -> None:
        self._future = future_of(known, "prediction 'perfect'")
        self._reach = min(distance, geometry.num_layers - 1)  # one demand a layer
        self._said = -1  # the last step named

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        now = self._future.step
        for step in range(max(self._said, now) + 1, now + self._reach + 1):
            needs = self._future.needs(step - now)
            if needs is None:
                return
            layer, experts = needs
            self._said = step
            yield Prediction(layer, experts, [-float(step)] * len(experts), step - now)


def future_of(known: Known, name: str) -> Any:
    if known.future is None:
        raise ConfigError(f"{name}: needs to know the demands to come; only a simulation does")
    return known.future
