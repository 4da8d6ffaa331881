"""Layers that keep the tops of experts: the rest passes, what is kept changes while they run, and nothing is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan, Span
from expertly.policies.allocation.moepic import LayerSplit, MoEpic, SplitPlan
from expertly.policies.eviction import EVICTIONS
from expertly.scheduler.budget import split_budget
from expertly.scheduler.decisions import JournaledScheduler, replay
from expertly.scheduler.loop import Prefetcher
from expertly.scheduler.loop import run_layer as loop_layer
from expertly.scheduler.observations import InlineChannel
from expertly.scheduler.presets import get_system
from expertly.scheduler.scheduler import Scheduler
from tests.scheduler.ahead import CheckedController
from tests.scheduler.drive import WAYS, geometry, run_layer, scheduler
from tests.scheduler.links import Failure, InstantLink, RandomLink
from tests.scheduler.test_ahead import BUDGETS, LAYERS, RandomGuesses, nothing_seen, random_router


def random_plan(dice: random.Random, control: Scheduler) -> SplitPlan:
    """Any splits that fit what is kept: parts of many, few whole ones, nothing."""
    shape, left = control.geometry, list(control.budget.kept_slots)
    layers: dict[int, LayerSplit] = {}
    for layer in dice.sample(range(shape.num_layers), shape.num_layers):
        size_class, one = shape.size_classes[layer], shape.layers[layer]
        top = dice.randint(1, shape.segments_per_expert)
        num = dice.randint(0, min(one.num_experts, left[size_class] // top))
        most = min(left[size_class], one.num_experts * shape.segments_per_expert)
        share = dice.choice([num * top, most])
        left[size_class] -= share
        layers[layer] = LayerSplit(num, top if num else 0, share)
    return SplitPlan(shape, tuple(layers[layer] for layer in range(shape.num_layers)))


def soak(
    seed: str,
    segments: int,
    share: float,
    ring: int | None = None,
    *,
    eviction: str = "lcp",
    failures: float = 0.0,
    num_iterations: int = 8,
    **way: Any,
) -> set[str]:
    """Demands, guesses, failures and plans by dice; `check()` after every event, and all is decided again from what was
    said. What happened on the way is named.
    """
    dice = random.Random(seed)
    shape = Geometry(LAYERS, segments)
    kinds = [dice.choice(["token", "token", "token", "prefill", "mixed"]) for _ in range(num_iterations)]
    routers = [random_router(dice, layer, one, kind) for kind in kinds for layer, one in enumerate(LAYERS)]
    budget, lines = split_budget(shape, int(shape.nbytes * share), ring), []

    def make(kind: type[JournaledScheduler]) -> JournaledScheduler:
        allocation = MoEpic(shape)
        return kind(shape, budget, lambda num: EVICTIONS[eviction].make(shape, num), allocation=allocation, **way)

    control = make(CheckedController)
    assert isinstance(control, CheckedController)
    control.watch().start_journal({}, lines.append)
    link, happened = RandomLink(dice, dice.choice([0.1, 0.4, 0.8])), set()
    guesses = RandomGuesses(dice, shape, routers)
    loads_ahead = Prefetcher(control, link, InlineChannel(guesses))
    link.fails = lambda: dice.random() < failures

    def compute(span: Span) -> None:
        control.keeper.check()
        if dice.random() < failures:
            raise Failure

    for step, router in enumerate(routers):
        guesses.step = step
        try:
            if router.layer == 0:
                loads_ahead.begin_iteration(nothing_seen)
            loop_layer(control, link, router, compute, loads_ahead)
        except Failure:
            link.drop()
            control.abandon()
        control.check()
        if dice.random() < 0.3:
            plan = random_plan(dice, control)
            control.configure(plan)
            control.check()
        keeper = control.keeper
        if control.speculation.num_in_flight:
            happened.add("in flight")
        happened.add("there" if keeper.targets is None else "on the way")
        if any(keeper.unkept(keeper._geometry.layer_of_expert(eid), eid) for eid in control.speculation.waiting):
            happened.add("passing")
        if any(0 < top.bit_count() < segments for top in keeper.tops):
            happened.add("tops")
    if not failures:
        control.counts_agree()
    again = make(JournaledScheduler)
    assert replay(lines[1:], again, "journal").difference is None
    assert again.keeper.shares == control.keeper.shares and again.keeper.tops == control.keeper.tops
    return happened


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("ahead", ["cache", "ring"])
@pytest.mark.parametrize(("eviction", "admission"), [("lcp", "always"), ("random", "always"), ("lcp", "best")])
def test_whatever_is_kept_of_experts_every_promise_holds(
    segments: int, ahead: str, eviction: str, admission: str
) -> None:
    happened: set[str] = set()
    for share, ring in BUDGETS:
        for failures in (0.0, 0.02):
            some = {"eviction": eviction, "admission": admission, "ahead": ahead, "failures": failures}
            happened |= soak(f"{share} {failures}", segments, share, ring, **some)  # type: ignore[arg-type]
    of_parts = {"tops", "passing"} if segments > 1 else {"passing"} if ahead == "ring" else set()
    assert happened == {"in flight", "on the way", "there"} | of_parts


@pytest.mark.parametrize(("order", "preemption"), WAYS)
@pytest.mark.parametrize("transfer", ["asynchronous", "synchronous"])
def test_however_a_layer_runs_they_hold(order: str, preemption: str, transfer: str) -> None:
    for share, ring in BUDGETS:
        for ahead in ("cache", "ring"):
            way = {"order": order, "preemption": preemption, "transfer": transfer, "ahead": ahead}
            assert "tops" in soak(f"{share}", 4, share, ring, num_iterations=5, **way)


# -- stories -------------------------------------------------------------------------------------------------------


def split_scheduler(share: float, theta: float, system: str = "lcp", **shape: int) -> Scheduler:
    """4 segments an expert; the ring is of 8."""
    spec = f"{system}:allocation=split:theta={theta}"
    return scheduler(geometry(**({"layers": 1, "experts": 8, "top_k": 2, "segments": 4} | shape)), share, spec)


def test_what_is_kept_of_an_expert_is_its_top_and_the_rest_passes() -> None:
    """8 + 8 slots. Theta 1/2 keeps four tops of two segments, where whole experts would be two."""
    control = split_scheduler(16 / 32, 0.5)
    assert (control.keeper.shares, control.keeper.ring) == ([8], [8])
    for pair in ([0, 1], [2, 3]):
        ran = run_layer(control, 0, pair, check=True)
        assert ran.loaded == dict.fromkeys(pair, 0b1111), "all of them was missing"
    assert control.residency.resident[:8] == [0b0011] * 4 + [0] * 4
    ran = run_layer(control, 0, [0, 4], check=True)
    assert ran.loaded == {0: 0b1100, 4: 0b1111}, "of what is kept only the rest is loaded"
    assert control.residency.resident[:8] == [0b0011, 0, 0b0011, 0b0011, 0b0011, 0, 0, 0], "expert 1's top went"
    counts = control.counters[0].decode
    assert (counts.hits, counts.partial_hits, counts.misses) == (0, 1, 5)
    assert counts.hit_nbytes * 2 == control.geometry.layers[0].expert_nbytes


def test_the_best_tops_are_kept_and_what_is_worth_less_passes_whole() -> None:
    """Four tops of two are kept. Of those and what is needed the lowest goes: that of the three used once first in the
    list of ids, which is needed here, so that its top passes with the rest.
    """
    control = split_scheduler(16 / 32, 0.5, "lfu:admission=best")
    for pair in ([1, 2], [3, 4], [1, 2], [3, 4]):
        run_layer(control, 0, pair, check=True)
    assert control.residency.resident[:8] == [0] + [0b0011] * 4 + [0] * 3
    ran = run_layer(control, 0, [0, 1], check=True)
    assert ran.loaded == {0: 0b1111, 1: 0b1100}
    assert control.residency.resident[:8] == [0] + [0b0011] * 4 + [0] * 3, "nobody's top went for it"
    for _ in range(3):
        run_layer(control, 0, [0, 5], check=True)
    assert control.residency.resident[:3] == [0b0011, 0b0011, 0], "used as often as 2, and more often then"
    counts = control.counters[0].decode
    assert counts.partial_hits and not counts.hits


def test_of_what_is_predicted_what_is_lacking_is_loaded_and_a_hit_then() -> None:
    control = split_scheduler(16 / 32, 0.5, "lcp:prediction=lookahead:ahead=ring")
    run_layer(control, 0, [0, 1])
    control.predict(Prediction(0, [0, 2, 1], [0.9, 0.8, 0.7], 1))
    spans = control.load_ahead()
    told = [(span.expert, span.segment) for span in spans]
    assert told == [(0, 2), (0, 3), (2, 0), (2, 1), (2, 2), (2, 3)], "8 of the ring, of which one stays free: no 1"
    for span in spans:
        control.loaded(span)
    control.check()
    step = control.begin_layer(RouterRan(0, [0, 2], [1, 1], [True, True], 1))
    assert not step.loads and not step.joined
    assert sum(span.num_segments for span in step.ready) == 8
    for span in step.ready:
        control.computed(span)
    control.end_layer()
    control.check()
    assert control.residency.resident[:4] == [0b0011] * 3 + [0], "2 was loaded ahead, and its top is kept now"
    assert control.counters[0].decode.hits == 2


def test_a_wrong_guess_leaves_the_ring_and_the_top_stays() -> None:
    control = split_scheduler(16 / 32, 0.5, "lcp:prediction=lookahead:ahead=ring")
    run_layer(control, 0, [0, 1])
    control.predict(Prediction(0, [0], [0.9], 1))
    for span in control.load_ahead():
        control.loaded(span)
    assert control.residency.resident[0] == 0b1111 and control.keeper.passing == [2]
    run_layer(control, 0, [1, 2], check=True)
    assert control.residency.resident[:3] == [0b0011] * 3 and control.keeper.passing == [0]


def test_all_but_a_segment_of_the_ring_can_be_loaded_ahead_of_the_next_layer_and_nothing_waits_for_ever() -> None:
    """The guesses are wrong and on their way: the demand comes a segment at a time, as they leave."""
    control = split_scheduler(8 / 32, 0.5, "lcp:prediction=lookahead:ahead=ring:window=99", layers=2, experts=4)
    assert (control.keeper.shares, control.keeper.ring) == ([0, 0], [8])
    run_layer(control, 0, [0, 1])
    control.predict(Prediction(1, [0, 1], [0.9, 0.8], 1))
    spans = control.load_ahead()
    assert sum(span.num_segments for span in spans) == 4, "the second expert would leave none"
    link = RandomLink(random.Random(0))
    link.submit_ahead(spans)
    computed: list[Span] = []
    control.predict(Prediction(0, [2], [0.9], 2))
    assert control.load_ahead() == [], "of a layer that is not next, an expert's worth stays free"
    link.begun, link.ahead = link.ahead, []
    loop_layer(
        control, link, RouterRan(1, [2, 3], [1, 1], [True, True], 1), computed.append, Prefetcher(control, link, Mute())
    )
    assert sum(span.num_segments for span in computed) == 8


class Mute(InlineChannel):
    """Predicts nothing."""

    def __init__(self) -> None:
        pass

    def begin_iteration(self, *_: Any) -> None:
        pass

    def router_ran(self, *_: Any) -> None:
        pass

    def take(self) -> None:
        return None


def test_other_splits_take_place_between_layers() -> None:
    """Kept: tops of 2 of four experts. Then of 3 segments of two: what is there stays in part, the least used goes, and
    what is needed next is filled. Then of 1 of eight: what lies beyond goes at once.
    """
    control = split_scheduler(16 / 32, 0.5)
    control.allocation.configured = lambda plan: None  # type: ignore[method-assign]
    for pair in ([0, 1], [2, 3], [2, 3]):
        run_layer(control, 0, pair)
    shape = control.geometry
    control.configure(SplitPlan(shape, (LayerSplit(2, 3, 8),)))
    control.check()
    assert (control.keeper.shares, control.keeper.ring) == ([6], [10]), "what is left of the share widens the ring"
    assert control.residency.resident[:4] == [0, 0b0011, 0b0011, 0b0011]
    ran = run_layer(control, 0, [2, 3], check=True)
    assert ran.loaded == {2: 0b1100, 3: 0b1100}
    assert control.residency.resident[:4] == [0, 0, 0b0111, 0b0111]
    control.configure(SplitPlan(shape, (LayerSplit(8, 1, 8),)))
    control.check()
    assert control.residency.resident[:4] == [0, 0, 0b0001, 0b0001] and control.keeper.targets is None
    run_layer(control, 0, list(range(8)), decode=False, check=True)
    assert control.residency.resident[:8] == [0b0001] * 8, "a prompt fills the share there is now"


def test_what_is_loaded_ahead_is_not_cut_before_it_is_used() -> None:
    control = split_scheduler(16 / 32, 1.0, "lcp:prediction=lookahead")
    control.allocation.configured = lambda plan: None  # type: ignore[method-assign]
    run_layer(control, 0, [0, 1])
    control.predict(Prediction(0, [0], [0.9], 1))
    control.load_ahead()
    control.configure(SplitPlan(control.geometry, (LayerSplit(5, 1, 5),)))
    control.check()
    assert control.residency.resident[:2] == [0b1111, 0b0001] and control.keeper.targets == [5]
    run_layer(control, 0, [0, 2])
    control.keeper.rearrange(set())
    control.check()
    assert control.residency.resident[:3] == [0b0001, 0, 0b0001] and control.keeper.targets is None


@pytest.mark.parametrize("layers", [(LayerSplit(8, 2, 16),), (LayerSplit(1, 1, 1),) * 2])
def test_a_plan_that_does_not_fit_changes_nothing(layers: tuple[LayerSplit, ...]) -> None:
    control = scheduler(geometry(layers=1, experts=8, top_k=2, segments=4), 0.5, "moepic")
    before = list(control.keeper.shares)
    with pytest.raises(ConfigError):
        control.configure(SplitPlan(geometry(layers=len(layers), experts=8, top_k=2, segments=4), layers))
    assert control.keeper.shares == before and control.keeper.targets is None and control.keeper.tops == [0b0011]


def test_an_allocation_that_asked_for_no_plan_takes_none() -> None:
    control = split_scheduler(0.5, 0.5)
    with pytest.raises(ConfigError, match="takes none; accepted: allocation=moepic"):
        control.configure(SplitPlan(control.geometry, (LayerSplit(1, 1, 1),)))


# -- the ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_whole_experts_are_what_the_policy_alone_keeps(share: float) -> None:
    """Theta 1: every decision, line by line, with and without guesses."""
    for spec, way in (("lcp", ""), ("lcp", ":prediction=lookahead"), ("lcp", ":prediction=lookahead:ahead=ring")):
        journals = []
        for allocation in ("", ":allocation=split:theta=1"):
            system, lines = get_system(f"{spec}{way}{allocation}"), []
            shape, dice = Geometry(LAYERS, 4), random.Random(share)
            budget = system.budget(shape, split_budget(shape, int(shape.nbytes * share)))
            control = system.journaled_scheduler(shape, budget)
            control.start_journal({}, lines.append)
            kinds = [dice.choice(["token", "token", "prefill", "mixed"]) for _ in range(20)]
            routers = [random_router(dice, layer, one, kind) for kind in kinds for layer, one in enumerate(LAYERS)]
            guesses = RandomGuesses(dice, shape, routers)
            link = RandomLink(dice)
            ahead = Prefetcher(control, link, InlineChannel(guesses)) if way else None
            for step, router in enumerate(routers):
                guesses.step = step
                loop_layer(control, link, router, lambda span: None, ahead)
            journals.append(lines)
        assert len(journals[0]) > 300 and journals[0] == journals[1]


def test_with_nothing_kept_hits_are_what_was_loaded_ahead() -> None:
    shape = geometry(layers=3, experts=8, top_k=2, segments=4)
    system = get_system("moepic")
    control = system.scheduler(shape, system.budget(shape, split_budget(shape, shape.nbytes // 2)))
    control.configure(SplitPlan(shape, (LayerSplit(0, 0, 0),) * 3))
    assert control.keeper.ring == [shape.num_experts * 4 // 2], "all of it is the ring"
    dice, link, hits = random.Random(0), InstantLink(), 0
    ahead = Prefetcher(control, link, Mute())
    for step in range(60):
        chosen = dice.sample(range(8), 2)
        if step % 2:
            control.predict(Prediction(step % 3, chosen, [0.9, 0.8], 1))
            ahead.refill()
            hits += 2
        loop_layer(control, link, RouterRan(step % 3, chosen, [1, 1], [True, True], 1), lambda span: None, ahead)
        control.check()
    assert sum(one.decode.hits for one in control.counters) == hits
    assert not any(control.residency.resident), "nothing stays"
