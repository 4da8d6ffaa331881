"""Futures for policies that need one: any at all, or that of a list of demands."""

from __future__ import annotations

from collections.abc import Sequence

from expertly.core.geometry import Geometry
from expertly.policies.known import NEVER, Known


class AnyFuture:
    """Expert e is needed again after (7 e) mod 11 steps."""

    step = 0

    def next_use(self, expert: int) -> int:
        return self.step + 1 + 7 * expert % 11

    def needs(self, ahead: int) -> tuple[int, list[int]] | None:
        return None


KNOWN = Known(future=AnyFuture())


class ListFuture:
    """The demands of a run: of each step the layer and its experts, by their number in it. Who runs it sets `step`."""

    def __init__(self, shape: Geometry, demands: Sequence[tuple[int, list[int]]]) -> None:
        self.demands = demands
        self.step = 0
        self._uses: dict[int, list[int]] = {}
        for step, (layer, experts) in enumerate(demands):
            for expert in experts:
                self._uses.setdefault(shape.expert_id(layer, expert), []).append(step)

    def next_use(self, expert: int) -> int:
        uses = self._uses[expert]
        assert self.step in uses, "asked only of what the running step needs"
        return next((step for step in uses if step > self.step), NEVER)

    def needs(self, ahead: int) -> tuple[int, list[int]] | None:
        step = self.step + ahead
        return self.demands[step] if step < len(self.demands) else None
