"""Whatever is demanded, predicted, shared out, split or fails, in whatever way a layer runs: every promise holds, and
every decision is made again from what was told (see `soak`).
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from expertly.core.geometry import Geometry
from expertly.policies.allocation.moepic import MoEpic
from expertly.policies.known import Known
from expertly.scheduler.budget import split_budget
from expertly.scheduler.counters import PhaseCounters
from expertly.scheduler.loop import Prefetcher, run_layer
from expertly.scheduler.observations import InlineChannel
from expertly.scheduler.presets import SYSTEMS, get_system
from expertly.testing.made_up import ListFuture
from tests.scheduler import drive
from tests.scheduler.drive import WAYS, geometry, one_token, scheduler, ways
from tests.scheduler.soak import BUDGETS, InstantLink, RandomLink, RandomPredictor, RandomQuotas, nothing_seen, soak
from tests.tables import crossed, pairs

KEEPING = [  # scope, order, admission, eviction
    ("layer", "resident", "always", "lru"),
    ("layer", "id", "always", "lcp"),
    ("global", "resident", "always", "lfu"),
    ("global", "id", "always", "lru"),
    ("global", "resident", "always", "random"),
    ("layer", "resident", "best", "belady"),
    ("global", "resident", "best", "belady"),
    ("global", "resident", "best", "lcp"),
    ("global", "resident", "always", "fmoe"),
]


@pytest.mark.parametrize(("segments", "ahead", "keeping"), pairs([1, 4], ["cache", "staging"], KEEPING))
def test_random_predictions(segments: int, ahead: str, keeping: tuple[str, str, str, str]) -> None:
    scope, order, admission, eviction = keeping
    way: dict[str, Any] = {"scope": scope, "order": order, "admission": admission, "ahead": ahead, "eviction": eviction}
    prefetch = "proximity" if eviction == "fmoe" else "score"
    happened: Counter[str] = Counter()
    prompts = (
        [("stream", "always"), ("evict", "always"), ("evict", "decode")] if admission == "always" else [("stream",)]
    )
    for number, (share, staging) in enumerate(BUDGETS):
        window, failures = [(None, 0.0), (None, 0.02), (1, 0.01)][number % 3]
        way |= dict(zip(("prefill", "prefetching"), prompts[number % len(prompts)], strict=False))
        seed = f"{share} {window} {failures}"
        ran = soak(seed, segments, share, staging, prefetch=prefetch, window=window, failures=failures, **way)
        happened += ran.happened
    assert happened["awaited"] and happened["cancelled"], "prefetches were in flight when their layers' routers ran"


@pytest.mark.parametrize(
    ("way", "transfer", "ahead", "segments"), pairs(WAYS, ["asynchronous", "synchronous"], ["cache", "staging"], [1, 4])
)
def test_random_ways_to_run_a_layer(way: tuple[str, str], transfer: str, ahead: str, segments: int) -> None:
    order, preemption = way
    runs: dict[str, Any] = {"order": order, "preemption": preemption, "transfer": transfer, "ahead": ahead}
    happened: Counter[str] = Counter()
    for (share, staging), (scope, window, failures) in crossed(BUDGETS, [("layer", None, 0.0), ("global", 3, 0.02)]):
        named = runs | {"scope": scope, "window": window}
        happened += soak(f"{share} {scope}", segments, share, staging, failures=failures, **named).happened
    is_late = preemption == "late"
    assert bool(happened["requested"]) == (order == "id" and not is_late)
    if transfer == "asynchronous":
        assert happened["awaited"] and happened["cancelled"]
        assert bool(happened["promoted"]) == bool(happened["cancelled late"]) == is_late


@pytest.mark.parametrize(
    ("order", "preemption", "ahead", "segments"),
    [(*way, *more) for way, more in zip(WAYS, [("cache", 1), ("staging", 4)] * 2, strict=True)],
)
def test_random_systems_with_a_gate(order: str, preemption: str, ahead: str, segments: int) -> None:
    """Its times are random."""
    happened: Counter[str] = Counter()
    way: dict[str, Any] = {"order": order, "preemption": preemption, "ahead": ahead, "num_iterations": 25}
    for share, staging in ((0.1, 1), (0.5, 3)):
        for scope, failures in (("layer", 0.0), ("global", 0.002)):
            named = way | {"scope": scope, "failures": failures, "has_gate": True}
            happened += soak(f"{share} {scope}", segments, share, staging, **named).happened
    assert happened["steps_with"] and happened["steps_without"]


@pytest.mark.parametrize(
    ("segments", "ahead", "keeping"),
    pairs([1, 4], ["cache", "staging"], [("lru", "always"), ("lfu", "best"), ("random", "always"), ("belady", "best")]),
)
def test_random_quotas(segments: int, ahead: str, keeping: tuple[str, str]) -> None:
    eviction, admission = keeping
    happened: Counter[str] = Counter()
    way: dict[str, Any] = {"eviction": eviction, "admission": admission, "ahead": ahead, "allocation": RandomQuotas}
    for share, failures in ((0.35, 0.02), (0.6, 0.0), (0.6, 0.02), (0.9, 0.0)):
        happened += soak(f"{share} {failures}", segments, share, failures=failures, num_iterations=10, **way).happened
    assert happened["there"] and (ahead == "staging" or (happened["in flight"] and happened["on the way"]))


@pytest.mark.parametrize(
    ("segments", "ahead", "keeping"),
    pairs([1, 4], ["cache", "staging"], [("lcp", "always"), ("random", "always"), ("lcp", "best")]),
)
def test_random_splits(segments: int, ahead: str, keeping: tuple[str, str]) -> None:
    eviction, admission = keeping
    happened: Counter[str] = Counter()
    way: dict[str, Any] = {"eviction": eviction, "admission": admission, "ahead": ahead, "plans": True}
    for (share, staging), failures in crossed(BUDGETS, [0.0, 0.02]):
        seed = f"{share} {failures}"
        happened += soak(seed, segments, share, staging, allocation=moepic, failures=failures, **way).happened
    assert happened["in flight"] and happened["on the way"] and happened["there"]
    assert bool(happened["tops"]) == (segments > 1)
    assert happened["staged"], "if only while prompts ran"


@pytest.mark.parametrize(("order", "preemption"), WAYS)
@pytest.mark.parametrize("transfer", ["asynchronous", "synchronous"])
def test_random_layers_that_keep_parts_of_experts(order: str, preemption: str, transfer: str) -> None:
    for (share, staging), ahead in crossed(BUDGETS, ["cache", "staging"]):
        way: dict[str, Any] = {"order": order, "preemption": preemption, "transfer": transfer, "ahead": ahead}
        named = way | {"eviction": "lcp", "allocation": moepic, "plans": True, "num_iterations": 5}
        ran = soak(f"{share}", 4, share, staging, **named)
        assert ran.happened["tops"]


def moepic(shape: Geometry, dice: random.Random) -> MoEpic:
    return MoEpic(shape)


# -- without predictions -------------------------------------------------------------------------------------------


KEPT = [(1, 1, 0.6), (4, 3, 0.2), (1, None, 0.6), (4, 1, 0.6), (1, 3, 0.2), (4, None, 0.6), (4, None, 1.0)]


@pytest.mark.parametrize(
    ("system", "order", "preemption", "segments", "staging", "share"),
    dict.fromkeys((*way, *kept) for rows in (KEPT, KEPT[2:]) for way, kept in crossed(ways(), rows)),
)
def test_every_control_plane(
    system: str, order: str, preemption: str, segments: int, staging: int | None, share: float
) -> None:
    """Random batches, staging slots down to one segment, any order of arrival: checked after every event."""
    dice = random.Random(f"{staging} {order} {share}")
    control = scheduler(geometry(3, 8, 2, segments), share, system, staging, order, preemption)
    for _ in range(12):
        for layer in range(3):
            chosen = dice.sample(range(8), dice.choice([2, 2, 5, 8]))
            tokens = [dice.randint(0, 3) for _ in chosen]
            flags = [dice.random() < 0.6 for _ in chosen]
            drive.run_layer(control, layer, chosen, tokens=tokens, decode=flags, dice=dice, check=True)


# -- bounds and equalities -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_the_oracle_wastes_nothing_and_loads_no_less_than_belady(segments: int, share: float) -> None:
    shape = geometry(layers=4, experts=8, top_k=2, segments=segments)
    dice = random.Random(share)
    routers = [one_token(layer, dice.sample(range(8), 2)) for _ in range(60) for layer in range(4)]
    loaded, in_time, num_waits = {}, {}, {}
    for name in ("belady-global", "oracle", "oracle, at once"):
        system = SYSTEMS[name.partition(",")[0]]
        future = ListFuture(shape, [(router.layer, router.experts) for router in routers])
        known = Known(future=future)
        control = system.scheduler(shape, split_budget(shape, int(shape.nbytes * share)), known)
        link = InstantLink() if "at once" in name else RandomLink(random.Random(1))
        predictor = system.predictor(shape, known)
        prefetcher = None if predictor is None else Prefetcher(control, link, InlineChannel(predictor))
        for step, router in enumerate(routers):
            future.step = step
            run_layer(control, link, router, lambda spans: None, prefetcher, drive.routed(router))
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


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("share", [2 / 32, 3 / 32, 0.25, 1.0])
def test_with_nothing_kept_what_is_prefetched_is_staged(share: float, segments: int) -> None:
    """At the least budget, too: nothing waits for ever, nothing is evicted, and nothing stays but what is to come."""
    shape, dice = geometry(layers=4, experts=8, top_k=2, segments=segments), random.Random(0)
    system = get_system("lru:allocation=none:prediction=counts:ahead=staging")
    budget = system.budget(shape, split_budget(shape, int(shape.nbytes * share)))
    assert budget.kept_slots == (0,)
    control = drive.CheckedScheduler(shape, budget, lambda capacity, layers: drive.LRU(), ahead="staging")
    link = RandomLink(dice, 0.7)
    routers = [one_token(layer, dice.sample(range(8), 2)) for _ in range(60) for layer in range(4)]
    predictor = RandomPredictor(dice, shape, routers)
    prefetcher = Prefetcher(control, link, InlineChannel(predictor))
    for step, router in enumerate(routers):
        predictor.step = step
        if router.layer == 0:
            prefetcher.begin_iteration(nothing_seen)
        run_layer(control, link, router, lambda spans: None, prefetcher, drive.routed(router))
        coming = {*control.queue.waiting, *control.slots.prefetching}
        for eid in range(shape.num_experts):
            held = control.slots.resident[eid] | control.slots.in_flight[eid]
            assert not held or eid in coming, "nothing stays between layers but what is prefetched"
    counts = [counters.decode for counters in control.counters]
    assert sum(one.prefetched_in_time for one in counts), "staging slots are used for what is to come"
    assert not sum(one.evicted_nbytes for one in counts)
