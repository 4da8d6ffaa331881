"""Random demands, predictions, links, quotas, splits and failures under a scheduler that is checked at every step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Prediction, RouterRan, Span
from expertly.core.observation import Began, Routed
from expertly.policies.allocation import Allocation
from expertly.policies.moepic import Configuration, LayerSplit, MoEpic
from expertly.policies.prediction import Predictor
from expertly.policies.registry import EVICTIONS
from expertly.scheduler.budget import check_quotas, split_budget
from expertly.scheduler.loop import Prefetcher, run_layer
from expertly.scheduler.scheduler import Scheduler
from tests.scheduler.checked import CheckedScheduler, waiting
from tests.scheduler.decisions import Decision, record, replay

SMALL, LARGE = LayerGeometry(5, 2, 4, 16, 3, 2), LayerGeometry(8, 3, 4, 32, 3, 2)
LAYERS = (SMALL, LARGE, LARGE, SMALL)
BUDGETS = [(0.1, 1), (0.4, None), (0.5, 3), (0.6, None), (0.9, None), (1.0, None)]
"""(share of the experts, staging slots)"""


class Failure(Exception):
    """What a driver's transport or arithmetic may raise."""


class RandomLink:
    """A Transport. Loads begin before prefetches; what has begun arrives in any order, `chance` a poll."""

    def __init__(self, dice: random.Random, chance: float = 0.4) -> None:
        self.dice, self.chance = dice, chance
        self.demands: list[Span] = []
        self.ahead: list[Span] = []
        self.begun: list[Span] = []
        self.num_waits = 0
        self.submitted: list[Span] = []
        self.cancelled: list[Span] = []
        self.fails: Callable[[], bool] = lambda: False

    def submit(self, spans: Sequence[Span]) -> None:
        self.submitted += spans
        self.demands += spans

    def prefetch(self, spans: Sequence[Span]) -> None:
        assert all(span.num_segments == 1 for span in spans), "a load never waits for more than a segment"
        self.submitted += spans
        self.ahead += spans

    def cancel(self, layer: int) -> list[Span]:
        gone = [each for each in self.ahead if each.layer == layer]
        self.ahead = [span for span in self.ahead if span not in gone]
        self.cancelled += gone
        return gone

    def poll(self) -> Span | None:
        self._may_fail()
        while (self.demands or self.ahead) and self.dice.random() < self.chance:
            self._begin()
        return self._arrive() if self.begun and self.dice.random() < self.chance else None

    def wait(self) -> Span:
        self._may_fail()
        self.num_waits += 1
        while not self.begun or ((self.demands or self.ahead) and self.dice.random() < self.chance):
            self._begin()
        return self._arrive()

    def drop(self) -> None:
        """Nothing is in flight any more."""
        self.demands, self.ahead, self.begun = [], [], []

    def moved_nbytes(self, shape: Geometry) -> int:
        """Bytes that were submitted and not cancelled."""
        signs = ((1, self.submitted), (-1, self.cancelled))
        return sum(sign * one.num_segments * shape.unit_nbytes[one.layer] for sign, spans in signs for one in spans)

    def _begin(self) -> None:
        assert self.demands or self.ahead, "waiting for what nobody brings"
        self.begun.append((self.demands or self.ahead).pop(0))

    def _arrive(self) -> Span:
        return self.begun.pop(self.dice.randrange(len(self.begun)))

    def _may_fail(self) -> None:
        if self.fails():
            raise Failure


class InstantLink(RandomLink):
    """Everything arrives at once."""

    def __init__(self) -> None:
        super().__init__(random.Random(0), 1.0)


def nothing_seen() -> Began:
    return Began(np.zeros(1, np.int64), np.zeros(1, np.bool_))


def random_router(dice: random.Random, layer: int, value: LayerGeometry, kind: str) -> RouterRan:
    num = value.top_k if kind == "token" else dice.randint(0 if kind == "mixed" else 1, value.num_experts)
    experts = dice.sample(range(value.num_experts), num)
    if kind == "token":
        return RouterRan(layer, experts, [1] * num, [True] * num, 1)
    tokens = [dice.choice([0, 1, 1, 2, 9]) for _ in experts]
    is_decode = [dice.random() < {"prefill": 0.0, "mixed": 0.5}[kind] for _ in experts]
    return RouterRan(layer, experts, tokens, is_decode, max(tokens, default=0))


def random_routers(dice: random.Random, num_iterations: int) -> list[RouterRan]:
    kinds = [dice.choice(["token", "token", "token", "prefill", "mixed"]) for _ in range(num_iterations)]
    return [random_router(dice, layer, each, kind) for kind in kinds for layer, each in enumerate(LAYERS)]


class RandomPredictor(Predictor):
    """Predictions right, wrong or both, of any layer at all, the running one and the one just named included."""

    def __init__(self, dice: random.Random, shape: Geometry, routers: list[RouterRan]) -> None:
        super().__init__()
        self.dice, self.shape, self.routers = dice, shape, routers
        self.step = 0

    def begin_iteration(self, began: Began) -> Iterator[Prediction]:
        return self._random()

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        return self._random()

    def _random(self) -> Iterator[Prediction]:
        dice = self.dice
        for _ in range(dice.choice([0, 1, 1, 2, 4])):
            distance = dice.choice([1, 1, 1, 2, 3, self.shape.num_layers])
            step = min(self.step + distance, len(self.routers) - 1)
            layer = self.routers[step].layer
            rest = list(range(self.shape.layers[layer].num_experts))
            dice.shuffle(rest)
            right = self.routers[step].experts
            experts = {
                "right": right,
                "wrong": [e for e in rest if e not in right],
                "mixed": rest[: dice.randint(0, len(rest))],
            }[dice.choice(["right", "right", "wrong", "mixed"])]
            scores = sorted([dice.random() for _ in experts], reverse=True)
            probabilities = None
            if dice.random() < 0.5:
                probabilities = [dice.random() for _ in range(self.shape.layers[layer].num_experts)]
            yield Prediction(layer, list(experts), scores, distance, probabilities)


class RandomQuotas(Allocation):
    """Any quotas at all, every few layers, with the sums there are."""

    is_online = True

    def __init__(self, shape: Geometry, dice: random.Random) -> None:
        self.shape, self.dice = shape, dice
        self.said: list[list[int]] = []

    def quotas(self, kept_slots: Sequence[int]) -> list[int]:
        raise AssertionError("it is given the quotas that it begins with")

    def begin(self, shares: Sequence[int]) -> None:
        self.now = list(shares)

    def ran(self, demand: RouterRan, recall: Callable[[int], float]) -> list[int] | None:
        assert all(0 <= recall(layer) <= 1 for layer in range(self.shape.num_layers))
        if self.dice.random() < 0.6:
            return None
        now, dice = self.now, self.dice
        for _ in range(4):
            layer = dice.randrange(len(now))
            rest = [each for each, c in enumerate(self.shape.size_classes) if c == self.shape.size_classes[layer]]
            other = dice.choice(rest)
            most = self.shape.layers[other].num_experts * self.shape.segments_per_expert
            num = dice.randint(0, min(now[layer], most - now[other])) if layer != other else 0
            now[layer] -= num
            now[other] += num
        self.said.append(list(now))
        return list(now)


class RandomSplits(MoEpic):
    """Any splits that fit what is kept, every few layers: parts of many, few whole ones, nothing."""

    def __init__(self, shape: Geometry, dice: random.Random) -> None:
        super().__init__(shape)
        self.dice = dice

    def ran(self, router: RouterRan, recall: Callable[[int], float]) -> list[int] | None:
        super().ran(router, recall)
        return self._take(self._any_configuration()) if self.dice.random() < 0.3 else None

    def _any_configuration(self) -> Configuration:
        shape, left, dice = self.geometry, list(self._kept_slots), self.dice
        budgets, splits = [0] * shape.num_layers, [LayerSplit(0, 0, 0.0, 0.0)] * shape.num_layers
        for layer in dice.sample(range(shape.num_layers), shape.num_layers):
            size_class, each = shape.size_classes[layer], shape.layers[layer]
            top = dice.randint(1, shape.segments_per_expert)
            num = dice.randint(0, min(each.num_experts, left[size_class] // top))
            most = min(left[size_class], each.num_experts * shape.segments_per_expert)
            quota = dice.choice([num * top, most])
            left[size_class] -= quota
            budgets[layer], splits[layer] = quota, LayerSplit(num, top if num else 0, 0.0, 0.0)
        return Configuration(tuple(budgets), tuple(splits))


@dataclass
class Soaked:
    """A soak to its end: what happened on the way is counted."""

    control: CheckedScheduler
    link: RandomLink
    happened: Counter[str]


def soak(
    seed: str,
    segments: int,
    share: float,
    staging: int | None = None,
    *,
    eviction: str = "lru",
    prefetch: str = "score",
    allocation: Callable[[Geometry, random.Random], Allocation] | None = None,
    failures: float = 0.0,
    window: int | None = None,
    num_iterations: int = 7,
    admission: str = "always",
    **way: Any,
) -> Soaked:
    """Run random layers under a CheckedScheduler, then make every decision again from what was told. `way`:
    what the Scheduler takes.
    """
    dice = random.Random(seed)
    shape = Geometry(LAYERS, segments)
    routers = random_routers(dice, num_iterations)
    budget, decisions = split_budget(shape, int(shape.nbytes * share), staging), list[Decision]()

    def make(kind: type[Scheduler]) -> Any:
        return kind(
            shape,
            budget,
            lambda capacity, layers: EVICTIONS[eviction].make(shape, capacity),
            prefetch=prefetch,
            admission=admission,
            allocation=allocation and allocation(shape, random.Random(seed)),
            **way,
        )

    control: CheckedScheduler = make(CheckedScheduler)
    if window is not None:
        control.queue.window = window * segments
    recorded = record(control, decisions.append)
    link, predictor, happened = (
        RandomLink(dice, dice.choice([0.1, 0.4, 0.8])),
        RandomPredictor(dice, shape, routers),
        control.happened,
    )
    prefetcher = Prefetcher(recorded, link, predictor)
    link.fails = lambda: dice.random() < failures

    def compute(spans: Sequence[Span]) -> None:
        if dice.random() < failures:
            raise Failure

    for step, router in enumerate(routers):
        predictor.step = step
        before = link.num_waits
        try:
            if router.layer == 0:
                prefetcher.begin_iteration(nothing_seen)
            run_layer(
                recorded, link, router, compute, prefetcher, partial(Routed, router), together=dice.random() < 0.3
            )
            if router.layer == len(LAYERS) - 1:
                prefetcher.end_iteration(True)
        except Failure:
            link.drop()
            recorded.abandon()
        assert link.num_waits - before <= 200, "a layer ends"
        control.check()
        _note(control, happened)
    happened["cancelled"] += len(link.cancelled)
    control.counts_agree()
    if not failures:
        phases = [phase for counter in control.counters for phase in (counter.decode, counter.prefill)]
        assert link.moved_nbytes(shape) == sum(phase.loaded_nbytes for phase in phases)
    again: Scheduler = make(Scheduler)
    again.queue.window = control.queue.window
    assert decisions and replay(decisions, again) is None
    for each, other in zip(control.counters, again.counters, strict=True):
        assert each.decode == other.decode and each.prefill == other.prefill
    assert again.cache.quotas == control.cache.quotas and again.cache.tops == control.cache.tops
    return Soaked(control, link, happened)


def _note(control: CheckedScheduler, happened: Counter[str]) -> None:
    """What is the case between two layers."""
    cache, shape = control.cache, control.geometry
    if len(cache.distinct_partitions()) == len(cache.partitions):
        used = check_quotas(shape, cache.quotas)
        assert all(num <= most for num, most in zip(used, control.budget.kept_slots, strict=True))
    if isinstance(control.allocation, RandomQuotas) and control.allocation.said:
        assert (cache.targets or cache.quotas) == control.allocation.said[-1]
    happened["on the way" if cache.targets else "there"] += 1
    happened["in flight"] += bool(cache.prefetching)
    happened["tops"] += any(0 < top < shape.segments_per_expert for top in cache.tops)
    happened["staged"] += any(
        slot >= 0 and not cache.kept[unit] and unit // cache.num_parts in waiting(control)
        for unit, slot in enumerate(cache.slot)
    )
