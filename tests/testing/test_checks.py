"""The checks find what breaks a promise; what keeps them all passes (tests/policies runs them on ours)."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from expertly.core.messages import Prediction
from expertly.policies.lru import LRU
from expertly.policies.prediction import Predictor, RankingPredictor
from expertly.testing import check_eviction, check_predictor


class Forgetful(LRU):
    def removed(self, expert: int) -> None:
        """Still named."""


class Unprotecting(LRU):
    def victims(self, protected: Container[int]) -> Iterator[int]:
        return iter(list(self._order))


class Padded(LRU):
    def used(self, experts, num_tokens, batch_tokens) -> None:
        super().used(experts, [num + 1 for num in num_tokens], batch_tokens)


class Swayed(LRU):
    def victims(self, protected: Container[int]) -> Iterator[int]:
        result = list(super().victims(protected))
        return iter(result[::-1] if protected else result)


_DICE = Random(0)


class Unrepeatable(LRU):
    def victims(self, protected: Container[int]) -> Iterator[int]:
        result = list(super().victims(protected))
        _DICE.shuffle(result)
        return iter(result)


@pytest.mark.parametrize(
    ("policy", "promise"),
    [
        (Forgetful, "what is kept is named once each"),
        (Unprotecting, "what is protected is no victim"),
        (Padded, "an expert that served no token was not used"),
        (Swayed, "victims come in one order, whatever is protected"),
        (Unrepeatable, "no token was not used|saw the same the victims are the same"),
    ],
)
def test_an_eviction_policy_that_breaks_a_promise_is_told_which(policy: type[LRU], promise: str) -> None:
    with pytest.raises(AssertionError, match=promise):
        check_eviction(policy)


class Index(RankingPredictor):
    """Names all experts of a layer by their numbers, so many layers ahead."""

    name = "index"
    gives_probabilities = False

    def begin_iteration(self, began):
        return [self._prediction(layer, layer + 1) for layer in range(min(self._distance, len(self._layers)))]

    def router_ran(self, routed):
        layer = routed.layer + self._distance
        return [self._prediction(layer, self._distance)] if layer < len(self._layers) else []

    def _prediction(self, layer: int, distance: int) -> Prediction:
        num_experts = self._layers[layer].num_experts
        experts = list(range(num_experts))
        return Prediction(layer, experts, [1 / (distance + expert / num_experts) for expert in experts], distance)


class Wrong(Index):
    """Its predictions are changed by a function."""

    change = staticmethod(lambda value: value)

    def begin_iteration(self, began):
        return ()

    def router_ran(self, routed):
        return [self.change(each) for each in super().router_ran(routed)]


def wrong(change, gives_probabilities: bool = False) -> type[Predictor]:
    said = {"change": staticmethod(change), "gives_probabilities": gives_probabilities}
    return type("WrongInItsWay", (Wrong,), said)


NONE = [  # of one that gives no probabilities
    (lambda value: replace(value, layer=(value.layer + 1) % 6), "a layer is `distance` ahead"),
    (lambda value: replace(value, distance=0), "a distance is from 1 to"),
    (lambda value: replace(value, experts=[*value.experts[:-1], 0]), "experts are named once, each with a score"),
    (lambda value: replace(value, experts=[*value.experts[:-1], 99]), "experts are of the layer"),
    (lambda value: replace(value, experts=[np.int64(e) for e in value.experts]), "experts are Python's ints"),
    (lambda value: replace(value, scores=value.scores[::-1]), "scores fall"),
    (lambda value: replace(value, scores=[np.float32(s) for s in value.scores]), "scores are Python's floats"),
    (lambda value: replace(value, probabilities=[0.1] * 12), "one that gives no probabilities gives none"),
    (lambda value: replace(value, scores=[s + _DICE.random() for s in sorted(value.scores)][::-1]), "scores|the same"),
]
GIVEN = [
    (lambda value: value, "one that gives probabilities gives them with each prediction"),
    (lambda value: replace(value, probabilities=[0.5]), "probabilities are of every expert"),
    (lambda value: replace(value, probabilities=[2.0] * 12), "probabilities are from 0 to 1"),
    (lambda value: replace(value, probabilities=[0.01] * 12), "at most the expert's probability"),
    (lambda value: replace(value, probabilities=[1.0] * 12), "the probability times one factor"),
]


@pytest.mark.parametrize(
    ("gives_probabilities", "change", "promise"), [*((False, *row) for row in NONE), *((True, *row) for row in GIVEN)]
)
def test_a_predictor_that_breaks_a_promise_is_told_which(gives_probabilities: bool, change, promise: str) -> None:
    with pytest.raises(AssertionError, match=promise):
        check_predictor(wrong(change, gives_probabilities), distances=(1, 2))


class Silent(Predictor):
    gives_probabilities = False

    def __init__(self, geometry, distance, options, known):
        super().__init__()

    def router_ran(self, routed):
        return ()


class Trusting(Index):
    def router_ran(self, routed):
        assert routed.experts.shape
        return super().router_ran(routed)


@pytest.mark.parametrize(
    ("predictor", "error", "promise"),
    [(Silent, AssertionError, "something is predicted"), (Trusting, AttributeError, "NoneType")],
)
def test_one_that_says_nothing_or_trusts_in_all_being_shown_is_found(predictor, error, promise: str) -> None:
    with pytest.raises(error, match=promise):
        check_predictor(predictor, distances=(1,))


def test_what_keeps_its_promises_passes() -> None:
    check_predictor(Index, distances=(1, 3))
