"""Prefetching, as stories: who gets the place; and the queue beside a naive list."""

from __future__ import annotations

import random
from itertools import islice, product

import pytest

from expertly.core.messages import Plan, Prediction, RouterRan
from expertly.policies.fmoe import FMoEEviction
from expertly.policies.lru import LRU
from expertly.scheduler.budget import Budget
from expertly.scheduler.counters import PhaseCounters
from expertly.scheduler.prefetch import PRIORITIES, PrefetchQueue
from expertly.scheduler.scheduler import Scheduler
from tests.scheduler.drive import geometry, kept_experts, made, one_token, prediction, run
from tests.tables import seeds


def test_what_was_prefetched_into_staging_slots_is_kept_when_it_is_needed() -> None:
    control = made(geometry(layers=1, experts=8, top_k=2), [2], 2, ahead="staging")
    run(control, one_token(0, [0, 1]))
    control.predict(prediction(0, [5]))
    (span,) = control.prefetch()
    assert kept_experts(control) == {0, 1}, "a prefetch evicts nothing"
    control.loaded(span)
    assert run(control, one_token(0, [5])).loads == []
    assert kept_experts(control) == {1, 5}, "the use does"


def test_what_is_predicted_and_there_is_not_evicted_for_what_is_less_likely() -> None:
    control = made(geometry(layers=2, experts=8, top_k=1), [2, 2], 1)
    run(control, one_token(1, [0]))
    run(control, one_token(1, [1]))
    control.predict(prediction(1, [1, 0, 5]))
    assert control.prefetch() == [] and kept_experts(control) == {8, 9}


def test_no_more_units_are_prefetched_at_a_time_than_a_token_needs() -> None:
    """Experts have two; of 0 one is there: it is brought alone, as 5 would make three."""
    control = made(geometry(layers=2, experts=8, top_k=1, segments=2), [0, 3], 8, ahead="staging")
    for expert in (0, 1):
        run(control, one_token(1, [expert]))
    control.predict(prediction(1, [0, 5, 6]))
    (span,) = control.prefetch()
    assert (span.expert, span.segment) == (0, 1)
    control.loaded(span)
    assert [span.expert for span in control.prefetch()] == [5, 5]


def test_nothing_is_prefetched_while_a_load_waits_for_a_slot() -> None:
    """Two staging slots for three experts that nothing keeps: the freed one is the third's. Then 5 evicts."""
    control = made(geometry(layers=2, experts=8, top_k=3), [0, 2], 2)
    run(control, one_token(1, [0, 1]))
    control.predict(prediction(1, [5]))
    plan = control.begin_layer(one_token(0, [0, 1, 2]))
    assert [span.expert for span in plan.loads] == [0, 1] and control.prefetch() == []
    control.loaded(plan.loads[0])
    assert [span.expert for span in control.computed(plan.loads[:1])] == [2]
    assert [span.expert for span in control.prefetch()] == [5]


def test_a_prefetch_that_is_taken_back_was_not_loaded() -> None:
    shape = geometry(layers=2, experts=8, top_k=1)
    control = made(shape, [2, 2], 1)
    control.predict(prediction(1, [5]))
    control.begin_layer(one_token(1, [0]), control.prefetch())
    decode = control.counters[1].decode
    assert (decode.prefetched_nbytes, decode.loaded_nbytes) == (0, shape.unit_nbytes[1])


def test_what_a_prompt_has_no_room_for_is_prefetched_when_decode_may_evict() -> None:
    control = made(geometry(layers=2, experts=8, top_k=1), [0, 2], 1)
    for router in (one_token(1, [0]), one_token(1, [1]), one_token(0, [3], decode=False)):
        run(control, router)
    control.predict(prediction(1, [5]))
    assert control.prefetch() == [] and kept_experts(control) == {8, 9}
    run(control, one_token(0, [3]))
    assert [span.expert for span in control.prefetch()] == [5] and kept_experts(control) == {9, 13}


def test_predicted_probabilities_decide_what_is_evicted() -> None:
    """One cache of four over two layers; the second map of layer 0 makes 1 likelier than 0; the third says nothing."""
    shape, budget = geometry(layers=2, experts=4, top_k=2), Budget(0, (2,), (4,), (2, 2))
    control = Scheduler(shape, budget, lambda capacity, layers: FMoEEviction(shape), scope="global")
    run(control, one_token(0, [0, 1]))
    run(control, one_token(1, [0, 1]))
    control.predict(Prediction(0, [], [], 1, [0.15, 0.05, 0.8, 0.0]))
    control.predict(Prediction(1, [], [], 1, [0.6, 0.1, 0.3, 0.0]))
    control.predict(Prediction(0, [], [], 1, [0.05, 0.15, 0.8, 0.0]))
    control.predict(Prediction(0, [2], [0.8], 2))
    assert [(span.layer, span.expert) for span in control.prefetch()] == [(0, 2)]
    assert kept_experts(control) == {1, 2, 4, 5}, "0 went: 0.05"


def test_a_layer_that_nobody_chose_an_expert_in() -> None:
    assert run(made(geometry(), [2, 2], 2), RouterRan(0, [], [], [], 0)) == Plan()


def test_the_surer_never_comes_later_and_proximity_is_the_papers_formula() -> None:
    """p / (l - l_now) (fMoE, section 4.5)."""
    for priority, layers_to_go in product(PRIORITIES.values(), (1, 2, 7)):
        priorities = [priority(score, layers_to_go) for score in (0.0, 0.1, 0.5, 0.9, 1.0)]
        assert priorities == sorted(priorities)
    assert PRIORITIES["proximity"](0.6, 3) == pytest.approx(0.2)


# -- the queue -----------------------------------------------------------------------------------------------------

LAYERS, EXPERTS = 5, 8
SHAPE = geometry(LAYERS, EXPERTS, 2)


def queue_of(prefetch: str) -> PrefetchQueue:
    """Of a scheduler with nothing in flight."""
    budget = Budget(0, (2,), (2 * LAYERS,), (2,) * LAYERS)
    return Scheduler(SHAPE, budget, lambda capacity, layers: LRU(), prefetch=prefetch).queue


class Naive:
    """Every queued expert, looked through for each question."""

    def __init__(self, prefetch: str) -> None:
        self.priority = PRIORITIES[prefetch]
        self.now = LAYERS - 1
        self.queued: list[tuple[float, int, int, int]] = []  # (score, arrival, layer, expert id)
        self.arrivals = 0

    def predict(self, layer: int, experts: list[int], scores: list[float]) -> None:
        self.void(layer)
        for expert, score in zip(experts, scores, strict=True):
            self.queued.append((score, self.arrivals, layer, SHAPE.expert_id(layer, expert)))
            self.arrivals += 1

    def void(self, layer: int) -> None:
        self.queued = [each for each in self.queued if each[2] != layer]

    def first(self) -> tuple[float, int, int, int] | None:
        def rank(value: tuple[float, int, int, int]) -> tuple[float, int]:
            score, arrival, layer, _ = value
            to_go = (layer - self.now) % LAYERS or LAYERS
            return (-self.priority(score, to_go), arrival)

        return min(self.queued, key=rank, default=None)


@pytest.mark.parametrize("prefetch", PRIORITIES)
@pytest.mark.parametrize("seed", seeds(2, 6))
def test_the_queue_agrees_with_a_scan_of_everything_predicted(prefetch: str, seed: int) -> None:
    dice = random.Random(seed)
    queue, naive = queue_of(prefetch), Naive(prefetch)
    asked = 0
    for _ in range(4000):
        action = dice.random()
        if action < 0.15:
            layer = dice.randrange(LAYERS)
            experts = dice.sample(range(EXPERTS), dice.randint(0, EXPERTS))
            scores = [dice.choice([0.1, 0.25, 0.5, dice.random()]) for _ in experts]  # ties
            scores.sort(reverse=True)
            queue.predict(Prediction(layer, experts, scores, 1))
            naive.predict(layer, experts, scores)
        elif action < 0.3:
            naive.now = queue.now = dice.randrange(LAYERS)
            queue.router_ran(one_token(naive.now, [0]), PhaseCounters(), lambda eid: False)
            naive.void(naive.now)
        elif action < 0.31:
            queue.clear()
            naive.queued, naive.now = [], LAYERS - 1
        else:
            first, rest = naive.first(), queue.by_urgency()
            assert [head[:2] for head in islice(rest, 1)] == ([] if first is None else [first[2:]])
            asked += first is not None
            if first is not None and dice.random() < 0.6:
                next(rest, None)  # takes it
                naive.queued.remove(first)
    assert asked > 300
