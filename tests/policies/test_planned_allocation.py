"""Allocations that begin with a plan: what layers keep, what is left to the ring, what may be kept later."""

from __future__ import annotations

import numpy as np
import pytest

from expertly.core.messages import RouterRan
from expertly.policies.allocation import ALLOCATIONS
from expertly.policies.allocation.moepic import LayerSplit, SplitPlan, Timing
from expertly.policies.known import Known
from expertly.scheduler.budget import split_budget
from expertly.scheduler.presets import get_system
from tests.policies.moepic.builders import shape_of

GEOMETRY = shape_of(3)
PLAN = SplitPlan(GEOMETRY, (LayerSplit(2, 3, 7), LayerSplit(0, 0, 0), LayerSplit(3, 4, 12)))
KNOWN = Known(plan=PLAN)
PLANNED = ("split", "moepic")


def test_these_take_one() -> None:
    assert tuple(name for name, one in ALLOCATIONS.items() if one.takes_plan) == PLANNED
    assert [name for name in PLANNED if get_system(f"lru:allocation={name}").takes_plan] == list(PLANNED)


@pytest.mark.parametrize("name", PLANNED)
def test_layers_keep_what_it_says(name: str) -> None:
    allocation = ALLOCATIONS[name].make(GEOMETRY, KNOWN)
    shares = allocation.shares([40])
    assert shares == [7, 0, 12]
    assert allocation.tops(shares) == [3, 4, 4], "of an expert that a layer without any would keep, all"


@pytest.mark.parametrize("name", PLANNED)
def test_the_rest_is_the_rings_until_another_plan_keeps_it(name: str) -> None:
    budget = split_budget(GEOMETRY, GEOMETRY.nbytes // 2)
    system = get_system(f"lru:allocation={name}")
    given = system.budget(GEOMETRY, budget, KNOWN)
    assert (given.kept_slots, given.ring_slots) == (budget.kept_slots, budget.ring_slots) == ((28,), (8,))
    scheduler = system.scheduler(GEOMETRY, given, KNOWN)
    assert scheduler.cache.quotas == [6, 0, 12] and scheduler.cache.staging == [36 - 18]
    if name == "split":
        return  # it keeps to its plan
    scheduler.configure(SplitPlan(GEOMETRY, (LayerSplit(4, 2, 8), LayerSplit(2, 4, 8), LayerSplit(3, 4, 12))))
    assert scheduler.cache.quotas == [8, 8, 12] and scheduler.cache.staging == [8], "all 28 that the memory keeps"


def test_it_is_configured_anew_after_tau_tokens_within_the_plans_memory() -> None:
    allocation = ALLOCATIONS["moepic"].make(GEOMETRY, KNOWN, {"tau": "5"})
    allocation.begin(allocation.shares([40]))
    dice = np.random.default_rng(0)
    for token in range(5):
        assert allocation.due() is None, token
        for layer in range(3):
            experts = dice.choice(6, 2, replace=False).tolist()
            allocation.ran(RouterRan(layer, experts, [1, 1], [True, True], 1), lambda layer: 0.0)
    job = allocation.due()
    assert job is not None
    plan = job(Timing.of(GEOMETRY, 100, 100, 1000, 100)).plan
    assert sum(layer.budget_segments for layer in plan.layers) == 7 + 12, "what its splits left, too"
