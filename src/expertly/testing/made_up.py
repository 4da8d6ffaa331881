"""Models and forward passes made up for checks; and an assertion that `python -O` does not leave out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from random import Random

import numpy as np

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Began, Floats, Routed, Want
from expertly.policies.known import Known
from expertly.policies.prediction import Predictor


def expect(is_so: bool, promise: str, instead: object = None) -> None:
    """Raise AssertionError with the promise that is not kept, and what there is instead."""
    if not is_so:
        raise AssertionError(promise if instead is None else f"{promise}; found {instead!r:.200}")


def small_model(layers: int, experts: int, top_k: int) -> Geometry:
    """A model whose experts take 384 bytes each."""
    return Geometry((LayerGeometry(experts, top_k, 4, 16, 3, 2),) * layers)


SHAPE = small_model(layers=6, experts=12, top_k=3)
HIDDEN_SIZE = 16
"""Numbers of an embedding and of a router input."""


@dataclass
class Demands:
    """A run: of each step the layer and its experts, by their number in it. Who runs it sets `step`."""

    steps: list[tuple[int, list[int]]]
    step: int = 0


def some_demands(shape: Geometry, iterations: int, seed: int = 0) -> Demands:
    """Every layer of every iteration needs any K of its experts."""
    dice, layers = Random(seed), list(enumerate(shape.layers)) * iterations
    return Demands([(number, dice.sample(range(layer.num_experts), layer.top_k)) for number, layer in layers])


MakeKnown = Callable[[Geometry, Demands, int], Known]
"""(model, the run, seed) -> what a predictor may be told."""


def seed_alone(shape: Geometry, demands: Demands, seed: int) -> Known:
    return Known(seed=seed)


class MadeUp:
    """What a forward pass would show: of the demands what they say, of what they do not say anything at all. The rows
    are of requests that last for four iterations each, and of a dozen token ids, of which some are unknown.
    """

    def __init__(self, shape: Geometry, wants: Collection[Want], num_rows: int, seed: int) -> None:
        self._shape, self._wants, self._num_rows = shape, wants, num_rows
        self._dice = np.random.default_rng(seed)
        self._token_dice = np.random.default_rng(seed)

    def began(self, iteration: int) -> Began:
        num_rows, wants = self._num_rows, self._wants
        return Began(
            np.arange(num_rows, dtype=np.int64) + iteration // 4 * num_rows,
            np.full(num_rows, iteration % 4 == 0),
            self._dice.standard_normal((num_rows, HIDDEN_SIZE), np.float32) if "embedding" in wants else None,
            token_ids=self._token_dice.integers(-1, 12, num_rows, np.int32) if "token_ids" in wants else None,
        )

    def routed(self, layer: int, experts: list[int]) -> Routed:
        """The first row chose `experts`, and scores say so; the others chose any."""
        shape, dice, num_rows, wants = self._shape.layers[layer], self._dice, self._num_rows, self._wants
        chosen = np.stack([dice.permutation(shape.num_experts)[: shape.top_k] for _ in range(num_rows)])
        chosen[0] = experts
        scores = _shares(dice, num_rows, shape.num_experts)
        np.put_along_axis(scores, chosen, np.take_along_axis(scores, chosen, 1) + 1, 1)
        scores /= scores.sum(axis=1, keepdims=True)
        union = list(dict.fromkeys(chosen.ravel().tolist()))
        return Routed(
            RouterRan(layer, union, [1] * len(union), [True] * len(union), num_rows),
            chosen if "experts" in wants else None,
            scores if "scores" in wants else None,
            _shares(dice, num_rows, 4, shape.num_experts) if "lookahead" in wants else None,
            dice.standard_normal((num_rows, HIDDEN_SIZE), np.float32) if "inputs" in wants else None,
        )


def _shares(dice: np.random.Generator, *shape: int) -> Floats:
    """Scores that sum to 1 over the last axis."""
    scores: Floats = dice.random(shape, np.float32) ** 4
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def watched(
    policy: type[Predictor],
    distance: int,
    *,
    known: MakeKnown = seed_alone,
    iterations: int = 40,
    seed: int = 0,
    shape: Geometry = SHAPE,
    num_rows: int = 1,
) -> tuple[Demands, list[tuple[int, Prediction]]]:
    """The run, and every prediction with the step at which it was made (-1: before the first)."""
    demands = some_demands(shape, iterations)
    predictor = policy.make(shape, known(shape, demands, seed), distance)
    shown = MadeUp(shape, predictor.wants, num_rows, seed)
    made: list[tuple[int, Prediction]] = []
    for step, (layer, experts) in enumerate(demands.steps):
        if layer == 0:
            made += [(step - 1, said) for said in predictor.begin_iteration(shown.began(step // shape.num_layers))]
        demands.step = step
        made += [(step, said) for said in predictor.router_ran(shown.routed(layer, experts))]
        if layer == shape.num_layers - 1:
            predictor.end_iteration(True)
    return demands, made
