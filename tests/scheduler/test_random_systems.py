"""Whatever is demanded, predicted, shared out, split or fails, in whatever way a layer runs: every promise holds, and
every decision is made again from what was told (see `soak`).
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from expertly.scheduler.budget import Budget
from expertly.scheduler.loop import Prefetcher, run_layer
from tests.scheduler import drive
from tests.scheduler.checked import waiting
from tests.scheduler.drive import geometry, one_token
from tests.scheduler.soak import BUDGETS, RandomLink, RandomPredictor, RandomQuotas, RandomSplits, nothing_seen, soak
from tests.tables import crossed, pairs

KEEPING = [  # scope, admission, eviction
    ("layer", "always", "lru"),
    ("layer", "always", "lcp"),
    ("global", "always", "lfu"),
    ("global", "always", "lru"),
    ("layer", "best", "lfu"),
    ("global", "best", "reuse"),
    ("global", "best", "lcp"),
    ("global", "always", "fmoe"),
]


@pytest.mark.parametrize(("segments", "ahead", "keeping"), pairs([1, 4], ["cache", "staging"], KEEPING))
def test_random_predictions(segments: int, ahead: str, keeping: tuple[str, str, str]) -> None:
    scope, admission, eviction = keeping
    way: dict[str, Any] = {"scope": scope, "admission": admission, "ahead": ahead, "eviction": eviction}
    prefetch = "proximity" if eviction == "fmoe" else "score"
    happened: Counter[str] = Counter()
    prompts = ["stream", "evict", "evict"] if admission == "always" else ["stream"]
    for number, (share, staging) in enumerate(BUDGETS):
        window, failures = [(None, 0.0), (None, 0.02), (1, 0.01)][number % 3]
        way["prefill"] = prompts[number % len(prompts)]
        seed = f"{share} {window} {failures}"
        ran = soak(seed, segments, share, staging, prefetch=prefetch, window=window, failures=failures, **way)
        happened += ran.happened
    assert happened["awaited"] and happened["cancelled"], "prefetches were in flight when their layers' routers ran"


@pytest.mark.parametrize(
    ("segments", "ahead", "keeping"),
    pairs([1, 4], ["cache", "staging"], [("lru", "always"), ("lfu", "best"), ("lcp", "always"), ("lcp", "best")]),
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
    pairs([1, 4], ["cache", "staging"], [("lcp", "always"), ("lru", "always"), ("lcp", "best")]),
)
def test_random_splits(segments: int, ahead: str, keeping: tuple[str, str]) -> None:
    eviction, admission = keeping
    happened: Counter[str] = Counter()
    way: dict[str, Any] = {"eviction": eviction, "admission": admission, "ahead": ahead}
    for (share, staging), failures in crossed(BUDGETS, [0.0, 0.02]):
        seed = f"{share} {failures}"
        happened += soak(seed, segments, share, staging, allocation=RandomSplits, failures=failures, **way).happened
    assert happened["in flight"] and happened["on the way"] and happened["there"]
    assert bool(happened["tops"]) == (segments > 1)
    assert happened["staged"], "if only while prompts ran"
    assert happened["of new quotas"]


# -- bounds and equalities -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("share", [2 / 32, 3 / 32, 0.25, 1.0])
def test_with_nothing_kept_what_is_prefetched_is_staged(share: float, segments: int) -> None:
    """At the least budget, too: nothing waits for ever, nothing is evicted, and nothing stays but what is to come."""
    shape, dice = geometry(layers=4, experts=8, top_k=2, segments=segments), random.Random(0)
    slots = int(shape.nbytes * share) // shape.unit_nbytes[0]
    budget = Budget(0, (slots,), (0,), (0,) * 4)
    control = drive.CheckedScheduler(shape, budget, lambda capacity, layers: drive.LRU(), ahead="staging")
    link = RandomLink(dice, 0.7)
    routers = [one_token(layer, dice.sample(range(8), 2)) for _ in range(60) for layer in range(4)]
    predictor = RandomPredictor(dice, shape, routers)
    prefetcher = Prefetcher(control, link, predictor)
    for step, router in enumerate(routers):
        predictor.step = step
        if router.layer == 0:
            prefetcher.begin_iteration(nothing_seen)
        run_layer(control, link, router, lambda spans: None, prefetcher, drive.routed(router))
        held = {unit // segments for unit, slot in enumerate(control.cache.slot) if slot >= 0}
        coming = {*waiting(control), *(unit // segments for unit in control.cache.prefetching)}
        assert held <= coming, "nothing stays between layers but what is prefetched"
    counts = [counters.decode for counters in control.counters]
    assert sum(count.prefetched_in_time for count in counts), "staging slots are used for what is to come"
    assert not sum(count.evicted_nbytes for count in counts)
