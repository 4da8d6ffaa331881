"""The demands to come, of a run that is made up."""

from __future__ import annotations

from expertly.core.geometry import Geometry
from expertly.policies.known import Known
from expertly.testing.made_up import Demands
from expertly_lab.baselines.oracle import NEVER
from tests.weights import random_weights


class ListFuture:
    """A `Future` over demands; who runs them sets their step."""

    def __init__(self, shape: Geometry, demands: Demands) -> None:
        self._demands = demands
        self._uses: dict[int, list[int]] = {}
        for step, (layer, experts) in enumerate(demands.steps):
            for expert in experts:
                self._uses.setdefault(shape.expert_id(layer, expert), []).append(step)

    @property
    def step(self) -> int:
        return self._demands.step

    def next_use(self, expert: int) -> int:
        uses = self._uses[expert]
        assert self.step in uses, "asked only of what the running step needs"
        return next((step for step in uses if step > self.step), NEVER)

    def needs(self, ahead: int) -> tuple[int, list[int]] | None:
        step = self.step + ahead
        return self._demands.steps[step] if step < len(self._demands.steps) else None


class AnyFuture:
    """Expert e is needed again after (7 e) mod 11 steps."""

    step = 0

    def next_use(self, expert: int) -> int:
        return 1 + 7 * expert % 11


def known(shape: Geometry, demands: Demands, seed: int = 0) -> Known:
    """All that a predictor may ask for."""
    return Known(future=ListFuture(shape, demands), seed=seed, items=(random_weights(shape.layers, seed=seed),))
