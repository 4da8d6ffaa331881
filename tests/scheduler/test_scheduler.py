"""The scheduler's promises, as stories and against a naive cache that is obviously right."""

from __future__ import annotations

import random

import pytest

from expertly.core.messages import Plan, RouterRan
from tests.scheduler.drive import WAYS, control_planes, geometry, kept, run_layer, scheduler, ways


def test_a_demand_story_of_one_layer() -> None:
    """Two kept places (4 of 8 slots: 2 ring, 2 kept), least recently used goes first."""
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


def test_a_share_under_top_k_is_served_through_the_ring() -> None:
    control = scheduler(geometry(layers=1, experts=8, top_k=2), 3 / 8)  # 2 ring, 1 kept
    run_layer(control, 0, [0, 1], check=True)
    assert kept(control, 0) == {0}
    ran = run_layer(control, 0, [2, 3], check=True)  # both miss, one replaces 0
    assert sorted(ran.loaded) == [2, 3]
    assert kept(control, 0) == {2}
    run_layer(control, 0, [2, 4], check=True)
    assert kept(control, 0) == {2}, "the kept one is needed and protected: 4 passed through the ring"


def test_a_budget_of_the_ring_alone_keeps_nothing() -> None:
    control = scheduler(geometry(layers=2, experts=8, top_k=2), 2 / 16)
    for _ in range(3):
        for layer in range(2):
            assert run_layer(control, layer, [0, 1], check=True).hits == []
    assert kept(control, 0) == kept(control, 1) == set()


def test_prefill_loads_each_absent_segment_once_and_leaves_what_decode_kept() -> None:
    shape = geometry(layers=2, experts=16, top_k=4, segments=4)
    control = scheduler(shape, 0.5)
    dice = random.Random(0)
    for _ in range(30):
        for layer in range(2):
            run_layer(control, layer, dice.sample(range(16), 4), dice=dice)
    before = [dict(cache.kept) for cache in control.caches]
    ran = run_layer(control, 0, list(range(16)), tokens=list(range(1, 17)), decode=False, dice=dice, check=True)
    assert [dict(cache.kept) for cache in control.caches] == before
    resident = sum(mask.bit_count() for mask in before[0].values())
    assert sum(span.num_segments for span in ran.loads) == 16 * 4 - resident


@pytest.mark.parametrize(("ring", "largest"), [(1, 1), (3, 3), (4, 4), (6, 4), (8, 4)])
def test_experts_are_streamed_whole_where_the_ring_can_hold_one(ring: int, largest: int) -> None:
    shape = geometry(layers=1, experts=8, top_k=2, segments=4)
    control = scheduler(shape, ring / 32, ring=ring)
    ran = run_layer(control, 0, list(range(8)), decode=False, dice=random.Random(0), check=True)
    assert sum(span.num_segments for span in ran.loads) == 32
    sizes = {span.num_segments for span in ran.loads}
    assert max(sizes) == largest
    assert ring not in (4, 8) or sizes == {4}


@pytest.mark.parametrize("system", [name for name in control_planes() if name != "moepic"])  # it keeps parts of experts
def test_experts_stay_in_one_span_through_prefill_and_decode(system: str) -> None:
    """Holes do not spread: a span is a read and a product, so an expert in four spans costs four of them."""
    shape = geometry(layers=6, experts=16, top_k=4, segments=4)
    for share in (0.25, 0.31, 0.4):
        control, dice = scheduler(shape, share, system), random.Random(0)
        loads, experts = 0, 0
        for _ in range(4):
            for chosen, decode in [(range(16), False), *[(None, True)] * 30]:
                for layer in range(6):
                    ran = run_layer(control, layer, list(chosen or dice.sample(range(16), 4)), decode=decode, dice=dice)
                    loads += len(ran.loads)
                    experts += len(ran.loaded)
        assert loads < 1.1 * experts


def test_an_expert_waits_for_a_ring_that_can_hold_it_whole() -> None:
    """The ring of 4 segments is half taken by what expert 0 lacks: expert 1 waits rather than come in two parts."""
    control = scheduler(geometry(layers=1, experts=8, top_k=2, segments=4), 6 / 32, ring=4)
    run_layer(control, 0, [0], decode=False, check=True)
    assert control.residency.resident[0] == 0b0011
    step = control.begin_layer(RouterRan(0, [0, 1], [9, 1], [False, False], 9))
    assert [(span.expert, span.num_segments) for span in step.loads] == [(0, 2)]
    for span in step.ready:
        assert control.computed(span) == Plan(), "nothing fits yet"
    control.loaded(step.loads[0])
    following = control.computed(step.loads[0])
    assert following is not None
    assert [(span.expert, span.num_segments) for span in following.loads] == [(1, 4)]
    control.abandon()
    control.check()


def test_a_cold_prefill_keeps_the_experts_of_most_tokens() -> None:
    control = scheduler(geometry(layers=1, experts=8, top_k=2), 5 / 8)  # 3 kept
    run_layer(control, 0, [0, 1, 2, 3, 4, 5], tokens=[3, 9, 1, 7, 8, 1], decode=False, check=True)
    assert kept(control, 0) == {1, 3, 4}


def test_in_a_mixed_batch_decode_may_evict_and_prefill_may_not() -> None:
    control = scheduler(geometry(layers=1, experts=8, top_k=2), 4 / 8)
    run_layer(control, 0, [0, 1])
    run_layer(control, 0, [2, 3], decode=[False, True], check=True)
    assert kept(control, 0) == {1, 3}
    counters = control.counters[0]
    assert (counters.prefill.misses, counters.decode.misses) == (1, 3)


def test_what_only_pads_chose_is_computed_and_not_counted() -> None:
    control = scheduler(geometry(layers=1, experts=8, top_k=2), 4 / 8)
    ran = run_layer(control, 0, [0, 1, 2], tokens=[2, 0, 1], decode=False)
    assert sorted(ran.loaded) == [0, 1, 2]
    assert control.counters[0].prefill.misses == 2
    assert control.counters[0].prefill.loaded_nbytes == 3 * control.geometry.layers[0].expert_nbytes


def test_a_partial_hit_loads_only_the_missing_segments() -> None:
    """6 kept segments of P = 4: one whole expert and the top half of another."""
    shape = geometry(layers=1, experts=8, top_k=2, segments=4)
    control = scheduler(shape, (8 + 6) / 32)
    run_layer(control, 0, [0, 1], check=True)
    ran = run_layer(control, 0, [1, 0], check=True)
    assert ran.hits == [0]
    assert ran.loaded == {1: 0b1100}
    counters = control.counters[0].decode
    assert (counters.hits, counters.partial_hits, counters.misses) == (1, 1, 2)
    assert counters.hit_nbytes == shape.layers[0].expert_nbytes * 3 // 2


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


@pytest.mark.parametrize("preemption", ["early", "late"])
def test_by_id_runs_one_expert_after_the_other(preemption: str) -> None:
    control = scheduler(geometry(layers=1, experts=8, top_k=2, segments=2), 0.5, order="id", preemption=preemption)
    ran = run_layer(control, 0, [6, 2, 7, 0], check=True)
    assert [span.expert for span in ran.loads] == sorted(span.expert for span in ran.loads)


class NaiveCache:
    """A cache of whole experts with a list and counters, as docs/conventions.md words it."""

    def __init__(self, system: str, capacity: int) -> None:
        self.system, self.capacity = system, capacity
        self.order: list[int] = []  # kept, least recently used first
        self.count: dict[int, int] = {}
        self.hits = 0

    def token(self, experts: list[int]) -> None:
        self.hits += sum(e in self.order for e in experts)
        for expert in experts:
            if expert in self.order:
                continue
            if len(self.order) == self.capacity:
                candidates = [e for e in self.order if e not in experts]
                if not candidates:
                    continue
                lfu = self.system == "lfu"
                self.order.remove(min(candidates, key=lambda e: (self.count.get(e, 0), e)) if lfu else candidates[0])
            self.order.append(expert)
        for expert in sorted(experts):  # one token: equally recent, ties go to the lowest id
            self.count[expert] = self.count.get(expert, 0) + 1
            if expert in self.order:
                self.order.remove(expert)
                self.order.append(expert)


@pytest.mark.parametrize("system", ["lru", "lfu", "on-demand"])
@pytest.mark.parametrize("segments", [1, 4])
def test_hits_are_those_of_the_naive_cache(system: str, segments: int) -> None:
    layers, experts, top_k = 3, 12, 3
    shape = geometry(layers, experts, top_k, segments)
    slots = top_k + 5 * layers  # whole experts: the ring and 5 a layer
    control = scheduler(shape, slots / (layers * experts), system)
    count = 1 if system == "on-demand" else layers
    naive = [NaiveCache(system, 5 * layers // count) for _ in range(count)]
    dice = random.Random(7)
    weights = [1 / (1 + e) for e in range(experts)]
    for _ in range(400):
        for layer in range(layers):
            chosen: list[int] = []
            while len(chosen) < top_k:
                expert = dice.choices(range(experts), weights)[0]
                if expert not in chosen:
                    chosen.append(expert)
            run_layer(control, layer, chosen, dice=dice)
            naive[layer % count].token([layer * experts + e for e in chosen])
    hits = sum(one.decode.hits for one in control.counters)
    assert hits == sum(cache.hits for cache in naive)
    assert 0 < hits < 400 * layers * top_k
    assert {e for cache in naive for e in cache.order} == {
        layer * experts + e for layer in range(layers) for e in kept(control, layer)
    }


@pytest.mark.parametrize(("system", "order", "preemption"), ways())
@pytest.mark.parametrize("segments", [1, 2, 4])
def test_invariants_hold_whatever_happens(system: str, segments: int, order: str, preemption: str) -> None:
    """Random batches, rings down to one segment, any order of arrival: checked after every event."""
    for ring in (1, 3, None):
        for share in (0.2, 0.6, 1.0):
            dice = random.Random(f"{ring} {order} {share}")
            control = scheduler(geometry(3, 8, 2, segments), share, system, ring, order, preemption)
            for _ in range(12):
                for layer in range(3):
                    chosen = dice.sample(range(8), dice.choice([2, 2, 5, 8]))
                    tokens = [dice.randint(0, 3) for _ in chosen]
                    flags = [dice.random() < 0.6 for _ in chosen]
                    run_layer(control, layer, chosen, tokens=tokens, decode=flags, dice=dice, check=True)


@pytest.mark.parametrize("segments", [1, 4])
def test_a_layer_abandoned_at_any_moment_leaves_a_cache_that_works(segments: int) -> None:
    dice = random.Random(5)
    control = scheduler(geometry(2, 8, 2, segments), 0.6)
    for _ in range(200):
        chosen = dice.sample(range(8), dice.choice([2, 4, 8]))
        step = control.begin_layer(RouterRan(0, chosen, [1] * len(chosen), [dice.random() < 0.5] * len(chosen), 1))
        ready, loading = list(step.ready), list(step.loads)
        for _ in range(dice.randrange(6)):  # some events, then the failure
            if loading and dice.random() < 0.6:
                span = loading.pop(0)
                control.loaded(span)
            elif ready:
                span = ready.pop(0)
            else:
                break
            following = control.computed(span)
            if following is not None:
                ready += following.ready
                loading += following.loads
        control.abandon()
        control.check()
        run_layer(control, 1, dice.sample(range(8), 2), dice=dice, check=True)
        run_layer(control, 0, dice.sample(range(8), 2), dice=dice, check=True)


def test_a_loaded_span_whose_computation_failed_is_kept_only_if_admitted() -> None:
    control = scheduler(geometry(1, 8, 2), 2 / 8)  # the ring alone
    step = control.begin_layer(RouterRan(0, [0, 1], [1, 1], [True, True], 1))
    control.loaded(step.loads[0])
    control.abandon()
    control.check()
    assert kept(control, 0) == set()
