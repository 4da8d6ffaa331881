"""A layer that fails, at any event, of any system: what is left passes every check and decides as well as before."""

from __future__ import annotations

import random

import pytest

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import RouterRan
from expertly.scheduler.scheduler import Scheduler
from tests.scheduler.drive import geometry, kept, run_layer, scheduler, ways


def fail_after(control: Scheduler, router: RouterRan, num_events: int, dice: random.Random) -> bool:
    """Run a layer for so many events, then abandon it; False when it came to its end before."""
    step = control.begin_layer(router)
    ready, loading = list(step.ready), step.loads + step.joined
    for _ in range(num_events):
        if loading and (not ready or dice.random() < 0.5):
            span = loading.pop(dice.randrange(len(loading)))
            control.loaded(span)
            if dice.random() < 0.3:
                continue  # arrived, and its computation fails
        elif ready:
            span = ready.pop(dice.randrange(len(ready)))
        else:
            break
        following = control.computed(span)
        if following is not None:
            ready += following.ready
            loading += following.loads + following.joined
    control.abandon()
    control.check()
    return bool(ready or loading)


@pytest.mark.parametrize(("system", "order", "preemption"), ways())
def test_any_layer_may_fail_at_any_event(system: str, order: str, preemption: str) -> None:
    small, large = LayerGeometry(6, 2, 4, 16, 3, 2), LayerGeometry(10, 3, 4, 32, 3, 2)
    failures = 0
    for segments in (1, 2, 4):
        for ring, share in ((1, 0.1), (1, 0.6), (3, 0.5), (None, 0.4), (None, 0.9)):
            shape = Geometry((small, large, large), segments)
            control = scheduler(shape, share, system, ring, order, preemption)
            dice = random.Random(f"{segments} {ring} {share}")
            for _ in range(40):
                layer = dice.randrange(3)
                one = shape.layers[layer]
                chosen = dice.sample(range(one.num_experts), dice.choice([one.top_k, one.num_experts]))
                tokens = [dice.randint(0, 3) for _ in chosen]
                decode = [dice.random() < 0.6 for _ in chosen]
                failures += fail_after(control, RouterRan(layer, chosen, tokens, decode, 4), dice.randrange(12), dice)
                run_layer(control, layer, chosen, tokens=tokens, decode=decode, dice=dice, check=True)
    assert failures > 100


def test_what_arrived_before_the_failure_is_a_hit_afterwards_and_what_did_not_is_a_miss() -> None:
    control = scheduler(geometry(layers=1, experts=8, top_k=2), 6 / 8)
    step = control.begin_layer(RouterRan(0, [3, 5], [1, 1], [True, True], 1))
    assert [span.expert for span in step.loads] == [3, 5]
    control.loaded(step.loads[0])
    control.abandon()
    control.check()
    assert kept(control, 0) == {3}
    assert list(run_layer(control, 0, [3, 5], check=True).loaded) == [5]


def test_a_victim_of_a_failed_layer_is_gone_and_its_place_is_free() -> None:
    control = scheduler(geometry(layers=1, experts=8, top_k=2), 4 / 8)
    run_layer(control, 0, [0, 1])
    control.begin_layer(RouterRan(0, [6, 7], [1, 1], [True, True], 1))
    control.abandon()
    control.check()
    assert kept(control, 0) == set()
    assert control.caches[0].room == 2


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


def test_nothing_to_abandon_is_no_error() -> None:
    control = scheduler(geometry(), 0.5)
    control.abandon()
    control.check()
    assert not kept(control, 0)
    assert list(run_layer(control, 0, [1, 0], check=True).loaded) == [1, 0], "and it runs as if nothing had been"
