"""Routing with planted behaviour, the rates it has, and small models to configure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TypeVar

import numpy as np

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.policies.moepic import LayerProblem, LayerRates, LayerStatistics, Steps, Timing

T = TypeVar("T")


def shape_of(layers: int, experts: int = 6, top_k: int = 2, segments: int = 4, width: int = 16) -> Geometry:
    return Geometry(tuple(LayerGeometry(experts, top_k, 4, width, 3, 2) for _ in range(layers)), segments)


def routing(seed: int, tokens: int, experts: int, top_k: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Needed experts [T, K], Zipf and in part those of the token before, and predicted scores [T, E] with noise."""
    dice = np.random.default_rng(seed)
    popularity = -dice.uniform(0.3, 1.5) * np.log(1.0 + dice.permutation(experts))
    own, needed, predicted = dice.gumbel(size=experts), [], []
    for _ in range(tokens):
        own = np.where(dice.random(experts) < 0.3, dice.gumbel(size=experts), own)
        logits = popularity + own
        needed.append(np.argsort(-logits, kind="stable")[:top_k])
        scores = np.exp(logits + noise * dice.standard_normal(experts))
        predicted.append((scores / scores.sum()).astype(np.float32))
    return np.array(needed), np.array(predicted)


def learn(layer: LayerStatistics, needed: np.ndarray, predicted: np.ndarray) -> None:
    """Tokens that came one after another; of rows of NaN nothing was predicted."""
    for experts, scores in zip(needed.tolist(), predicted, strict=True):
        layer.note(experts, None if np.isnan(scores).all() else np.argsort(-scores, kind="stable").tolist())


def finished(steps: Steps[T]) -> T:
    """What the work ends with."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


@cache
def gathered(seed: int, experts: int = 6, top_k: int = 2, tokens: int = 150) -> LayerRates:
    layer = LayerStatistics(experts)
    learn(layer, *routing(seed, tokens, experts, top_k, [0.0, 0.3, 1.0, 2.0, 5.0][seed % 5]))
    return layer.rates()


def random_model(seed: int) -> tuple[Geometry, int, list[LayerProblem], Timing]:
    """Three small layers, the segments to keep, the problems of splitting and the times; an expert loads in 100 us."""
    dice = np.random.default_rng(seed)
    experts, segments, top_k = int(dice.integers(4, 7)), int(dice.choice([1, 2, 4])), int(dice.integers(1, 3))
    shape = shape_of(3, experts, top_k, segments)
    rates = [gathered(100 * seed + int(dice.integers(100)), experts, top_k) for _ in range(3)]
    attention_ns, moe_ns, head_ns = (int(100_000 * dice.uniform(0.1, 1.0)) for _ in range(3))
    kept = int(dice.integers(3, 3 * experts * segments // 2 + 1))
    timing = Timing.of(shape, attention_ns, moe_ns, 100_000, head_ns)
    return shape, kept, problems_of(shape, rates, timing), timing


def problems_of(shape: Geometry, rates: Sequence[LayerRates], timing: Timing) -> list[LayerProblem]:
    return [
        LayerProblem(rate, layer, timing, shape.segments_per_expert, pieces=False) for layer, rate in enumerate(rates)
    ]


def allocations(layers: int, total: int, most: int) -> Iterator[tuple[int, ...]]:
    """All budgets from 1 to `most` segments a layer that sum to at most `total`."""
    if not layers:
        yield ()
        return
    for first in range(1, min(most, total - layers + 1) + 1):
        for rest in allocations(layers - 1, total - first, most):
            yield (first, *rest)
