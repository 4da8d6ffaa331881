"""What predictors of several machines learn goes to the others, once, and in the middle of a pass, too."""

from __future__ import annotations

import numpy as np
import pytest

from expertly.core.errors import StoreError
from expertly.core.messages import RouterRan
from expertly.core.observation import Began, History, Routed
from expertly.engine.learned import LearnedExchange
from expertly.policies.predictor.fmoe import FMoE, FMoEOptions
from tests.policies.predictor.naive import random_scores, top
from tests.scheduler.drive import geometry

LAYERS, EXPERTS, TOP_K, HIDDEN = 4, 8, 2, 6
SHAPE = geometry(layers=LAYERS, experts=EXPERTS, top_k=TOP_K)


def history(seed: int, num_rows: int) -> History:
    dice = np.random.default_rng(seed)
    scores = random_scores(dice, num_rows, LAYERS, EXPERTS)
    requests = np.arange(1000 * seed, 1000 * seed + num_rows)
    embedding = dice.standard_normal((num_rows, HIDDEN), np.float32)
    return History(requests, np.zeros(num_rows, np.bool_), top(scores, TOP_K), scores, embedding)


def learned(seed: int, num_rows: int = 5, capacity: int = 100) -> FMoE:
    predictor = FMoE(SHAPE, 2, FMoEOptions(capacity=capacity))
    predictor.learn(history(seed, num_rows))
    return predictor


def pass_on(exchanges: dict[str, LearnedExchange]) -> int:
    """What has been told goes to all others, who take it; how many told something."""
    told = {name: arrays for name, one in exchanges.items() if (arrays := one.take()) is not None}
    for name, exchange in exchanges.items():
        for other, arrays in told.items():
            if other != name:
                exchange.give(other, arrays)
        exchange.exchange()
    return len(told)


def test_all_come_to_know_the_same_and_then_there_is_nothing_to_tell() -> None:
    predictors = {name: learned(seed) for seed, name in enumerate("abc", 1)}
    exchanges = {name: LearnedExchange(one) for name, one in predictors.items()}
    for one in exchanges.values():
        one.exchange()
    assert pass_on(exchanges) == 3
    known = [one.learned.digests() for one in predictors.values()]
    assert [len(one) for one in known] == [15, 15, 15]
    assert known[0] == known[1] == known[2]
    assert [one.num_taken for one in exchanges.values()] == [10, 10, 10]
    pass_on(exchanges)  # they have learned from each other, which each of them tells, and nobody takes
    assert pass_on(exchanges) == 0
    assert [one.num_taken for one in exchanges.values()] == [10, 10, 10]


def test_what_has_been_displaced_does_not_come_back() -> None:
    mine, other = learned(1, 5, capacity=5), learned(2, 5, capacity=5)
    exchanges = {"mine": LearnedExchange(mine), "other": LearnedExchange(other)}
    for one in exchanges.values():
        one.exchange()
    for _ in range(6):
        told = pass_on(exchanges)
    assert told == 0
    assert exchanges["mine"].num_taken == exchanges["other"].num_taken == 5


def begin(predictor: FMoE, rows: History) -> None:
    assert rows.embedding is not None
    began = Began(rows.requests, np.zeros(len(rows.requests), np.bool_), rows.embedding, None)
    list(predictor.begin_iteration(began))


def go_on(predictor: FMoE, rows: History, layers: range) -> list[int]:
    found = []
    for layer in layers:
        router = RouterRan(layer, [0], [1], [True], len(rows.requests))
        found += predictor.router_ran(Routed(router, rows.experts[:, layer], rows.scores[:, layer]))
    return [one.layer for one in found]


def test_in_the_middle_of_a_pass_nothing_goes_wrong() -> None:
    """What the pass has found is of a store that had fewer maps."""
    predictor, other = learned(1), learned(2, 30)
    exchange, rows = LearnedExchange(predictor), history(3, 2)
    begin(predictor, rows)
    go_on(predictor, rows, range(2))
    exchange.give("other", {name: array.copy() for name, array in other.learned.state().items()})
    exchange.exchange()
    assert predictor.learned.num_maps == 35
    go_on(predictor, rows, range(2, LAYERS))
    predictor.end_iteration(True)
    assert predictor.learned.num_maps == 35, "the pass was left out"
    begin(predictor, rows)
    assert go_on(predictor, rows, range(LAYERS)) == [2, 3]
    predictor.end_iteration(True)
    assert predictor.learned.num_maps == 37


def test_another_models_maps_are_refused_where_they_are_given() -> None:
    exchange = LearnedExchange(learned(1))
    other = FMoE(geometry(layers=2, experts=4, top_k=1), 1).learned
    with pytest.raises(StoreError):
        exchange.give("other", other.state())
    exchange.exchange()
    assert exchange.num_taken == 0
