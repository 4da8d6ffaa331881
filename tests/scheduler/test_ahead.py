"""Loading ahead beside demands: whatever is guessed, whenever it comes, whoever fails."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Plan, Prediction, RouterRan, Span
from expertly.core.observation import Began, Routed
from expertly.policies.eviction import EVICTIONS
from expertly.policies.eviction.simple import LRU
from expertly.policies.known import Known
from expertly.policies.predictor.base import Predictor
from expertly.policies.prefetch import PREFETCHES
from expertly.scheduler.budget import split_budget
from expertly.scheduler.counters import PhaseCounters
from expertly.scheduler.decisions import JournaledScheduler, replay
from expertly.scheduler.loop import Prefetcher, run_layer
from expertly.scheduler.observations import InlineChannel
from expertly.scheduler.prefetch_filter import Gate
from expertly.scheduler.presets import SYSTEMS
from expertly.testing.made_up import ListFuture
from tests.scheduler.ahead import CheckedController
from tests.scheduler.drive import WAYS, geometry, one_token
from tests.scheduler.links import Failure, InstantLink, RandomLink

SMALL, LARGE = LayerGeometry(5, 2, 4, 16, 3, 2), LayerGeometry(8, 3, 4, 32, 3, 2)
LAYERS = (SMALL, LARGE, LARGE, SMALL)


def nothing_seen() -> Began:
    return Began(np.zeros(1, np.int64), np.zeros(1, np.bool_))


def random_router(dice: random.Random, layer: int, one: LayerGeometry, kind: str) -> RouterRan:
    num = one.top_k if kind == "token" else dice.randint(0 if kind == "mixed" else 1, one.num_experts)
    experts = dice.sample(range(one.num_experts), num)
    if kind == "token":
        return RouterRan(layer, experts, [1] * num, [True] * num, 1)
    tokens = [dice.choice([0, 1, 1, 2, 9]) for _ in experts]
    is_decode = [dice.random() < {"prefill": 0.0, "mixed": 0.5}[kind] for _ in experts]
    return RouterRan(layer, experts, tokens, is_decode, max(tokens, default=0))


class RandomGuesses(Predictor):
    """Predictions right, wrong or both, of any layer at all, the running one and the one just named included."""

    def __init__(self, dice: random.Random, shape: Geometry, routers: list[RouterRan]) -> None:
        super().__init__()
        self.dice, self.shape, self.routers = dice, shape, routers
        self.step = 0

    def begin_iteration(self, began: Began) -> Iterator[Prediction]:
        return self._guess()

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        return self._guess()

    def _guess(self) -> Iterator[Prediction]:
        dice = self.dice
        for _ in range(dice.choice([0, 1, 1, 2, 4])):
            distance = dice.choice([1, 1, 1, 2, 3, self.shape.num_layers])
            step = min(self.step + distance, len(self.routers) - 1)
            layer = self.routers[step].layer
            others = list(range(self.shape.layers[layer].num_experts))
            dice.shuffle(others)
            right = self.routers[step].experts
            experts = {
                "right": right,
                "wrong": [e for e in others if e not in right],
                "mixed": others[: dice.randint(0, len(others))],
            }[dice.choice(["right", "right", "wrong", "mixed"])]
            scores = [dice.random() / (1 + i) for i in range(len(experts))]
            confidence = probabilities = None
            if dice.random() < 0.5:
                confidence = 2 * dice.random() - 1
                probabilities = [dice.random() for _ in range(self.shape.layers[layer].num_experts)]
            yield Prediction(layer, list(experts), scores, distance, confidence, probabilities)


def soak(
    seed: str,
    segments: int,
    share: float,
    ring: int | None = None,
    *,
    scope: str = "layer",
    order: str = "resident",
    preemption: str = "early",
    transfer: str = "asynchronous",
    admission: str = "always",
    ahead: str = "cache",
    eviction: str = "lru",
    prefetch: str = "score",
    window: int | None = None,
    has_gate: bool = False,
    num_iterations: int = 25,
    failures: float = 0.0,
    write: Callable[[str], object] | None = None,
) -> tuple[CheckedController, RandomLink]:
    dice = random.Random(seed)
    shape = Geometry(LAYERS, segments)
    kinds = [dice.choice(["token", "token", "token", "prefill", "mixed"]) for _ in range(num_iterations)]
    routers = [random_router(dice, layer, one, kind) for kind in kinds for layer, one in enumerate(LAYERS)]
    future = ListFuture(shape, [(router.layer, router.experts) for router in routers])
    budget = split_budget(shape, int(shape.nbytes * share), ring)
    control = CheckedController(
        shape,
        budget,
        lambda capacity: EVICTIONS[eviction].make(shape, capacity, Known(future=future)),
        scope=scope,
        order=order,
        preemption=preemption,
        transfer=transfer,
        admission=admission,
        ahead=ahead,
        prefetch=PREFETCHES[prefetch].make(),
        window=window,
        gate=Gate(shape, budget.layer_shares) if has_gate else None,
    ).watch(future)
    if write is not None:
        control.start_journal({}, write)
    link = RandomLink(dice, dice.choice([0.1, 0.4, 0.8]))
    guesses = RandomGuesses(dice, shape, routers)
    times = accumulate(iter(lambda: dice.choice([1, 10, 1000]), 0))
    loads_ahead = Prefetcher(control, link, InlineChannel(guesses), now=partial(next, times))
    link.fails = lambda: dice.random() < failures

    def compute(span: Span) -> None:
        assert transfer == "asynchronous" or not control.speculation.num_in_flight, "what was predicted is there first"
        if dice.random() < failures:
            raise Failure

    for step, router in enumerate(routers):
        future.step = guesses.step = step
        before = link.num_waits
        try:
            if router.layer == 0:
                loads_ahead.begin_iteration(nothing_seen)
            run_layer(control, link, router, compute, loads_ahead)
            if router.layer == len(LAYERS) - 1:
                loads_ahead.end_iteration(True)
        except Failure:
            link.drop()
            control.abandon()
        assert link.num_waits - before <= 200, "a layer ends"
    control.counts_agree()
    return control, link


BUDGETS = [(0.1, 1), (0.4, None), (0.5, 3), (0.6, None), (0.9, None), (1.0, None)]


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("ahead", ["cache", "ring"])
@pytest.mark.parametrize(
    ("scope", "order", "admission", "eviction"),
    [
        ("layer", "resident", "always", "lru"),
        ("layer", "id", "always", "lcp"),
        ("global", "resident", "always", "lfu"),
        ("global", "id", "always", "lru"),
        ("layer", "resident", "best", "belady"),
        ("global", "resident", "best", "belady"),
        ("global", "resident", "best", "lcp"),
        ("global", "resident", "always", "fmoe"),
    ],
)
def test_whatever_is_guessed_every_promise_holds(
    segments: int, ahead: str, scope: str, order: str, admission: str, eviction: str
) -> None:
    joined = 0
    for share, ring in BUDGETS:
        for window, failures in ((None, 0.0), (None, 0.02), (1, 0.01)):
            control, link = soak(
                f"{share} {window} {failures}",
                segments,
                share,
                ring,
                scope=scope,
                order=order,
                admission=admission,
                ahead=ahead,
                eviction=eviction,
                prefetch="proximity" if eviction == "fmoe" else "score",
                window=window,
                failures=failures,
                num_iterations=7,
            )
            joined += control.num_joined
            if not failures:
                moved = sum(p.num_segments * control.geometry.segment_nbytes(p.layer) for p in link.submitted)
                moved -= sum(p.num_segments * control.geometry.segment_nbytes(p.layer) for p in link.withdrawn)
                both = [phase for one in control.counters for phase in (one.decode, one.prefill)]
                assert moved == sum(phase.loaded_nbytes for phase in both)
    assert joined, "demands met transfers in flight"


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("ahead", ["cache", "ring"])
@pytest.mark.parametrize("transfer", ["asynchronous", "synchronous"])
@pytest.mark.parametrize(("order", "preemption"), WAYS)
def test_however_a_layer_runs_every_promise_holds_and_is_kept_again(
    order: str, preemption: str, transfer: str, ahead: str, segments: int
) -> None:
    """The same soak, and every decision is made again from what was said."""
    seen: Counter[str] = Counter()
    way: dict[str, Any] = {"order": order, "preemption": preemption, "transfer": transfer, "ahead": ahead}
    for share, ring in BUDGETS:
        for scope, window, failures in (("layer", None, 0.0), ("global", 3, 0.02)):
            lines: list[str] = []
            control, link = soak(
                f"{share} {scope}",
                segments,
                share,
                ring,
                scope=scope,
                window=window,
                failures=failures,
                num_iterations=6,
                write=lines.append,
                **way,
            )
            again = JournaledScheduler(
                control.geometry, control.budget, lambda capacity: LRU(), scope=scope, window=window, **way
            )
            assert replay(lines[1:], again, "journal").difference is None
            for one, other in zip(control.counters, again.counters, strict=True):
                assert one.decode == other.decode and one.prefill == other.prefill
            seen += Counter(
                joined=control.num_joined,
                promoted=control.num_promoted,
                stale=control.num_stale,
                asked=control.num_early,
                withdrawn=len(link.withdrawn),
            )
            if not failures:
                moved = sum(p.num_segments * control.geometry.segment_nbytes(p.layer) for p in link.submitted)
                moved -= sum(p.num_segments * control.geometry.segment_nbytes(p.layer) for p in link.withdrawn)
                both = [phase for one in control.counters for phase in (one.decode, one.prefill)]
                assert moved == sum(phase.loaded_nbytes for phase in both)
    is_late = preemption == "late"
    assert bool(seen["asked"]) == (order == "id" and not is_late)
    if transfer == "asynchronous":
        assert seen["joined"] and seen["withdrawn"], "there were guesses on their way when their layers' routers spoke"
        assert bool(seen["promoted"]) == bool(seen["stale"]) == is_late


@pytest.mark.parametrize(("ahead", "segments"), [("cache", 1), ("ring", 4)])
@pytest.mark.parametrize(("order", "preemption"), WAYS)
def test_whatever_a_gate_lets_in_every_promise_holds_and_is_kept_again(
    order: str, preemption: str, ahead: str, segments: int
) -> None:
    """The same soak behind a gate whose times are random: replayed, it says the same again."""
    refused = let = 0
    way: dict[str, Any] = {"order": order, "preemption": preemption, "ahead": ahead}
    for share, ring in ((0.1, 1), (0.5, 3)):
        for scope, failures in (("layer", 0.0), ("global", 0.002)):
            lines: list[str] = []
            control, _ = soak(
                f"{share} {scope}",
                segments,
                share,
                ring,
                scope=scope,
                has_gate=True,
                failures=failures,
                num_iterations=40,
                write=lines.append,
                **way,
            )
            assert control.gate is not None
            again = JournaledScheduler(
                control.geometry,
                control.budget,
                lambda capacity: LRU(),
                scope=scope,
                gate=Gate(control.geometry, control.budget.layer_shares),
                **way,
            )
            assert replay(lines[1:], again, "journal").difference is None
            assert again.gate is not None and again.gate.facts() == control.gate.facts()
            of_old = '["at",["pass ended",1],null]'
            assert replay([of_old], again, "journal").difference is None, "journals that tell more are read"
            let, refused = let + control.gate.num_let, refused + control.gate.num_refused
    assert let and refused


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_the_oracle_wastes_nothing_and_loads_no_less_than_belady(segments: int, share: float) -> None:
    shape = geometry(layers=4, experts=8, top_k=2, segments=segments)
    dice = random.Random(share)
    routers = [one_token(layer, dice.sample(range(8), 2)) for _ in range(60) for layer in range(4)]
    loaded, in_time, num_waits = {}, {}, {}
    for name in ("belady-global", "oracle", "oracle, at once"):
        system = SYSTEMS[name.partition(",")[0]]
        future = ListFuture(shape, [(router.layer, router.experts) for router in routers])
        known = Known(future=future)
        control = system.scheduler(shape, split_budget(shape, int(shape.nbytes * share)), known)
        link = InstantLink() if "at once" in name else RandomLink(random.Random(1))
        predictor = system.predictor(shape, known)
        ahead = None if predictor is None else Prefetcher(control, link, InlineChannel(predictor))
        for step, router in enumerate(routers):
            future.step = step
            run_layer(control, link, router, lambda span: None, ahead)
        total = PhaseCounters()
        for counters in control.counters:
            total.add(counters.decode)
        loaded[name], in_time[name], num_waits[name] = total.loaded_nbytes, total.hits, link.num_waits
        if ahead is not None:
            assert total.rates()["prediction_accuracy"] == total.rates()["accuracy"] == 1.0
            assert total.predicted == 60 * 4 * 2 - 2, "all but what the first layer needs"
            num_moved = sum(p.num_segments for p in link.submitted) - sum(p.num_segments for p in link.withdrawn)
            assert num_moved * shape.segment_nbytes(0) == total.loaded_nbytes
    assert loaded["belady-global"] <= min(loaded.values())
    assert num_waits["oracle, at once"] == 0
    assert in_time["oracle, at once"] > in_time["belady-global"]


@pytest.mark.parametrize("ahead", ["cache", "ring"])
@pytest.mark.parametrize(
    ("admission", "eviction"), [("always", "lru"), ("always", "random"), ("best", "belady"), ("always", "fmoe")]
)
@pytest.mark.parametrize("failures", [0.0, 0.02])
def test_what_was_decided_is_decided_again(ahead: str, admission: str, eviction: str, failures: float) -> None:
    """Whatever arrived when, was taken back or failed: the same observations, the same decisions."""
    lines: list[str] = []
    prefetch = "proximity" if eviction == "fmoe" else "score"
    control, link = soak(
        f"replay {failures}",
        2,
        0.5,
        ahead=ahead,
        admission=admission,
        eviction=eviction,
        prefetch=PREFETCHES[prefetch].make(),
        scope="global",
        failures=failures,
        write=lines.append,
    )
    assert link.withdrawn and control.num_joined
    future = control.future
    steps = iter(control.steps)

    class Again(JournaledScheduler):
        def begin_layer(self, router: RouterRan, withdrawn: Sequence[Span] = ()) -> Plan:
            future.step = next(steps)
            return super().begin_layer(router, withdrawn)

    again = Again(
        control.geometry,
        control.budget,
        lambda capacity: EVICTIONS[eviction].make(control.geometry, capacity, Known(future=future)),
        scope="global",
        admission=admission,
        ahead=ahead,
        prefetch=PREFETCHES[prefetch].make(),
    )
    replayed = replay(lines[1:], again, "journal")
    assert replayed.difference is None and replayed.num_calls == len(lines) - 1
    for one, other in zip(control.counters, again.counters, strict=True):
        assert one.decode == other.decode and one.prefill == other.prefill
