"""How a layer runs, as stories: what its experts wait for, when a missing one is found, and who goes first."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from expertly.core.messages import Plan, Prediction, RouterRan, Span
from expertly.core.observation import Began, Routed
from expertly.policies.predictor.base import Predictor
from expertly.scheduler.loop import Prefetcher, run_layer
from expertly.scheduler.observations import InlineChannel
from tests.scheduler.drive import geometry, made, one_token, prediction, routed, run, scheduler
from tests.scheduler.soak import InstantLink, nothing_seen


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
    prefetcher = Prefetcher(control, link, InlineChannel(predictor))
    prefetcher.begin_iteration(nothing_seen)

    def compute(spans: Sequence[Span]) -> None:
        link.diary.extend(f"compute {span.layer}.{span.expert}" for span in spans)

    for router in routers:
        link.diary.append(f"router {router.layer}")
        run_layer(control, link, router, compute, prefetcher, routed(router))
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


def test_predictions_made_when_a_pass_begins_arrive_before_the_first_experts() -> None:
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


def test_by_id_and_early_missing_experts_are_requested_at_once_and_computed_in_turn() -> None:
    control = made(geometry(layers=1, experts=8, top_k=2), [4], 2, order="id")
    plan = control.begin_layer(one_token(0, [6, 2, 4]))
    assert [span.expert for span in plan.loads] == [2] and [span.expert for span in plan.requested] == [4, 6]
    assert not control.loaded(plan.requested[1]) and control.loaded(plan.loads[0]), "6 has come, but 2 is on"
    following = control.computed([plan.loads[0]])
    assert following == Plan(in_flight=[plan.requested[0]]), "4 is on its way"
    assert control.loaded(plan.requested[0])
    assert control.computed([plan.requested[0]]) == Plan(ready=[plan.requested[1]])
    assert control.computed([plan.requested[1]]) is None
    control.end_layer()


def test_by_id_an_expert_evicted_for_an_earlier_turn_is_loaded_again() -> None:
    """Two kept, 4 and 5; 0 and 1 go first, and take their places."""
    control = made(geometry(layers=1, experts=8, top_k=2), [2], 2, order="id")
    run(control, one_token(0, [4, 5]))
    plan = control.begin_layer(one_token(0, [0, 1, 4, 5]))
    assert [span.expert for span in (*plan.loads, *plan.requested)] == [0, 1]
    loaded = []
    todo, asked = [*plan.loads], [*plan.requested]
    for span in asked:
        assert not control.loaded(span)
    while todo:
        span = todo.pop(0)
        if span not in asked:
            loaded.append(span.expert)
            assert control.loaded(span)
        following = control.computed([span])
        todo += [] if following is None else [*following.ready, *following.loads]
    control.end_layer()
    assert loaded == [0, 4, 5]
    assert control.counters[0].decode.hits == 2, "they were here when the router spoke"


def test_found_late_a_prefetch_continues_until_its_expert_has_its_turn_and_is_a_load_from_then_on() -> None:
    """5 and 6 are prefetched for layer 0 and did not begin; 6 is needed, and 3, which is absent; 5 is not."""
    control = made(geometry(layers=1, experts=8, top_k=2), [4], 2, preemption="late")
    run(control, one_token(0, [0, 1]))
    control.predict(prediction(0, [5, 6]))
    five, six = control.prefetch()
    plan = control.begin_layer(one_token(0, [3, 6, 0]))
    assert [span.expert for span in plan.ready] == [0] and not plan.loads and not plan.in_flight
    following = control.computed([plan.ready[0]])
    assert following == Plan(in_flight=[six]), "what is under way goes before what is absent"
    control.promote([six])
    assert control.loaded(six)
    following = control.computed([six])
    assert following is not None and [span.expert for span in following.loads] == [3]
    assert control.loaded(following.loads[0])
    control.computed([following.loads[0]])
    assert control.cancellable() == [5]
    control.end_layer([five])
    counters = control.counters[0].decode
    assert (counters.prefetched, counters.prefetched_nbytes, counters.wasted_nbytes) == (0, 0, 0), (
        "none was loaded ahead"
    )
    assert counters.loaded_nbytes == 4 * control.geometry.layers[0].expert_nbytes
    control.counts_agree()


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
    assert early.cache.partitions[0].kept == late.cache.partitions[0].kept and early.counters[0].decode.hits > 0


# -- the loop ------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("layers", [range(2), range(2, 4), None])
def test_predictions_of_the_other_stack_and_layers_of_other_rows_are_left_out(layers: range | None) -> None:
    """An encoder runs layers 0 and 1, a decoder 2 and 3; a layer without `routed` is no part of the pass."""
    predictor, link, stack = SayingAll(), InstantLink(), layers or range(4)
    control = made(geometry(layers=4, experts=8, top_k=2), [4] * 4, 2, window=99)
    prefetcher = Prefetcher(control, link, InlineChannel(predictor))
    prefetcher.begin_iteration(nothing_seen, layers)
    assert [(span.layer, span.expert) for span in link.submitted] == [(layer, layer) for layer in stack]
    router = one_token(stack[0], [stack[0]])
    for said, expected in ((None, []), (routed(router), [(layer, 4 + layer) for layer in stack])):
        link.submitted.clear()
        run_layer(control, link, router, lambda spans: None, prefetcher, said)
        assert [(span.layer, span.expert) for span in link.submitted] == expected
    prefetcher.end_iteration(True)
    assert predictor.ends == [True]


class AtOnce:
    """Brings everything when it is waited for."""

    def __init__(self) -> None:
        self.coming: list[Span] = []
        self.submitted: list[Span] = []

    def submit(self, spans: Sequence[Span]) -> None:
        self.coming += spans
        self.submitted += spans

    def poll(self) -> Span | None:
        return None

    def wait(self) -> Span:
        return self.coming.pop(0)


@pytest.mark.parametrize("segments", [1, 4])
def test_computed_together_or_one_by_one_the_same_is_loaded_and_computed(segments: int) -> None:
    outcomes = []
    for together in (False, True):
        control = scheduler(geometry(segments=segments, top_k=3), 0.85)
        transport, dice, calls = AtOnce(), random.Random(0), list[list[Span]]()

        def compute(spans: Sequence[Span], calls: list[list[Span]] = calls) -> None:
            calls.append(list(spans))

        for number in range(200):
            router = one_token(number % control.geometry.num_layers, dice.sample(range(6), 3))
            run_layer(control, transport, router, compute, together=together)
            control.check()
        outcomes.append((transport.submitted, [span for spans in calls for span in spans]))
        assert (sum(len(spans) > 1 for spans in calls) > 20) == together
    assert outcomes[0] == outcomes[1], "in the same order, too"


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
    cache, slots = control.cache, control.slots
    transport, computed = AtOnce(), list[Span]()
    cache.keep(0, 1, 0b11)
    (top,) = cache.allocate(0, 1, 0b11, slots.awaited)
    assert control.loaded(top)
    control.predict(prediction(0, [1, 2]))
    spans = control.prefetch()
    assert [(span.expert, span.num_segments) for span in spans] == [(1, 1)] * 2 + [(2, 1)] * 4
    transport.coming = [spans[0], *spans[2:4], spans[1], *spans[4:]]
    run_layer(control, transport, one_token(0, [1, 2], decode), computed.extend)
    control.check()
    assert [(span.expert, span.segment, span.num_segments) for span in computed] == expected
