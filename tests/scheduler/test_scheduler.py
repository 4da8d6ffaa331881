"""What the scheduler promises of loads, as stories."""

from __future__ import annotations

import random

import pytest

from expertly.core.messages import Plan, RouterRan
from tests.scheduler.drive import WAYS, control_planes, geometry, kept, one_token, run_layer, scheduler


def test_a_demand_story_of_one_layer() -> None:
    """Two kept places (4 of 8 slots: 2 for staging, 2 kept), least recently used goes first."""
    shape = geometry(layers=1, experts=8, top_k=2)
    control = scheduler(shape, 4 / 8)
    assert run_layer(control, 0, [0, 1]).hits == []  # cold: both miss and are kept
    assert kept(control, 0) == {0, 1}
    assert run_layer(control, 0, [1, 0]).hits == [1, 0]  # both hit
    ran = run_layer(control, 0, [0, 5])  # 5 misses, 1 goes, 0 is protected
    assert ran.hits == [0] and list(ran.loaded) == [5]
    assert kept(control, 0) == {0, 5}
    counters = control.counters[0].decode
    assert (counters.hits, counters.partial_hits, counters.misses) == (3, 0, 3)
    assert counters.loaded_nbytes == 3 * shape.layers[0].expert_nbytes
    assert counters.evicted_nbytes == shape.layers[0].expert_nbytes


@pytest.mark.parametrize(("staging", "largest"), [(1, 1), (3, 3), (4, 4), (6, 4), (8, 4)])
def test_experts_are_streamed_whole_where_staging_slots_can_hold_one(staging: int, largest: int) -> None:
    shape = geometry(layers=1, experts=8, top_k=2, segments=4)
    control = scheduler(shape, staging / 32, staging=staging)
    ran = run_layer(control, 0, list(range(8)), decode=False, dice=random.Random(0), check=True)
    assert sum(span.num_segments for span in ran.loads) == 32
    sizes = {span.num_segments for span in ran.loads}
    assert max(sizes) == largest
    assert staging not in (4, 8) or sizes == {4}


@pytest.mark.parametrize("system", [name for name in control_planes() if name != "moepic"])  # it keeps parts of experts
def test_experts_stay_in_one_span_through_prefill_and_decode(system: str) -> None:
    """Holes do not spread: a span is a read and a product, so an expert in four spans costs four of them."""
    shape = geometry(layers=6, experts=16, top_k=4, segments=4)
    for share in (0.25, 0.31, 0.4):
        control, dice = scheduler(shape, share, system), random.Random(0)
        loads, experts = 0, 0
        for _ in range(2):
            for chosen, decode in [(range(16), False), *[(None, True)] * 30]:
                for layer in range(6):
                    ran = run_layer(control, layer, list(chosen or dice.sample(range(16), 4)), decode=decode, dice=dice)
                    loads += len(ran.loads)
                    experts += len(ran.loaded)
        assert loads < 1.1 * experts


def test_an_expert_waits_for_staging_slots_that_can_hold_it_whole() -> None:
    """The 4 staging slots are half taken by what expert 0 lacks: expert 1 waits rather than come in two parts."""
    control = scheduler(geometry(layers=1, experts=8, top_k=2, segments=4), 6 / 32, staging=4)
    run_layer(control, 0, [0], decode=False, check=True)
    assert control.slots.resident[0] == 0b0011
    plan = control.begin_layer(RouterRan(0, [0, 1], [9, 1], [False, False], 9))
    assert [(span.expert, span.num_segments) for span in plan.loads] == [(0, 2)]
    for span in plan.ready:
        assert control.computed([span]) == Plan(), "nothing fits yet"
    control.loaded(plan.loads[0])
    following = control.computed([plan.loads[0]])
    assert following is not None
    assert [(span.expert, span.num_segments) for span in following.loads] == [(1, 4)]
    control.abandon()
    control.check()


def test_one_at_a_time_by_id_thrashes_where_the_default_does_not() -> None:
    """ProMoE's baseline: the experts a prefill still needs are evicted by those before them."""
    loaded = {}
    for order, preemption in WAYS:
        control = scheduler(geometry(layers=1, experts=8, top_k=2), 6 / 8, order=order, preemption=preemption)
        run_layer(control, 0, [4, 5])
        run_layer(control, 0, [6, 7])
        ran = run_layer(control, 0, list(range(8)), decode=False, check=True)
        loaded[order, preemption] = len(ran.loads)
    assert loaded == {("resident", "early"): 4, ("resident", "late"): 4, ("id", "early"): 8, ("id", "late"): 8}


# -- a layer that fails --------------------------------------------------------------------------------------------


def test_after_a_failure_spans_that_had_arrived_are_hits_and_others_misses() -> None:
    control = scheduler(geometry(layers=1, experts=8, top_k=2), 6 / 8)
    plan = control.begin_layer(one_token(0, [3, 5]))
    assert [span.expert for span in plan.loads] == [3, 5]
    control.loaded(plan.loads[0])
    control.abandon()
    control.check()
    assert kept(control, 0) == {3}
    assert list(run_layer(control, 0, [3, 5], check=True).loaded) == [5]


def test_a_failed_preload_can_begin_again() -> None:
    shape = geometry(layers=1, experts=4, top_k=2, segments=2)
    control = scheduler(shape, 1.0, "resident")
    for span in control.preload(0, 0):
        control.loaded(span)
    control.preload(0, 1)
    control.abandon()
    control.check()
    assert kept(control, 0) == {0}
    for expert in (1, 2, 3):
        for span in control.preload(0, expert):
            control.loaded(span)
    assert kept(control, 0) == {0, 1, 2, 3}
    assert run_layer(control, 0, [2, 1], check=True).loads == []
