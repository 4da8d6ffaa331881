"""Layers that keep the tops of experts, as stories: the rest is staged, and what is kept changes between layers."""

from __future__ import annotations

import random

import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, Span
from expertly.core.observation import Routed
from expertly.policies.allocation.moepic import LayerSplit, SplitPlan
from expertly.policies.predictor import Predictor
from expertly.scheduler.budget import split_budget
from expertly.scheduler.decisions import record
from expertly.scheduler.loop import Prefetcher
from expertly.scheduler.loop import run_layer as loop_layer
from expertly.scheduler.observations import InlineChannel
from expertly.scheduler.presets import get_system
from expertly.scheduler.scheduler import Scheduler
from tests.scheduler.drive import finish, geometry, one_token, routed, run_layer, scheduler
from tests.scheduler.soak import LAYERS, RandomLink, RandomPredictor, random_routers


def split_scheduler(share: float, theta: float, system: str = "lcp", **shape: int) -> Scheduler:
    """4 segments an expert; 8 slots are for staging."""
    spec = f"{system}:allocation=split:theta={theta}"
    return scheduler(geometry(**({"layers": 1, "experts": 8, "top_k": 2, "segments": 4} | shape)), share, spec)


def test_what_is_kept_of_an_expert_is_its_top_and_the_rest_is_staged() -> None:
    """8 + 8 slots. Theta 1/2 keeps four tops of two segments, where whole experts would be two."""
    control = split_scheduler(16 / 32, 0.5)
    assert (control.cache.quotas, control.cache.staging) == ([8], [8])
    for pair in ([0, 1], [2, 3]):
        ran = run_layer(control, 0, pair, check=True)
        assert ran.loaded == dict.fromkeys(pair, 0b1111), "all of them was missing"
    assert control.slots.resident[:8] == [0b0011] * 4 + [0] * 4
    ran = run_layer(control, 0, [0, 4], check=True)
    assert ran.loaded == {0: 0b1100, 4: 0b1111}, "of what is kept only the rest is loaded"
    assert control.slots.resident[:8] == [0b0011, 0, 0b0011, 0b0011, 0b0011, 0, 0, 0], "expert 1's top went"
    counts = control.counters[0].decode
    assert (counts.hits, counts.partial_hits, counts.misses) == (0, 1, 5)
    assert counts.hit_nbytes * 2 == control.geometry.layers[0].expert_nbytes


def test_the_best_tops_are_kept_and_what_is_worth_less_is_staged_whole() -> None:
    """Four tops of two are kept. Of those and what is needed the lowest goes: that of the three used once first in the
    list of ids, which is needed here, so that its top is staged with the rest.
    """
    control = split_scheduler(16 / 32, 0.5, "lfu:admission=best")
    for pair in ([1, 2], [3, 4], [1, 2], [3, 4]):
        run_layer(control, 0, pair, check=True)
    assert control.slots.resident[:8] == [0] + [0b0011] * 4 + [0] * 3
    ran = run_layer(control, 0, [0, 1], check=True)
    assert ran.loaded == {0: 0b1111, 1: 0b1100}
    assert control.slots.resident[:8] == [0] + [0b0011] * 4 + [0] * 3, "nobody's top went for it"
    for _ in range(3):
        run_layer(control, 0, [0, 5], check=True)
    assert control.slots.resident[:3] == [0b0011, 0b0011, 0], "used as often as 2, and more often then"
    counts = control.counters[0].decode
    assert counts.partial_hits and not counts.hits


def test_missing_segments_of_predicted_experts_are_prefetched_and_hits_then() -> None:
    control = split_scheduler(16 / 32, 0.5, "lcp:prediction=lookahead:ahead=staging")
    run_layer(control, 0, [0, 1])
    control.predict(Prediction(0, [0, 2, 1], [0.9, 0.8, 0.7], 1))
    spans = control.prefetch()
    told = [(span.expert, span.segment) for span in spans]
    assert told == [(0, 2), (0, 3), (2, 0), (2, 1), (2, 2), (2, 3)], "of 8 staging slots one stays free: no 1"
    for span in spans:
        control.loaded(span)
    control.check()
    plan = control.begin_layer(one_token(0, [0, 2]))
    assert not plan.loads and not plan.in_flight
    assert sum(span.num_segments for span in plan.ready) == 8
    finish(control, plan)
    control.check()
    assert control.slots.resident[:4] == [0b0011] * 3 + [0], "2 was loaded ahead, and its top is kept now"
    assert control.counters[0].decode.hits == 2


def test_prefetches_for_the_next_layer_may_take_all_staging_slots_but_one() -> None:
    """The predictor are wrong and on their way: the demand comes a segment at a time, as they leave."""
    control = split_scheduler(8 / 32, 0.5, "lcp:prediction=lookahead:ahead=staging:window=99", layers=2, experts=4)
    assert (control.cache.quotas, control.cache.staging) == ([0, 0], [8])
    run_layer(control, 0, [0, 1])
    control.predict(Prediction(1, [0, 1], [0.9, 0.8], 1))
    spans = control.prefetch()
    assert sum(span.num_segments for span in spans) == 4, "the second expert would leave none"
    link = RandomLink(random.Random(0))
    link.prefetch(spans)
    computed: list[Span] = []
    control.predict(Prediction(0, [2], [0.9], 2))
    assert control.prefetch() == [], "of a layer that is not next, an expert's worth stays free"
    link.begun, link.ahead = link.ahead, []
    loop_layer(control, link, one_token(1, [2, 3]), computed.extend, Prefetcher(control, link, InlineChannel(Silent())))
    assert sum(span.num_segments for span in computed) == 8


class Silent(Predictor):
    """Predicts nothing."""

    def router_ran(self, routed: Routed) -> list[Prediction]:
        return []


def test_other_splits_take_place_between_layers() -> None:
    """Kept: tops of 2 of four experts. Then of 3 segments of two: what is there stays in part, the least used goes, and
    what is needed next is filled. Then of 1 of eight: what lies beyond goes at once.
    """
    control = split_scheduler(16 / 32, 0.5)
    control.allocation.configured = lambda plan: plan.kept(control.geometry)  # type: ignore[method-assign]
    for pair in ([0, 1], [2, 3], [2, 3]):
        run_layer(control, 0, pair)
    shape = control.geometry
    control.configure(SplitPlan(shape, (LayerSplit(2, 3, 8),)))
    control.check()
    assert (control.cache.quotas, control.cache.staging) == ([6], [10]), "what is left of the quota is for staging"
    assert control.slots.resident[:4] == [0, 0b0011, 0b0011, 0b0011]
    ran = run_layer(control, 0, [2, 3], check=True)
    assert ran.loaded == {2: 0b1100, 3: 0b1100}
    assert control.slots.resident[:4] == [0, 0, 0b0111, 0b0111]
    control.configure(SplitPlan(shape, (LayerSplit(8, 1, 8),)))
    control.check()
    assert control.slots.resident[:4] == [0, 0, 0b0001, 0b0001] and control.cache.targets is None
    run_layer(control, 0, list(range(8)), decode=False, check=True)
    assert control.slots.resident[:8] == [0b0001] * 8, "a prompt fills the quota there is now"


def test_prefetched_segments_are_not_cut_before_they_are_used() -> None:
    control = split_scheduler(16 / 32, 1.0, "lcp:prediction=lookahead")
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
    control = scheduler(geometry(layers=1, experts=8, top_k=2, segments=4), 0.5, "moepic")
    before = list(control.cache.quotas)
    with pytest.raises(ConfigError):
        control.configure(SplitPlan(geometry(layers=len(layers), experts=8, top_k=2, segments=4), layers))
    assert control.cache.quotas == before and control.cache.targets is None and control.cache.tops == [0b0011]


def test_an_allocation_that_asked_for_no_plan_takes_none() -> None:
    control = split_scheduler(0.5, 0.5)
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
