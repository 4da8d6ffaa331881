"""Other authors' allocations: that AdapMoE's dynamic program finds what no other division beats, and what it learns."""

from __future__ import annotations

import random
import time
from itertools import product

import numpy as np
import pytest

from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan
from expertly.policies.known import Known
from expertly.policies.lru import LRU
from expertly.policies.registry import ALLOCATIONS
from expertly.scheduler.budget import allocate, check_quotas, split_budget
from expertly_lab.baselines.adapmoe import AdapMoE, StackDistances, Usage, cheapest_quotas
from tests.policies.test_allocation import SHAPES
from tests.scheduler.drive import geometry, one_token


def some_usage(shape: Geometry, seed: int = 0) -> Usage:
    dice = np.random.default_rng(seed)
    misses = [np.sort(dice.integers(0, 1000, layer.num_experts + 1))[::-1].copy() for layer in shape.layers]
    return Usage(tuple(misses), tuple(dice.random(shape.num_layers).tolist()), "a made-up training part")


@pytest.mark.parametrize("shape", SHAPES, ids=["whole", "segments", "classes"])
def test_adapmoe_shares_by_usage_what_there_is_of_each_size(shape: Geometry) -> None:
    for percent in range(30, 101, 5):
        before = split_budget(shape, shape.nbytes * percent // 100)
        allocation = ALLOCATIONS["adapmoe"].make(shape, Known(items=(some_usage(shape),)))
        after = allocate(shape, before, allocation)
        assert after.pool_slots() == before.pool_slots() and after.memory_nbytes == before.memory_nbytes
        assert list(after.kept_slots) == check_quotas(shape, after.layer_quotas)


def test_none_makes_every_slot_one_for_staging() -> None:
    shape = SHAPES[1]
    for share in (0.3, 1.0):
        before = split_budget(shape, int(shape.nbytes * share))
        budget = allocate(shape, before, ALLOCATIONS["none"].make(shape))
        assert budget.staging_slots == tuple(before.pool_slots()) and budget.layer_quotas == (0, 0, 0)


# -- the optimum ---------------------------------------------------------------------------------------------------


def brute_force(costs: list[np.ndarray], num_experts: int) -> list[int]:
    """Of all divisions: cheapest, then most even, then most for the lowest layers."""
    every = (each for each in product(*(range(len(cost)) for cost in costs)) if sum(each) == num_experts)
    return list(
        min(
            every,
            key=lambda value: (
                sum(float(cost[num]) for cost, num in zip(costs, value, strict=True)),
                sum(num * num for num in value),
                [-num for num in value],
            ),
        )
    )


@pytest.mark.parametrize("kind", ["falling", "any", "tied", "fractions"])
def test_no_division_is_cheaper_than_the_dynamic_programs(kind: str) -> None:
    dice = np.random.default_rng(1)
    for _ in range(80):
        sizes = dice.integers(1, 6, dice.integers(1, 5))
        highest = 3 if kind == "tied" else 50
        costs = [dice.integers(0, highest, size + 1).astype(np.float64) for size in sizes]
        if kind != "any":
            costs = [np.sort(cost)[::-1] for cost in costs]
        if kind == "fractions":
            costs = [cost * (1 - int(dice.integers(0, 8)) / 8) for cost in costs]
        num_experts = int(dice.integers(0, sizes.sum() + 1))
        assert cheapest_quotas(costs, num_experts) == brute_force(costs, num_experts)
    assert cheapest_quotas([np.zeros(9)] * 5, 23) == [5, 5, 5, 4, 4], "ties are equal shares"


def test_a_large_model_takes_less_than_a_second_and_huge_counts_do_not_overflow() -> None:
    costs = [np.linspace(10**12 + layer, 0, 257) for layer in range(61)]
    start = time.process_time()
    shares = cheapest_quotas(costs, 61 * 128)
    assert time.process_time() - start < 1.0
    assert sum(shares) == 61 * 128


# -- what is counted -----------------------------------------------------------------------------------------------


def test_stack_distances_are_the_misses_of_every_size() -> None:
    """Against a cache of each size that holds what was used last; the running pass is looked up before it counts."""
    dice = random.Random(0)
    seen, misses = StackDistances(8), [0] * 9
    caches = [LRU() for _ in range(9)]
    kept: list[set[int]] = [set() for _ in range(9)]
    for _ in range(300):
        demand = [(dice.choice([1, 1, 3]), expert) for expert in dice.sample(range(8), dice.choice([1, 2, 2, 5]))]
        seen.add(demand)
        experts = [expert for _, expert in demand]
        for size, (cache, present) in enumerate(zip(caches, kept, strict=True)):
            misses[size] += len(set(experts) - present)
            for expert in experts:
                if expert not in present:
                    cache.admitted(expert)
                    present.add(expert)
            cache.used(experts, [num for num, _ in demand], 1)
            while len(present) > size:
                gone = next(iter(cache.victims(())))
                cache.removed(gone)
                present.remove(gone)
    assert seen.misses().tolist() == misses


def skewed(dice: random.Random, shape: Geometry, wide: set[int]) -> list[RouterRan]:
    """One token: `wide` layers choose among all experts, the others among their first."""
    return [
        one_token(layer, dice.sample(range(each.num_experts if layer in wide else each.top_k), each.top_k))
        for layer, each in enumerate(shape.layers)
    ]


def test_it_learns_online_and_moves_again_only_for_a_gain() -> None:
    shape, dice = geometry(4, 16, 2), random.Random(0)
    allocation = AdapMoE(shape)
    allocation.begin([4, 4, 4, 4])
    said: list[tuple[int, list[int]]] = []
    for token in range(1024):
        for demand in skewed(dice, shape, {1}):
            shares = allocation.ran(demand, lambda layer: 0.0)
            if shares is not None:
                said.append((token, shares))
    assert said[0] == (255, [2, 10, 2, 2]), "from the first 256 tokens: 2 are enough where 2 are ever used"
    assert len(said) == 1, "more of the same is not worth moving for"
    for token in range(3 * 1024):
        for demand in skewed(dice, shape, {2}):
            shares = allocation.ran(demand, lambda layer: 0.0)
            if shares is not None:
                said.append((token, shares))
    assert len(said) > 1 and said[-1][1][2] > 4, "another layer became the one that misses"
    facts = allocation.facts()
    assert facts["moves"] == len(said) and facts["learned"] == "online, from 4096 decoded tokens"


def test_prompts_teach_nothing() -> None:
    shape = geometry(2, 8, 2)
    allocation = AdapMoE(shape)
    allocation.begin([3, 3])
    for _ in range(600):
        for layer in range(2):
            assert allocation.ran(RouterRan(layer, [0, 1], [9, 9], [False, False], 18), lambda layer: 0.0) is None
    for _ in range(255):
        for layer in range(2):
            mixed = RouterRan(layer, [0, 1], [50, 1], [False, True], 51)
            assert allocation.ran(mixed, lambda layer: 0.0) is None, "a pass that serves a prompt, too, counts as one"
    assert allocation.facts()["learned"] == "online, from 255 decoded tokens"
