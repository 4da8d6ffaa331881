"""Loading ahead, as stories: what is guessed, when it comes, and who gets the place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from expertly.core.geometry import Geometry
from expertly.core.messages import Plan, Prediction, RouterRan, Span
from expertly.core.observation import Began, Routed
from expertly.policies.eviction.fmoe import FMoEEviction
from expertly.policies.eviction.simple import LRU
from expertly.policies.predictor.base import Predictor
from expertly.policies.prefetch import ByProximity
from expertly.scheduler.budget import Budget, split_budget
from expertly.scheduler.decisions import JournaledScheduler, replay
from expertly.scheduler.loop import Prefetcher, run_layer
from expertly.scheduler.observations import InlineChannel
from expertly.scheduler.presets import SYSTEMS
from expertly.scheduler.scheduler import Scheduler
from tests.scheduler.ahead import CheckedController
from tests.scheduler.drive import WAYS, geometry, one_token
from tests.scheduler.links import InstantLink


def prediction(layer: int, experts: list[int], distance: int = 1) -> Prediction:
    return Prediction(layer, experts, [1.0 - 0.01 * i for i in range(len(experts))], distance)


def made(
    shape: Geometry, shares: list[int], ring: int, ahead: str = "cache", scope: str = "layer", **kwargs: Any
) -> CheckedController:
    """With so many kept segments a layer; LRU unless `kwargs` says otherwise."""
    budget = Budget(0, (ring,), (sum(shares),), tuple(shares))
    return CheckedController(shape, budget, lambda capacity: LRU(), scope=scope, ahead=ahead, **kwargs).watch()


def run(control: Scheduler, router: RouterRan, withdrawn: Sequence[Span] = (), joined: int = 0) -> Plan:
    """A layer to its end; what is loaded arrives in order."""
    step = control.begin_layer(router, withdrawn)
    assert len(step.joined) == joined
    finish(control, step)
    return step


def finish(control: Scheduler, step: Plan) -> None:
    todo = [(span, True) for span in step.ready] + [(span, False) for span in [*step.joined, *step.loads]]
    while todo:
        span, is_here = todo.pop(0)
        assert is_here or control.loaded(span)
        following = control.computed(span)
        if following is not None:
            todo += [(one, True) for one in following.ready]
            todo += [(one, False) for one in [*following.joined, *following.loads]]
    control.end_layer()


def test_a_right_guess_that_came_in_time_is_a_hit() -> None:
    shape = geometry(layers=2, experts=8, top_k=2)
    control = made(shape, [2, 2], 2)
    control.predict(prediction(1, [4, 6]))
    spans = control.load_ahead()
    assert [span.expert for span in spans] == [4, 6]
    for span in spans:
        assert not control.loaded(span), "nobody waits"
    run(control, one_token(0, [0, 1]))
    assert run(control, one_token(1, [6, 4])).loads == []
    rates = control.counters[1].decode.rates()
    assert [rates[name] for name in ("hit_rate", "coverage", "accuracy", "timeliness", "goodpred")] == [1, 1, 1, 1, 1]
    control.counts_agree()


def test_a_right_guess_that_comes_late_is_waited_for_and_not_loaded_again() -> None:
    shape = geometry(layers=2, experts=8, top_k=2, segments=2)
    control = made(shape, [4, 4], 4)
    control.predict(prediction(1, [4, 6]))
    spans = control.load_ahead()
    assert [(span.expert, span.segment, span.num_segments) for span in spans] == [
        (4, 0, 1),
        (4, 1, 1),
        (6, 0, 1),
        (6, 1, 1),
    ]
    control.loaded(spans[0])
    step = control.begin_layer(one_token(1, [4, 5]), withdrawn=spans[2:])
    assert step.ready == spans[:1] and step.joined == [spans[1]]
    assert [(span.expert, span.num_segments) for span in step.loads] == [(5, 2)]
    finish(control, step)
    counters = control.counters[1].decode
    assert (counters.hits, counters.partial_hits, counters.misses) == (0, 1, 1)
    assert (counters.prefetched, counters.prefetched_needed, counters.prefetched_in_time) == (1, 1, 0), (
        "6 was taken back"
    )
    assert counters.prefetched_nbytes == shape.layers[1].expert_nbytes
    assert counters.loaded_nbytes == 2 * shape.layers[1].expert_nbytes
    assert (counters.predicted, counters.predicted_needed, counters.by_distance) == (2, 1, {1: (2, 1, 0)})
    assert counters.rates()["accuracy"] == 1 and counters.rates()["timeliness"] == 0
    control.counts_agree()


def test_what_was_asked_for_in_prefill_and_taken_back_in_decode_is_taken_from_prefill() -> None:
    control = made(geometry(layers=2, experts=8, top_k=2), [2, 2], 2)
    run(control, one_token(0, [0, 1], decode=False))
    control.predict(prediction(1, [3]))
    spans = control.load_ahead()
    assert control.counters[1].prefill.prefetched_nbytes > 0
    run(control, one_token(1, [0, 1]), withdrawn=spans)
    for phase in (control.counters[1].prefill, control.counters[1].decode):
        assert phase.prefetched_nbytes == 0 and phase.loaded_nbytes >= 0 and phase.prefetched == 0
    control.counts_agree()


@pytest.mark.parametrize("order", ["resident", "id"])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_a_guess_still_on_its_way_after_its_layer_ran_is_not_evicted(scope: str, order: str) -> None:
    """Its slots are being written: whoever got them would find another expert's bytes in them."""
    control = made(geometry(layers=1, experts=8, top_k=2), [2], 2, scope=scope, order=order)
    control.predict(prediction(0, [5, 7]))
    spans = control.load_ahead()
    run(control, one_token(0, [0, 1]))  # the guess was wrong, and has begun
    run(control, one_token(0, [2, 3]))
    for span in spans:
        control.loaded(span)
    control.check()
    run(control, one_token(0, [5, 7]))
    assert control.counters[0].decode.hits == 2


@pytest.mark.parametrize("order", ["resident", "id"])
def test_demands_do_not_evict_what_was_loaded_ahead_for_a_later_layer(order: str) -> None:
    control = made(geometry(layers=2, experts=8, top_k=2), [1, 1], 2, scope="global", order=order)
    control.predict(prediction(1, [5, 6]))
    for span in control.load_ahead():
        control.loaded(span)
    run(control, one_token(0, [0, 1]))
    assert run(control, one_token(1, [5, 6])).loads == []
    assert control.counters[1].decode.hits == 2


def test_a_guess_does_not_cost_another_guess_its_place() -> None:
    """Least recently used of the kept 0, 1, 2 is 0: predicted as well as 5, so 1 goes for 5."""
    control = made(geometry(layers=1, experts=8, top_k=2), [3], 2)
    for expert in (0, 1, 2):
        run(control, one_token(0, [expert]))
    control.predict(prediction(0, [5, 0]))
    assert [span.expert for span in control.load_ahead()] == [5]
    assert set(control.caches[0].kept) == {0, 2, 5}


def test_a_wrong_guess_in_the_ring_gives_its_place_to_the_demand() -> None:
    """Ring of 2, nothing kept: 4 was loaded ahead, 0 and 1 are needed and both fit at once."""
    control = made(geometry(layers=1, experts=8, top_k=2), [0], 2, ahead="ring")
    control.predict(prediction(0, [4, 5]))
    spans = control.load_ahead()
    assert [span.expert for span in spans] == [4], "an expert's worth of the ring stays free"
    control.loaded(spans[0])
    step = control.begin_layer(one_token(0, [0, 1]))
    assert [span.expert for span in step.loads] == [0, 1]
    finish(control, step)


def test_the_newest_prediction_of_a_layer_counts() -> None:
    control = made(geometry(layers=2, experts=8, top_k=2), [2, 2], 2, window=1)
    control.predict(prediction(1, [4, 5], distance=2))
    assert [span.expert for span in control.load_ahead()] == [4], "the window is one segment"
    control.predict(prediction(1, [6, 7]))
    control.loaded(Span(1, 4, 0, 1, 0))
    assert [span.expert for span in control.load_ahead()] == [6]
    run(control, one_token(1, [4, 5]), joined=0)
    assert control.counters[1].decode.by_distance == {2: (2, 2, 1), 1: (2, 0, 0)}
    assert control.load_ahead() == [], "its router has spoken"


def test_a_guess_made_while_its_layer_runs_is_for_the_next_time() -> None:
    control = made(geometry(layers=1, experts=8, top_k=2), [0], 2, ahead="ring")
    step = control.begin_layer(one_token(0, [0, 1]))
    control.predict(prediction(0, [6]))
    assert control.load_ahead() == [], "the ring is the demand's"
    finish(control, step)
    (span,) = control.load_ahead()
    control.loaded(span)
    assert run(control, one_token(0, [6, 1])).ready == [span]


def test_what_came_ahead_through_the_ring_is_kept_when_it_is_needed() -> None:
    control = made(geometry(layers=1, experts=8, top_k=2), [2], 2, ahead="ring")
    run(control, one_token(0, [0, 1]))
    control.predict(prediction(0, [5]))
    (span,) = control.load_ahead()
    assert set(control.caches[0].kept) == {0, 1}, "a guess evicts nothing"
    control.loaded(span)
    assert run(control, one_token(0, [5])).loads == []
    assert set(control.caches[0].kept) == {1, 5}, "the use does"


def test_guesses_made_in_prefill_fill_and_evict_nothing() -> None:
    control = made(geometry(layers=2, experts=8, top_k=2), [2, 3], 2)
    for expert in (0, 1):
        run(control, one_token(1, [expert]))
    run(control, one_token(0, [0, 1, 2, 3], decode=False))
    control.predict(prediction(1, [5, 6]))
    assert [span.expert for span in control.load_ahead()] == [5]
    assert set(control.caches[1].kept) == {8, 9, 13}


def test_after_a_failure_nothing_is_predicted_or_on_its_way() -> None:
    control = made(geometry(layers=2, experts=8, top_k=2), [2, 2], 2, window=1)
    control.predict(prediction(1, [4, 5]))
    control.load_ahead()
    control.abandon()
    assert control.load_ahead() == []
    run(control, one_token(1, [4, 5]))
    counters = control.counters[1].decode
    assert (counters.predicted, counters.prefetched, counters.misses) == (0, 0, 2)


def test_low_scores_that_are_never_reached_do_not_pile_up() -> None:
    shape = geometry(layers=2, experts=64, top_k=2)
    control = SYSTEMS["lru"].scheduler(shape, split_budget(shape, shape.nbytes // 4))
    for step in range(2_000):
        layer = step % 2
        control.predict(Prediction(1 - layer, list(range(64)), [1.0 / (1 + i) for i in range(64)], 1))
        spans = control.load_ahead()
        finish(control, control.begin_layer(one_token(layer, [0, 1])))
        for span in spans:
            control.loaded(span)
    speculation = control.speculation
    assert sum(len(wanted) for wanted in speculation._wanted.values()) <= 2 * 64
    assert len(speculation._heads) < 100


def test_a_near_guess_is_loaded_before_a_surer_far_one() -> None:
    """Room for one segment at a time; probabilities 0.5 one layer ahead and 0.9 three ahead."""
    control = made(geometry(layers=4, experts=8, top_k=2), [2] * 4, 2, window=1, prefetch=ByProximity())
    control.predict(Prediction(2, [6], [0.9], 3))
    control.predict(Prediction(0, [5], [0.5], 1))
    (span,) = control.load_ahead()
    assert (span.layer, span.expert) == (0, 5)
    control.loaded(span)
    control.predict(Prediction(3, [1], [0.6], 4))  # a quarter of it, when the iteration begins
    control.predict(Prediction(1, [4], [0.5], 2))
    run(control, one_token(0, [5, 0]))
    run(control, one_token(1, [0, 1]))
    control.predict(Prediction(0, [7], [0.75], 3))
    loaded = []
    for _ in range(3):  # two layers are done: 2 is next (0.9), then 3 (half of 0.6), then 0 of the next iteration
        (span,) = control.load_ahead()
        loaded.append((span.layer, span.expert))
        control.loaded(span)
    assert loaded == [(2, 6), (3, 1), (0, 7)]


def test_what_is_said_of_a_layer_says_what_goes() -> None:
    """One cache of four over two layers, frequencies equal: what the map of layer 1 holds least likely makes room."""
    shape = geometry(layers=2, experts=4, top_k=2)
    control = CheckedController(
        shape, Budget(0, (2,), (4,), (2, 2)), lambda capacity: FMoEEviction(), scope="global"
    ).watch()
    run(control, one_token(0, [0, 1]))
    run(control, one_token(1, [0, 1]))
    control.predict(Prediction(0, [2], [0.8], 1, 0.9, [0.15, 0.05, 0.8, 0.0]))
    control.predict(Prediction(1, [0], [0.6], 2, 0.9, [0.6, 0.1, 0.3, 0.0]))
    assert [(span.layer, span.expert) for span in control.load_ahead()] == [(0, 2)]
    assert set(control.caches[0].kept) == {0, 2, 4, 5}, "1 went: 0.05; what is predicted and here stays"


def test_a_prediction_that_came_too_late_still_says_what_goes() -> None:
    """The same cache; the second map of layer 0 comes when that layer has run, and makes 1 likelier than 0."""

    class Late(Predictor):
        def router_ran(self, routed: Routed) -> list[Prediction]:
            late = Prediction(0, [1], [0.9], 0, 0.9, [0.05, 0.15, 0.8, 0.0])
            sure = Prediction(1, [0], [0.6], 1, 0.9, [0.6, 0.1, 0.3, 0.0])
            return [late, sure] if routed.layer == 0 else []

    shape = geometry(layers=2, experts=4, top_k=2)
    lines: list[str] = []
    budget = Budget(0, (2,), (4,), (2, 2))

    def new() -> JournaledScheduler:
        return JournaledScheduler(shape, budget, lambda capacity: FMoEEviction(), scope="global")

    control = new()
    control.start_journal({}, lines.append)
    run(control, one_token(0, [0, 1]))
    run(control, one_token(1, [0, 1]))
    control.predict(Prediction(0, [1], [0.2], 1, 0.9, [0.15, 0.05, 0.8, 0.0]))
    link = InstantLink()
    ahead = Prefetcher(control, link, InlineChannel(Late()))
    ahead.begin_iteration(lambda: Began(np.zeros(1, np.int64), np.zeros(1, np.bool_)))
    run_layer(control, link, one_token(0, [0, 1]), lambda span: None, ahead)
    assert ahead.num_late == 1
    assert set(control.caches[0].kept) == {0, 1, 4, 5}
    control.predict(Prediction(0, [2], [0.8], 2, 0.9))  # says nothing of the others
    assert [(span.layer, span.expert) for span in control.load_ahead()] == [(0, 2)]
    assert set(control.caches[0].kept) == {1, 2, 4, 5}, "0 went: 0.05"
    said = [[0, [1], [0.9], 0, 0.9, [0.05, 0.15, 0.8, 0.0]]]
    assert [json.loads(line)[1] for line in lines if line.startswith('["foresee"')] == said
    assert replay(lines[1:], new(), "here").difference is None
    without = [line for line in lines[1:] if not line.startswith('["foresee"')]
    assert replay(without, new(), "here").difference is not None


def test_a_layer_that_nobody_chose_an_expert_in() -> None:
    for order, preemption in WAYS:
        control = made(geometry(), [2, 2], 2, order=order, preemption=preemption)
        assert run(control, RouterRan(0, [], [], [], 0)) == Plan()
