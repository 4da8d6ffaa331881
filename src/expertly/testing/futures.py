"""Models and futures made up for checks; and an assertion that `python -O` does not leave out."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.policies.known import NEVER, Known


def expect(is_so: bool, promise: str, found: object = None) -> None:
    """Raise AssertionError with the promise that is not kept, and what was found instead."""
    if not is_so:
        raise AssertionError(promise if found is None else f"{promise}; found {found!r:.200}")


def small_model(layers: int, experts: int, top_k: int) -> Geometry:
    """A model whose experts take 384 bytes each."""
    return Geometry((LayerGeometry(experts, top_k, 4, 16, 3, 2),) * layers)


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


def some_future(shape: Geometry, iterations: int, seed: int = 0) -> ListFuture:
    """Every layer of every iteration needs any K of its experts."""
    dice = Random(seed)
    return ListFuture(
        shape,
        [
            (layer, dice.sample(range(one.num_experts), one.top_k))
            for _ in range(iterations)
            for layer, one in enumerate(shape.layers)
        ],
    )
