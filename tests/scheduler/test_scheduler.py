"""What the scheduler promises of loads, as stories."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from expertly.core.messages import Prediction, RouterRan, Span
from expertly.core.observation import Began, Routed
from expertly.policies.prediction import Predictor
from expertly.scheduler.cache import PREFETCHING
from expertly.scheduler.loop import Prefetcher
from expertly.scheduler.loop import run_layer as loop_layer
from tests.scheduler.drive import (
    control_planes,
    geometry,
    kept,
    made,
    one_token,
    prediction,
    routed,
    run_layer,
    scheduler,
)
from tests.scheduler.soak import InstantLink, nothing_seen


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
    assert control.cache.num_resident(0) == 2
    plan = control.begin_layer(RouterRan(0, [0, 1], [9, 1], [False, False], 9))
    assert [(span.expert, span.num_segments) for span in plan.loads] == [(0, 2)]
    for span in plan.ready:
        assert not control.computed([span]), "nothing fits yet"
    control.loaded(plan.loads[0])
    following = control.computed([plan.loads[0]])
    assert [(span.expert, span.num_segments) for span in following] == [(1, 4)]
    control.abandon()
    control.check()


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


class SayingAll(Predictor):
    """Predicts all four layers whenever it is told something."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[bool] = []

    def begin_iteration(self, began: Began) -> Iterable[Prediction]:
        return [Prediction(layer, [layer], [1.0], 4) for layer in range(4)]

    def router_ran(self, routed: Routed) -> Iterable[Prediction]:
        return [Prediction(layer, [4 + layer], [1.0], 4) for layer in range(4)]

    def end_iteration(self, ok: bool) -> None:
        self.ends.append(ok)


def test_layers_of_other_rows_are_left_out() -> None:
    """A layer without `routed` is no part of the pass."""
    predictor, link, stack = SayingAll(), InstantLink(), range(4)
    control = made(geometry(layers=4, experts=8, top_k=2), [4] * 4, 2)
    control.queue.window = 99
    prefetcher = Prefetcher(control, link, predictor)
    prefetcher.begin_iteration(nothing_seen)
    assert [(span.layer, span.expert) for span in link.submitted] == [(layer, layer) for layer in stack]
    router = one_token(stack[0], [stack[0]])
    for said, expected in ((None, []), (routed(router), [(layer, 4 + layer) for layer in stack])):
        link.submitted.clear()
        loop_layer(control, link, router, lambda spans: None, prefetcher, said)
        assert [(span.layer, span.expert) for span in link.submitted] == expected
    prefetcher.end_iteration(True)
    assert predictor.ends == [True]


class InOrder(InstantLink):
    """Brings everything in the order in which it was asked for, when it is waited for."""

    def poll(self) -> Span | None:
        return None

    def wait(self) -> Span:
        return self.demands.pop(0)


@pytest.mark.parametrize(
    ("system", "decode", "expected"),
    [
        ("lru", True, [(1, 0, 4), (2, 0, 4)]),  # what was kept of 1 waits for the rest of it
        ("lru", False, [(1, 0, 4), (2, 0, 4)]),
        ("lcp:allocation=split", True, [(1, 0, 2), (1, 2, 2), (2, 0, 4)]),
        ("lcp:allocation=split", False, [(1, 0, 4), (2, 0, 4)]),
    ],
)
def test_experts_that_come_in_segments_are_computed_whole_except_resident_tops(
    system: str, decode: bool, expected: list[tuple[int, int, int]]
) -> None:
    """Half of 1 is kept. The rest of it and all of 2 come in segments, in turns: (expert, first segment, segments)."""
    control = scheduler(geometry(layers=1, segments=4), 1 / 2, f"{system}:prediction=lookahead")
    transport, computed = InOrder(), list[Span]()
    half = control.cache.units(1)[:2]
    control.cache.keep([half])
    (top,) = control.cache.allocate(half, PREFETCHING)
    assert control.loaded(top) is None
    control.predict(prediction(0, [1, 2]))
    spans = control.prefetch()
    assert [(span.expert, span.num_segments) for span in spans] == [(1, 1)] * 2 + [(2, 1)] * 4
    transport.demands = [spans[0], *spans[2:4], spans[1], *spans[4:]]
    loop_layer(control, transport, one_token(0, [1, 2], decode), computed.extend)
    control.check()
    assert [(span.expert, span.segment, span.num_segments) for span in computed] == expected


@pytest.mark.parametrize("system", ["lru", "lfu", "lcp", "static", "resident", "expertly"])
@pytest.mark.parametrize("segments", [1, 2])
def test_what_ran_before_anybody_was_asked_counts_as_if_it_had_asked(system: str, segments: int) -> None:
    """A prompt between tokens stages experts: then there is something to decide again."""
    shape = geometry(layers=3, experts=8, top_k=2, segments=segments)
    share = 1.0 if system == "resident" else 0.6
    asked, ran = scheduler(shape, share, system), scheduler(shape, share, system)
    dice, num_ran = random.Random(3), 0
    for step in range(200):
        for layer in range(3):
            chosen, decode = dice.sample(range(4 if step % 3 else 8), 2), bool(step % 20)
            run_layer(asked, layer, chosen, decode=decode)
            first = shape.first_ids[layer]
            is_there = decode and None not in [ran.cache.whole[first + expert] for expert in chosen]
            if is_there and ran.count_ran([(layer, chosen, 0)]):
                num_ran += 1
            else:
                run_layer(ran, layer, chosen, decode=decode)
        ran.check()
        assert ran.counters == asked.counters
        assert ran.cache.residency() == asked.cache.residency()
    assert num_ran > 0
