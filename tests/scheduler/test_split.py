"""Layers that keep the tops of experts: what is kept changes between layers, and theta 1 is whole experts."""

from __future__ import annotations

import random

import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.scheduler.budget import split_budget
from expertly.scheduler.loop import Prefetcher
from expertly.scheduler.loop import run_layer as loop_layer
from expertly.scheduler.scheduler import Scheduler
from expertly.scheduler.systems import get_system
from tests.scheduler.decisions import Decision, record
from tests.scheduler.drive import geometry, routed, run_layer, scheduler
from tests.scheduler.soak import LAYERS, RandomLink, RandomPredictor, random_routers

SHAPE = geometry(layers=1, experts=8, top_k=2, segments=4)


def keep(control: Scheduler, quota: int, top: int) -> None:
    """From now on the only layer keeps so many segments, `top` of an expert."""
    control.cache.resize([quota], [top])
    control.cache.rearrange(control.upcoming())


def test_other_splits_take_place_between_layers() -> None:
    """Kept: tops of 2 of four experts. Then of 3 segments of two: what is there stays in part, the least used goes, and
    what is needed next is filled. Then of 1 of eight: what lies beyond goes at once.
    """
    control = scheduler(SHAPE, 16 / 32, "lcp:allocation=split:theta=0.5")
    for pair in ([0, 1], [2, 3], [2, 3]):
        run_layer(control, 0, pair)
    keep(control, 6, 3)
    control.check()
    assert (control.cache.quotas, control.cache.pools[0].staging) == ([6], 10), "the rest of the quota is for staging"
    assert control.cache.residency()[:4] == [0, 2, 2, 2]
    ran = run_layer(control, 0, [2, 3], check=True)
    assert ran.loaded == {2: {2, 3}, 3: {2, 3}}
    assert control.cache.residency()[:4] == [0, 0, 3, 3]
    keep(control, 8, 1)
    control.check()
    assert control.cache.residency()[:4] == [0, 0, 1, 1] and control.cache.targets is None
    run_layer(control, 0, list(range(8)), decode=False, check=True)
    assert control.cache.residency()[:8] == [1] * 8, "a prompt fills the quota there is now"


def test_a_layer_that_keeps_whole_experts_again_has_none_in_several_places() -> None:
    """Halves that lie apart were filled up elsewhere: they go, unless they are needed, and then victims go whole."""
    control = scheduler(SHAPE, 16 / 32, "moepic")
    for pair in ([0, 1], [2, 3], [4, 5], [0, 4]):
        run_layer(control, 0, pair)
    assert control.cache.tops == [2] and not any(control.cache.whole)
    control.predict(Prediction(0, [4], [0.9], 1))
    control.prefetch()
    keep(control, 8, 4)
    control.check()
    assert [eid for eid in range(8) if control.cache.num_resident(eid)] == [4] and control.cache.targets == [8]
    for pair in ([1, 3], [2, 5], [6, 7], [0, 1], [3, 5]):
        run_layer(control, 0, pair, check=True)
        control.cache.rearrange(set())
    control.check()
    held = [eid for eid in range(8) if control.cache.num_resident(eid)]
    assert held and all(control.cache.whole[eid] for eid in held) and control.cache.targets is None
    control.cache.make_room(0, control.cache.partitions[0].room + 1, ())
    assert {control.cache.num_resident(eid) for eid in held} == {0, 4}, "no victim leaves a part behind"


def test_prefetched_segments_are_not_cut_before_they_are_used() -> None:
    control = scheduler(SHAPE, 16 / 32, "lcp:allocation=split:theta=1:prediction=lookahead")
    run_layer(control, 0, [0, 1])
    control.predict(Prediction(0, [0], [0.9], 1))
    control.prefetch()
    keep(control, 5, 1)
    control.check()
    assert control.cache.residency()[:2] == [4, 1] and control.cache.targets == [5]
    run_layer(control, 0, [0, 2])
    control.cache.rearrange(set())
    control.check()
    assert control.cache.residency()[:3] == [1, 0, 1] and control.cache.targets is None


def test_quotas_beyond_what_there_is_to_keep_change_nothing() -> None:
    control = scheduler(SHAPE, 0.5, "moepic")
    before = list(control.cache.quotas)
    with pytest.raises(ConfigError, match="must be at most"):
        keep(control, 16, 2)
    assert control.cache.quotas == before and control.cache.targets is None and control.cache.tops == [2]


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_whole_experts_are_what_the_policy_alone_keeps(share: float) -> None:
    """Theta 1: every decision, with and without predictor."""
    for spec, way in (("lcp", ""), ("lcp", ":prediction=lookahead"), ("lcp", ":prediction=lookahead:ahead=staging")):
        decisions = []
        for allocation in ("", ":allocation=split:theta=1"):
            system, lines = get_system(f"{spec}{way}{allocation}"), list[Decision]()
            shape, dice = Geometry(LAYERS, 4), random.Random(share)
            budget = system.budget(shape, split_budget(shape, int(shape.nbytes * share)))
            control = record(system.scheduler(shape, budget), lines.append)
            routers = random_routers(dice, 20)
            predictor = RandomPredictor(dice, shape, routers)
            link = RandomLink(dice)
            prefetcher = Prefetcher(control, link, predictor) if way else None
            for step, router in enumerate(routers):
                predictor.step = step
                loop_layer(control, link, router, lambda spans: None, prefetcher, routed(router))
            decisions.append(lines)
        assert len(decisions[0]) > 300 and decisions[0] == decisions[1]
