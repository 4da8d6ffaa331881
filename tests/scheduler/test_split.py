"""Layers that keep the tops of experts: what is kept changes between layers, and theta 1 is whole experts."""

from __future__ import annotations

import random

import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.policies.allocation.moepic import LayerSplit, SplitPlan
from expertly.scheduler.budget import split_budget
from expertly.scheduler.decisions import record
from expertly.scheduler.loop import Prefetcher
from expertly.scheduler.loop import run_layer as loop_layer
from expertly.scheduler.observations import InlineChannel
from expertly.scheduler.presets import get_system
from tests.scheduler.drive import geometry, routed, run_layer, scheduler
from tests.scheduler.soak import LAYERS, RandomLink, RandomPredictor, random_routers

SHAPE = geometry(layers=1, experts=8, top_k=2, segments=4)


def test_other_splits_take_place_between_layers() -> None:
    """Kept: tops of 2 of four experts. Then of 3 segments of two: what is there stays in part, the least used goes, and
    what is needed next is filled. Then of 1 of eight: what lies beyond goes at once.
    """
    control = scheduler(SHAPE, 16 / 32, "lcp:allocation=split:theta=0.5")
    control.allocation.configured = lambda plan: plan.kept(control.geometry)  # type: ignore[method-assign]
    for pair in ([0, 1], [2, 3], [2, 3]):
        run_layer(control, 0, pair)
    control.configure(SplitPlan(SHAPE, (LayerSplit(2, 3, 8),)))
    control.check()
    assert (control.cache.quotas, control.cache.staging) == ([6], [10]), "what is left of the quota is for staging"
    assert control.slots.resident[:4] == [0, 0b0011, 0b0011, 0b0011]
    ran = run_layer(control, 0, [2, 3], check=True)
    assert ran.loaded == {2: 0b1100, 3: 0b1100}
    assert control.slots.resident[:4] == [0, 0, 0b0111, 0b0111]
    control.configure(SplitPlan(SHAPE, (LayerSplit(8, 1, 8),)))
    control.check()
    assert control.slots.resident[:4] == [0, 0, 0b0001, 0b0001] and control.cache.targets is None
    run_layer(control, 0, list(range(8)), decode=False, check=True)
    assert control.slots.resident[:8] == [0b0001] * 8, "a prompt fills the quota there is now"


def test_a_layer_that_keeps_whole_experts_again_has_none_in_several_places() -> None:
    """Halves that lie apart were filled up elsewhere: they go, unless they are needed, and then victims go whole."""
    control = scheduler(SHAPE, 16 / 32, "moepic:start=half")
    for pair in ([0, 1], [2, 3], [4, 5], [0, 4]):
        run_layer(control, 0, pair)
    assert control.cache.tops == [0b0011] and not any(control.slots.whole)
    control.predict(Prediction(0, [4], [0.9], 1))
    control.prefetch()
    control.configure(SplitPlan(SHAPE, (LayerSplit(2, 4, 8),)))
    control.check()
    assert [eid for eid in range(8) if control.slots.resident[eid]] == [4] and control.cache.targets == [8]
    for pair in ([1, 3], [2, 5], [6, 7], [0, 1], [3, 5]):
        run_layer(control, 0, pair, check=True)
        control.cache.rearrange(set())
    control.check()
    held = [eid for eid in range(8) if control.slots.resident[eid]]
    assert held and all(control.slots.whole[eid] for eid in held) and control.cache.targets is None
    victims = control.cache.partitions[0].evict(1, ())
    assert victims is not None and [mask for _, mask in victims] == [0b1111], "no victim leaves a part behind"


def test_prefetched_segments_are_not_cut_before_they_are_used() -> None:
    control = scheduler(SHAPE, 16 / 32, "lcp:allocation=split:theta=1:prediction=lookahead")
    control.allocation.configured = lambda plan: plan.kept(control.geometry)  # type: ignore[method-assign]
    run_layer(control, 0, [0, 1])
    control.predict(Prediction(0, [0], [0.9], 1))
    control.prefetch()
    control.configure(SplitPlan(control.geometry, (LayerSplit(5, 1, 5),)))
    control.check()
    assert control.slots.resident[:2] == [0b1111, 0b0001] and control.cache.targets == [5]
    run_layer(control, 0, [0, 2])
    control.cache.rearrange(set())
    control.check()
    assert control.slots.resident[:3] == [0b0001, 0, 0b0001] and control.cache.targets is None


@pytest.mark.parametrize("layers", [(LayerSplit(8, 2, 16),), (LayerSplit(1, 1, 1),) * 2])
def test_a_plan_that_does_not_fit_changes_nothing(layers: tuple[LayerSplit, ...]) -> None:
    control = scheduler(SHAPE, 0.5, "moepic")
    before = list(control.cache.quotas)
    with pytest.raises(ConfigError):
        control.configure(SplitPlan(geometry(layers=len(layers), experts=8, top_k=2, segments=4), layers))
    assert control.cache.quotas == before and control.cache.targets is None and control.cache.tops == [0b0011]


def test_an_allocation_that_asked_for_no_plan_takes_none() -> None:
    control = scheduler(SHAPE, 0.5, "lcp:allocation=split:theta=0.5")
    with pytest.raises(ConfigError, match="takes none; accepted: allocation=moepic"):
        control.configure(SplitPlan(control.geometry, (LayerSplit(1, 1, 1),)))


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_whole_experts_are_what_the_policy_alone_keeps(share: float) -> None:
    """Theta 1: every decision, line by line, with and without predictor."""
    for spec, way in (("lcp", ""), ("lcp", ":prediction=lookahead"), ("lcp", ":prediction=lookahead:ahead=staging")):
        decisions = []
        for allocation in ("", ":allocation=split:theta=1"):
            system, lines = get_system(f"{spec}{way}{allocation}"), []
            shape, dice = Geometry(LAYERS, 4), random.Random(share)
            budget = system.budget(shape, split_budget(shape, int(shape.nbytes * share)))
            control = record(system.scheduler(shape, budget), lines.append)
            routers = random_routers(dice, 20)
            predictor = RandomPredictor(dice, shape, routers)
            link = RandomLink(dice)
            prefetcher = Prefetcher(control, link, InlineChannel(predictor)) if way else None
            for step, router in enumerate(routers):
                predictor.step = step
                loop_layer(control, link, router, lambda spans: None, prefetcher, routed(router))
            decisions.append(lines)
        assert len(decisions[0]) > 300 and decisions[0] == decisions[1]
