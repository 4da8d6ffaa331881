"""Models, futures and forward passes made up for checks; and an assertion that `python -O` does not leave out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from random import Random

import numpy as np

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Began, Floats, Routed, Want
from expertly.policies.known import NEVER, Known
from expertly.policies.prediction import Predictor


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


SHAPE = small_model(layers=6, experts=12, top_k=3)

HIDDEN_SIZE = 16
"""Numbers of an embedding and of a router input."""

MakeKnown = Callable[[Geometry, ListFuture, int], Known]
"""(model, the demands to come, seed) -> what a predictor may be told."""


def future_and_seed(shape: Geometry, future: ListFuture, seed: int) -> Known:
    return Known(future=future, seed=seed)


class MadeUp:
    """What a forward pass would show: of the demands what they say, of what they do not say anything at all. The rows
    are of requests that last for four iterations each, and of a dozen token ids, of which some are unknown.
    """

    def __init__(self, shape: Geometry, wants: Collection[Want], num_rows: int, seed: int) -> None:
        self._shape, self._wants, self._num_rows = shape, wants, num_rows
        self._dice = np.random.default_rng(seed)
        self._token_dice = np.random.default_rng(seed)

    def began(self, iteration: int) -> Began:
        embedding = token_ids = None
        if "embedding" in self._wants:
            embedding = self._dice.standard_normal((self._num_rows, HIDDEN_SIZE), np.float32)
        if "token_ids" in self._wants:
            token_ids = self._token_dice.integers(-1, 12, self._num_rows, np.int32)
        requests = np.arange(self._num_rows, dtype=np.int64) + iteration // 4 * self._num_rows
        is_prefill = np.full(self._num_rows, iteration % 4 == 0)
        return Began(requests, is_prefill, embedding, token_ids=token_ids)

    def routed(self, layer: int, experts: list[int]) -> Routed:
        """The first row chose `experts`, and scores say so; the others chose any."""
        one, dice, num_rows, wants = self._shape.layers[layer], self._dice, self._num_rows, self._wants
        chosen = np.stack([dice.permutation(one.num_experts)[: one.top_k] for _ in range(num_rows)])
        chosen[0] = experts
        scores = _made_up(dice, num_rows, one.num_experts)
        np.put_along_axis(scores, chosen, np.take_along_axis(scores, chosen, 1) + 1, 1)
        scores /= scores.sum(axis=1, keepdims=True)
        union = list(dict.fromkeys(chosen.ravel().tolist()))
        return Routed(
            RouterRan(layer, union, [1] * len(union), [True] * len(union), num_rows),
            chosen if "experts" in wants else None,
            scores if "scores" in wants else None,
            _made_up(dice, num_rows, 4, one.num_experts) if "lookahead" in wants else None,
            dice.standard_normal((num_rows, HIDDEN_SIZE), np.float32) if "inputs" in wants else None,
        )


def watched(
    policy: type[Predictor],
    distance: int,
    *,
    known: MakeKnown = future_and_seed,
    iterations: int = 40,
    seed: int = 0,
    shape: Geometry = SHAPE,
    num_rows: int = 1,
) -> tuple[ListFuture, list[tuple[int, Prediction]]]:
    """The future, and every prediction with the step at which it was made (-1: before the first)."""
    future = some_future(shape, iterations)
    predictor = policy.make(shape, known(shape, future, seed), distance)
    shown = MadeUp(shape, predictor.wants, num_rows, seed)
    made: list[tuple[int, Prediction]] = []
    for step, (layer, experts) in enumerate(future.demands):
        if layer == 0:
            began = shown.began(step // shape.num_layers)
            made += [(step - 1, prediction) for prediction in predictor.begin_iteration(began)]
        future.step = step
        made += [(step, prediction) for prediction in predictor.router_ran(shown.routed(layer, experts))]
        if layer == shape.num_layers - 1:
            predictor.end_iteration(True)
    return future, made


def _made_up(dice: np.random.Generator, *shape: int) -> Floats:
    """Scores that sum to 1 over the last axis."""
    scores: Floats = dice.random(shape, np.float32) ** 4
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores
