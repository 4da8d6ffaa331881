"""What is wanted next, beside a naive list of all that is wanted."""

from __future__ import annotations

import random

import pytest
from expertly.scheduler.speculation import Speculation

from expertly.core.messages import Prediction
from expertly.policies.prefetch import PREFETCHES
from expertly.scheduler.counters import PhaseCounters
from tests.scheduler.drive import geometry

LAYERS, EXPERTS = 5, 8
SHAPE = geometry(LAYERS, EXPERTS, 2)


class Naive:
    """Every wanted expert, looked through for each question."""

    def __init__(self, prefetch: str) -> None:
        self.priority = PREFETCHES[prefetch].make().priority
        self.now = -1
        self.wanted: list[tuple[float, int, int, int]] = []  # (score, arrival, layer, expert id)
        self.arrivals = 0

    def predict(self, layer: int, experts: list[int], scores: list[float]) -> None:
        self.void(layer)
        for expert, score in zip(experts, scores, strict=True):
            self.wanted.append((score, self.arrivals, layer, SHAPE.expert_id(layer, expert)))
            self.arrivals += 1

    def void(self, layer: int) -> None:
        self.wanted = [one for one in self.wanted if one[2] != layer]

    def first(self) -> tuple[float, int, int, int] | None:
        def rank(one: tuple[float, int, int, int]) -> tuple[float, int]:
            score, arrival, layer, _ = one
            to_go = layer + 1 if self.now < 0 else (layer - self.now) % LAYERS or LAYERS
            return (-self.priority(score, to_go), arrival)

        return min(self.wanted, key=rank, default=None)


@pytest.mark.parametrize("prefetch", PREFETCHES)
@pytest.mark.parametrize("seed", range(6))
def test_what_is_next_is_what_looking_through_everything_finds(prefetch: str, seed: int) -> None:
    dice = random.Random(seed)
    speculation, naive = Speculation(SHAPE, 4, PREFETCHES[prefetch].make()), Naive(prefetch)
    asked = 0
    for _ in range(4000):
        action = dice.random()
        if action < 0.15:
            layer = dice.randrange(LAYERS)
            experts = dice.sample(range(EXPERTS), dice.randint(0, EXPERTS))
            scores = [dice.choice([0.1, 0.25, 0.5, dice.random()]) for _ in experts]  # ties, and in any order
            speculation.predict(Prediction(layer, experts, scores, 1), 2)
            naive.predict(layer, experts, scores)
        elif action < 0.3:
            naive.now = speculation.now = dice.randrange(LAYERS)
            speculation.settle(naive.now, [0], [False] * EXPERTS, PhaseCounters())
            naive.void(naive.now)
        elif action < 0.31:
            speculation.clear()
            naive.wanted, naive.now = [], -1
        else:
            first = naive.first()
            assert speculation.next() == (None if first is None else first[3])
            asked += first is not None
            if first is not None and dice.random() < 0.6:
                speculation.taken()
                naive.wanted.remove(first)
    assert asked > 300


def said(layer: int, *scored: tuple[int, float]) -> Prediction:
    return Prediction(layer, [expert for expert, _ in scored], [score for _, score in scored], 1)


def all_of(speculation: Speculation) -> list[tuple[int, int]]:
    """(layer, expert) in the order in which they would be loaded."""
    order = []
    while (eid := speculation.next()) is not None:
        layer = SHAPE.layer_of_expert(eid)
        order.append((layer, eid - SHAPE.first_expert_id(layer)))
        speculation.taken()
    return order


def test_by_proximity_a_near_guess_goes_before_a_surer_far_one() -> None:
    """Before any router: the layers are 1, 2 and 3 ahead. 0.6, 0.1; 0.8, 0.7 halved; 0.9 thirded."""
    speculation = Speculation(SHAPE, 4, PREFETCHES["proximity"].make())
    for prediction in (said(0, (5, 0.6), (1, 0.1)), said(1, (2, 0.8), (3, 0.7)), said(2, (4, 0.9))):
        speculation.predict(prediction, 2)
    assert all_of(speculation) == [(0, 5), (1, 2), (1, 3), (2, 4), (0, 1)]


def test_priorities_move_as_layers_run() -> None:
    """At layer 0, 0.5 one layer ahead beats 0.9 two ahead; when the wrong layer has run the other is one ahead."""
    speculation = Speculation(SHAPE, 4, PREFETCHES["proximity"].make())
    speculation.predict(said(1, (0, 0.5)), 2)
    speculation.predict(said(2, (7, 0.9)), 2)
    speculation.now = 0
    assert speculation.next() == SHAPE.expert_id(1, 0)
    speculation.now = 1
    speculation.settle(1, [3], [False] * EXPERTS, PhaseCounters())
    speculation.predict(said(3, (0, 0.99)), 2)
    assert speculation.next() == SHAPE.expert_id(2, 7)
    speculation.now = 4  # two layers did not run: 2 comes again in three layers, 3 in four
    assert all_of(speculation) == [(2, 7), (3, 0)]


def test_by_score_nothing_moves() -> None:
    speculation = Speculation(SHAPE, 4)
    speculation.predict(said(1, (0, 0.5)), 2)
    speculation.predict(said(3, (7, 0.9)), 2)
    for now in range(3):
        speculation.now = now
        assert speculation.next() == SHAPE.expert_id(3, 7)
