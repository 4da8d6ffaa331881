"""Belady's replacement is the bound it is said to be."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.policies.known import Known
from expertly.scheduler.budget import Budget, split_budget
from expertly.scheduler.counters import PhaseCounters
from expertly.scheduler.loop import Prefetcher
from expertly.scheduler.loop import run_layer as loop_layer
from expertly.scheduler.scheduler import Scheduler
from expertly.scheduler.systems import SYSTEMS, runnable_systems
from expertly.testing.made_up import Demands
from lab.tests.baselines.futures import ListFuture
from tests.scheduler.drive import geometry, one_token, routed, run_layer
from tests.scheduler.soak import InstantLink, RandomLink


def least_loads(demands: list[frozenset[int]], capacities: dict[int, int], of_cache: dict[int, int]) -> int:
    """Items loaded over `demands`, each served in turn from what is kept, by trying everything.

    After a demand any of (kept + demanded) may be kept, as many as `capacities` of each item's cache (`of_cache`).
    """
    total = 0
    for cache, capacity in capacities.items():
        items = {item for item, c in of_cache.items() if c == cache}
        costs: dict[frozenset[int], int] = {frozenset(): 0}
        for demand in demands:
            mine = demand & items
            following: dict[frozenset[int], int] = {}
            for kept, cost in costs.items():
                paid = cost + len(mine - kept)
                pool = sorted(kept | mine)
                for after in combinations(pool, min(capacity, len(pool))):
                    key = frozenset(after)
                    following[key] = min(paid, following.get(key, paid))
            costs = following
        total += min(costs.values())
    return total


def with_shares(shape: Geometry, shares: list[int], staging: int) -> Budget:
    slots = sum(shares) + staging
    return Budget(slots * shape.unit_nbytes[0], (staging,), (sum(shares),), tuple(shares))


def played(control: Scheduler, demands: Demands, decode: bool = True) -> int:
    """Segments loaded over all demands."""
    loaded = 0
    for step, (layer, experts) in enumerate(demands.steps):
        demands.step = step
        ran = run_layer(control, layer, experts, decode=decode)
        loaded += sum(len(parts) for parts in ran.loaded.values())
    control.check()
    return loaded


def some_demands(dice: random.Random, layers: int, experts: int, iterations: int, most: int) -> Demands:
    """Skewed, so that tokens share experts; sets of 1 to `most`."""
    demands = Demands([])
    for _ in range(iterations):
        for layer in range(layers):
            pool = dice.sample(range(experts), dice.randint(2, experts)) if dice.random() < 0.5 else range(experts)
            demands.steps.append((layer, dice.sample(list(pool), min(len(pool), dice.randint(1, most)))))
    return demands


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize(
    ("segments", "models", "runs"),
    [(1, [(1, 5, 2), (2, 4, 2), (2, 3, 1), (1, 6, 3), (3, 3, 2)], 60), (2, [(1, 4, 2), (1, 3, 1), (2, 2, 1)], 30)],
)
def test_it_loads_the_least_that_is_possible(
    scope: str, segments: int, models: list[tuple[int, int, int]], runs: int
) -> None:
    """Of segments, each of which may be kept without the others of its expert."""
    system = SYSTEMS["belady" if scope == "layer" else "belady-global"]
    dice = random.Random(scope)
    for _ in range(runs):
        layers, experts, top_k = dice.choice(models)
        shape = geometry(layers, experts, top_k, segments=segments)
        run = some_demands(dice, layers, experts, 18 // layers // segments, top_k)
        shares = [dice.randint(0, segments * experts) for _ in range(layers)]
        control = system.scheduler(
            shape, with_shares(shape, shares, segments * top_k), Known(future=ListFuture(shape, run))
        )
        demands = [
            frozenset(segments * shape.expert_id(layer, e) + s for e in chosen for s in range(segments))
            for layer, chosen in run.steps
        ]
        every = range(segments * shape.num_experts)
        if scope == "layer":
            of_layer = {item: shape.layer_of[item // segments] for item in every}
            least = least_loads(demands, dict(enumerate(shares)), of_layer)
        else:
            least = least_loads(demands, {0: sum(shares)}, dict.fromkeys(every, 0))
        assert played(control, run) == least


def test_experts_never_needed_again_are_not_kept_and_ties_go_to_the_lowest_id() -> None:
    """Two kept places, three needed: 2 and 0 are needed next, at once; then 1 and 2 never again."""
    shape = geometry(layers=1, experts=4, top_k=3)
    demands = Demands([(0, [2, 1, 0]), (0, [0, 2]), (0, [3, 0])])
    known = Known(future=ListFuture(shape, demands))
    control = SYSTEMS["belady"].scheduler(shape, with_shares(shape, [2], 3), known)
    assert list(run_layer(control, 0, [2, 1, 0]).loaded) == [2, 0, 1], "what is kept is loaded first"
    assert set(filter(control.cache.kept_of, range(4))) == {0, 2}
    demands.step = 1
    assert run_layer(control, 0, [0, 2]).loads == []
    demands.step = 2
    run_layer(control, 0, [3, 0])
    assert set(filter(control.cache.kept_of, range(4))) == {2, 3}, "none is needed again: 0 goes first"


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("kind", ["token", "batch", "prefill"])
def test_no_system_loads_less_at_equal_slots(segments: int, kind: str) -> None:
    dice = random.Random(f"{segments} {kind}")
    layers, experts, top_k = 3, 10, 3
    for share in (0.15, 0.4, 0.7):
        shape = geometry(layers, experts, top_k, segments)
        budget = split_budget(shape, int(shape.nbytes * share))
        demands = some_demands(dice, layers, experts, 30, top_k if kind == "token" else experts)
        future = ListFuture(shape, demands)
        loads, hits = {}, {}
        for name, system in SYSTEMS.items():
            if system.keeps_everything or system.prediction != "none":
                continue
            control = system.scheduler(shape, budget, Known(future=future))
            loads[name] = played(control, demands, decode=kind != "prefill")
            phases = [phase for counter in control.counters for phase in (counter.decode, counter.prefill)]
            hits[name] = sum(phase.hit_nbytes for phase in phases)
        assert min(loads.values()) == loads["belady-global"]
        for name in loads:
            bound = "belady" if SYSTEMS[name].scope == "layer" else "belady-global"
            assert hits[name] <= hits[bound]
            assert loads[name] >= loads[bound]
        assert loads["belady"] < loads["lru"], "there was something to gain"


@pytest.mark.parametrize("name", [name for name in SYSTEMS if "future" in SYSTEMS[name].needs])
def test_without_the_future_the_system_says_what_it_lacks(name: str) -> None:
    shape = geometry()
    budget = split_budget(shape, shape.nbytes // 2)
    with pytest.raises(ConfigError, match="needs to know the demands to come; only a simulation does"):
        SYSTEMS[name].scheduler(shape, budget)
        SYSTEMS[name].predictor(shape)
    assert name not in runnable_systems()


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_the_oracle_wastes_nothing_and_loads_no_less_than_belady(segments: int, share: float) -> None:
    shape = geometry(layers=4, experts=8, top_k=2, segments=segments)
    dice = random.Random(share)
    routers = [one_token(layer, dice.sample(range(8), 2)) for _ in range(60) for layer in range(4)]
    loaded, in_time, num_waits = {}, {}, {}
    for name in ("belady-global", "oracle", "oracle, at once"):
        system = SYSTEMS[name.partition(",")[0]]
        demands = Demands([(router.layer, router.experts) for router in routers])
        known = Known(future=ListFuture(shape, demands))
        control = system.scheduler(shape, split_budget(shape, int(shape.nbytes * share)), known)
        link = InstantLink() if "at once" in name else RandomLink(random.Random(1))
        predictor = system.predictor(shape, known)
        prefetcher = None if predictor is None else Prefetcher(control, link, predictor)
        for step, router in enumerate(routers):
            demands.step = step
            loop_layer(control, link, router, lambda spans: None, prefetcher, routed(router))
        total = PhaseCounters()
        for counters in control.counters:
            total.add(counters.decode)
        loaded[name], in_time[name], num_waits[name] = total.loaded_nbytes, total.hits, link.num_waits
        if prefetcher is not None:
            assert total.rates()["prediction_accuracy"] == total.rates()["accuracy"] == 1.0
            assert total.predicted == 60 * 4 * 2 - 2, "all but what the first layer needs"
            assert link.moved_nbytes(shape) == total.loaded_nbytes
    assert loaded["belady-global"] <= min(loaded.values())
    assert num_waits["oracle, at once"] == 0
    assert in_time["oracle, at once"] > in_time["belady-global"]
