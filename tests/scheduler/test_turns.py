"""How a layer runs, as stories: what its experts wait for, when a missing one is found, and who goes first."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from expertly.core.messages import Plan, Prediction, RouterRan, Span
from expertly.core.observation import Began, Routed
from expertly.policies.predictor.base import Predictor
from expertly.scheduler.loop import Prefetcher, run_layer
from expertly.scheduler.observations import InlineChannel
from tests.scheduler.drive import geometry
from tests.scheduler.links import InstantLink
from tests.scheduler.test_ahead_stories import made, one_token, prediction, run


class Said(Predictor):
    """Says what it was given, when that layer's router speaks; -1: when a pass begins."""

    def __init__(self, **of_layer: list[Prediction]) -> None:
        super().__init__()
        self.of_layer = {int(layer.removeprefix("after_")): said for layer, said in of_layer.items()}

    def begin_iteration(self, began: Began) -> list[Prediction]:
        return self.of_layer.get(-1, [])

    def router_ran(self, routed: Routed) -> list[Prediction]:
        return self.of_layer.get(routed.layer, [])


class SlowLink(InstantLink):
    """Begins when it is waited for, one span at a time; keeps a diary."""

    def __init__(self) -> None:
        super().__init__()
        self.diary: list[str] = []

    def poll(self) -> Span | None:
        return None

    def wait(self) -> Span:
        self._begin()
        span = self._arrive()
        self.diary.append(f"load {span.layer}.{span.expert}")
        return span


def diary_of(predictor: Predictor, routers: list[RouterRan], share: int = 2, **way: Any) -> list[str]:
    """What was loaded and computed, in order, over two layers that keep `share` experts each, 0 and 1 at first."""
    control = made(geometry(layers=2, experts=8, top_k=2), [share] * 2, 2, **way)
    for layer in range(2):
        run(control, one_token(layer, [0, 1]))
    link = SlowLink()
    ahead = Prefetcher(control, link, InlineChannel(predictor))
    ahead.begin_iteration(lambda: Began(np.zeros(1, np.int64), np.zeros(1, np.bool_)))
    for router in routers:
        link.diary.append(f"router {router.layer}")
        run_layer(control, link, router, lambda span: link.diary.append(f"compute {span.layer}.{span.expert}"), ahead)
    control.counts_agree()
    return link.diary


def test_with_synchronous_transfer_experts_wait_for_what_is_predicted_of_their_router() -> None:
    said = {"after_0": [prediction(1, [5, 6])]}
    routers = [one_token(0, [0, 3]), one_token(1, [5, 7])]
    assert diary_of(Said(**said), routers, transfer="synchronous") == [
        *("router 0", "load 0.3", "load 1.5", "load 1.6", "compute 0.3", "compute 0.0"),
        *("router 1", "compute 1.5", "load 1.7", "compute 1.7"),
    ], "the demand first; and what it brought was computed, once"
    assert diary_of(Said(**said), routers) == [
        *("router 0", "compute 0.0", "load 0.3", "compute 0.3"),
        *("router 1", "load 1.5", "compute 1.5", "load 1.7", "compute 1.7"),
    ], "5 had not begun when its layer's router spoke"


def test_what_is_predicted_as_a_pass_begins_is_there_before_the_first_experts() -> None:
    said = {"after_-1": [prediction(1, [5])]}
    diary = diary_of(Said(**said), [one_token(0, [0, 1]), one_token(1, [5, 0])], transfer="synchronous")
    assert diary[:3] == ["router 0", "load 1.5", "compute 0.0"]


def test_found_late_experts_come_one_at_a_time() -> None:
    router = one_token(0, [4, 0, 2])
    assert diary_of(Said(), [router]) == [
        "router 0",
        "compute 0.0",
        *("load 0.4", "compute 0.4"),
        "load 0.2",
        "compute 0.2",
    ]
    late = diary_of(Said(), [router], preemption="late")
    assert late == ["router 0", "compute 0.0", "load 0.4", "compute 0.4", "load 0.2", "compute 0.2"]
    by_id = diary_of(Said(), [router], preemption="late", order="id")
    assert by_id == ["router 0", "compute 0.0", "load 0.2", "compute 0.2", "load 0.4", "compute 0.4"]


def test_found_late_a_demand_is_not_made_before_its_turn() -> None:
    control = made(geometry(layers=1, experts=8, top_k=2), [2], 2, preemption="late")
    step = control.begin_layer(one_token(0, [4, 2]))
    assert [span.expert for span in step.loads] == [4] and not step.asked
    control.loaded(step.loads[0])
    following = control.computed(step.loads[0])
    assert following is not None and [span.expert for span in following.loads] == [2]


def test_by_id_and_early_what_is_missing_is_asked_for_at_once_and_computed_in_its_turn() -> None:
    control = made(geometry(layers=1, experts=8, top_k=2), [4], 2, order="id")
    step = control.begin_layer(one_token(0, [6, 2, 4]))
    assert [span.expert for span in step.loads] == [2] and [span.expert for span in step.asked] == [4, 6]
    assert not control.loaded(step.asked[1]) and control.loaded(step.loads[0]), "6 has come, but 2 is on"
    following = control.computed(step.loads[0])
    assert following == Plan(joined=[step.asked[0]]), "4 is on its way"
    assert control.loaded(step.asked[0])
    assert control.computed(step.asked[0]) == Plan(ready=[step.asked[1]])
    assert control.computed(step.asked[1]) is None
    control.end_layer()


def test_by_id_what_went_for_an_expert_before_is_loaded_again_in_its_turn() -> None:
    """Two kept, 4 and 5; 0 and 1 go first, and take their places."""
    control = made(geometry(layers=1, experts=8, top_k=2), [2], 2, order="id")
    run(control, one_token(0, [4, 5]))
    step = control.begin_layer(one_token(0, [0, 1, 4, 5]))
    assert [span.expert for span in (*step.loads, *step.asked)] == [0, 1]
    loaded = []
    todo, asked = [*step.loads], [*step.asked]
    for span in asked:
        assert not control.loaded(span)
    while todo:
        span = todo.pop(0)
        if span not in asked:
            loaded.append(span.expert)
            assert control.loaded(span)
        following = control.computed(span)
        todo += [] if following is None else [*following.ready, *following.loads]
    control.end_layer()
    assert loaded == [0, 4, 5]
    assert control.counters[0].decode.hits == 2, "they were here when the router spoke"


def test_found_late_a_guess_goes_on_until_its_expert_is_reached_and_is_a_demand_from_then_on() -> None:
    """5 and 6 are guessed for layer 0 and queued; 6 is needed, and 3, which is absent; 5 is not."""
    control = made(geometry(layers=1, experts=8, top_k=2), [4], 2, preemption="late")
    run(control, one_token(0, [0, 1]))
    control.predict(prediction(0, [5, 6]))
    five, six = control.load_ahead()
    step = control.begin_layer(one_token(0, [3, 6, 0]))
    assert [span.expert for span in step.ready] == [0] and not step.loads and not step.joined
    following = control.computed(step.ready[0])
    assert following == Plan(joined=[six]), "what is under way goes before what is absent"
    control.promote([six])
    assert control.loaded(six)
    following = control.computed(six)
    assert following is not None and [span.expert for span in following.loads] == [3]
    assert control.loaded(following.loads[0])
    control.computed(following.loads[0])
    assert control.stale() == [5]
    control.end_layer([five])
    counters = control.counters[0].decode
    assert (counters.prefetched, counters.prefetched_nbytes, counters.wasted_nbytes) == (0, 0, 0), (
        "none was loaded ahead"
    )
    assert counters.loaded_nbytes == 4 * control.geometry.layers[0].expert_nbytes
    control.counts_agree()


def test_found_late_what_comes_for_nothing_is_free_again() -> None:
    control = made(geometry(layers=1, experts=8, top_k=2), [0], 3, ahead="ring", preemption="late")
    control.predict(prediction(0, [5, 6]))
    five, six = control.load_ahead()
    step = control.begin_layer(one_token(0, [6]))
    assert step.joined == [six]
    assert not control.loaded(five)
    assert control.residency.pool_of(0).num_free == 2, "of 5"
    assert control.loaded(six)
    control.computed(six)
    control.end_layer()
    assert control.counters[0].decode.wasted_nbytes == control.geometry.layers[0].expert_nbytes


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_in_the_default_order_late_loads_and_keeps_what_early_does(kind: str) -> None:
    """Only the moment differs."""
    dice = random.Random(kind)
    controls = [
        made(geometry(layers=2, experts=8, top_k=2, segments=2), [5, 6], 4, preemption=p) for p in ("early", "late")
    ]
    for step in range(200):
        is_decode = kind == "decode" or step % 3 > 0
        router = one_token(step % 2, dice.sample(range(8), dice.choice([2, 3, 6])), is_decode)
        for control in controls:
            run(control, router)
    early, late = controls
    for one, other in zip(early.counters, late.counters, strict=True):
        assert one.decode == other.decode and one.prefill == other.prefill
    assert early.caches[0].kept == late.caches[0].kept and early.counters[0].decode.hits > 0
