"""What every allocation promises, and that the dynamic program finds what no other division beats."""

from __future__ import annotations

import random
import time
from itertools import product

import numpy as np
import pytest

from expertly.core.errors import BudgetError, ConfigError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import RouterRan
from expertly.policies.allocation import ALLOCATIONS
from expertly.policies.allocation.adapmoe import AdapMoE, StackDistances, Usage, cheapest_quotas
from expertly.policies.allocation.uniform import Uniform, equal_quotas
from expertly.policies.eviction.simple import LRU
from expertly.policies.known import Known
from expertly.scheduler.budget import allocate, check_quotas, split_budget
from tests.scheduler.drive import geometry, one_token

SMALL, LARGE = LayerGeometry(5, 2, 4, 16, 3, 2), LayerGeometry(8, 3, 4, 32, 3, 2)
SHAPES = [geometry(4, 8, 2), geometry(3, 8, 2, 4), Geometry((SMALL, LARGE, LARGE, SMALL), 2)]


def some_usage(shape: Geometry, seed: int = 0) -> Usage:
    dice = np.random.default_rng(seed)
    misses = [np.sort(dice.integers(0, 1000, layer.num_experts + 1))[::-1].copy() for layer in shape.layers]
    return Usage(tuple(misses), tuple(dice.random(shape.num_layers).tolist()), "a made-up training part")


@pytest.mark.parametrize("name", ALLOCATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=["whole", "segments", "classes"])
@pytest.mark.parametrize("usage", [False, True])
class TestConformance:
    """A new allocation inherits these by being in ALLOCATIONS."""

    def test_shares_are_what_there_is_of_each_size_at_every_budget(
        self, name: str, shape: Geometry, usage: bool
    ) -> None:
        known = Known(given=(some_usage(shape) if usage else None,))
        least = split_budget(shape, shape.nbytes).kept_slots
        for percent in range(30, 101, 5):
            before = split_budget(shape, shape.nbytes * percent // 100)
            after = allocate(shape, before, ALLOCATIONS[name].make(shape, known))
            assert after.pool_slots() == before.pool_slots() and after.memory_nbytes == before.memory_nbytes
            assert list(after.kept_slots) == check_quotas(shape, after.layer_quotas)
            assert after.kept_slots == (before.kept_slots if ALLOCATIONS[name].keeps else (0,) * len(least))
            assert allocate(shape, after, ALLOCATIONS[name].make(shape, known)) == after, "it is divided once"

    def test_new_shares_have_the_sums_of_the_old(self, name: str, shape: Geometry, usage: bool) -> None:
        allocation = ALLOCATIONS[name].make(shape, Known(given=(some_usage(shape) if usage else None,)))
        if not allocation.is_online or allocation.is_configured:  # which changes shares when it is told to
            return
        budget, dice = allocate(shape, split_budget(shape, shape.nbytes * 8 // 10), allocation), random.Random(0)
        allocation.begin(budget.layer_quotas)
        said = []
        for _ in range(900):
            for layer, one in enumerate(shape.layers):
                few = one.top_k if layer < 2 else one.num_experts
                shares = allocation.ran(one_token(layer, dice.sample(range(few), one.top_k)), lambda layer: layer / 10)
                if shares is not None:
                    said.append(check_quotas(shape, shares))
        assert said and all(one == list(budget.kept_slots) for one in said)


def test_none_makes_every_slot_one_for_staging() -> None:
    shape = SHAPES[1]
    for share in (0.3, 1.0):
        before = split_budget(shape, int(shape.nbytes * share))
        budget = allocate(shape, before, ALLOCATIONS["none"].make(shape))
        assert budget.staging_slots == tuple(before.pool_slots()) and budget.layer_quotas == (0, 0, 0)


def narrow(widths: list[int], experts: list[int]) -> Geometry:
    pairs = zip(widths, experts, strict=True)
    return Geometry(tuple(LayerGeometry(num, 1, 4, width, 3, 2) for width, num in pairs), 2)


@pytest.mark.parametrize(
    ("widths", "experts", "slots", "shares"),
    [
        ([8] * 4, [6] * 4, [22], [6, 6, 5, 5]),  # the remainder goes to the lowest layers
        ([8] * 4, [6] * 4, [2], [1, 1, 0, 0]),
        ([8, 8], [6, 6], [1000], [12, 12]),  # no layer gets more than its experts fill
        ([8, 8, 8], [8, 2, 8], [20], [8, 4, 8]),
        ([8, 8, 8], [8, 2, 8], [21], [9, 4, 8]),
        ([8, 16, 8], [4, 4, 4], [6, 5], [3, 5, 3]),  # size classes do not share
    ],
)
def test_equal_quotas(widths: list[int], experts: list[int], slots: list[int], shares: list[int]) -> None:
    shape = narrow(widths, experts)
    assert equal_quotas(shape, slots) == shares
    for wrong in ([*slots, 1], [-1] * len(slots)):
        with pytest.raises(BudgetError, match="kept_segments="):
            equal_quotas(shape, wrong)


class Wrong(Uniform):
    def __init__(self, shape: Geometry, wrong: list[int]) -> None:
        super().__init__(shape)
        self.wrong = wrong

    def quotas(self, kept_slots: object) -> list[int]:
        return self.wrong


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([1, 1, 1], "3 quotas; must be one for each of 4 layers"),
        ([0, 9, 0, 0], r"quota=9 of layer 1: must be from 0 to its 8 segments"),
        ([0, 0, -1, 0], r"quota=-1 of layer 2"),
        ([8, 8, 8, 8], r"keeps \[32\] segments of each size; accepted: at most \(14,\)"),
    ],
)
def test_quotas_that_cannot_be_are_refused(wrong: list[int], message: str) -> None:
    shape = SHAPES[0]
    with pytest.raises(ConfigError, match=message):
        allocate(shape, split_budget(shape, shape.nbytes // 2), Wrong(shape, wrong))


def test_a_policy_with_the_older_name_of_quotas_is_told_the_new_one() -> None:
    with pytest.raises(ConfigError, match="'Old': its method `shares` is called `quotas` now"):
        type("Old", (Uniform,), {"shares": lambda self, kept_slots: []})


# -- the optimum ---------------------------------------------------------------------------------------------------


def brute_force(costs: list[np.ndarray], num_experts: int) -> list[int]:
    """Of all divisions: cheapest, then most even, then most for the lowest layers."""
    every = (one for one in product(*(range(len(cost)) for cost in costs)) if sum(one) == num_experts)
    return list(
        min(
            every,
            key=lambda one: (
                sum(float(cost[num]) for cost, num in zip(costs, one, strict=True)),
                sum(num * num for num in one),
                [-num for num in one],
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
        for size, (cache, here) in enumerate(zip(caches, kept, strict=True)):
            misses[size] += len(set(experts) - here)
            for expert in experts:
                if expert not in here:
                    cache.admitted(expert)
                    here.add(expert)
            cache.used(experts, [num for num, _ in demand], 1)
            while len(here) > size:
                gone = next(iter(cache.victims(())))
                cache.removed(gone)
                here.remove(gone)
    assert seen.misses().tolist() == misses


def skewed(dice: random.Random, shape: Geometry, wide: set[int]) -> list[RouterRan]:
    """One token: `wide` layers choose among all experts, the others among their first."""
    return [
        one_token(layer, dice.sample(range(one.num_experts if layer in wide else one.top_k), one.top_k))
        for layer, one in enumerate(shape.layers)
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
