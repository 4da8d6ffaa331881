"""When decode steps prefetch, as stories on a link that is fast, slow, or becomes so."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from expertly.core.messages import Prediction, RouterRan, Span
from expertly.core.observation import Began, Routed
from expertly.policies.eviction.simple import LRU
from expertly.policies.predictor.base import Predictor
from expertly.scheduler.budget import Budget
from expertly.scheduler.loop import Prefetcher, run_layer
from expertly.scheduler.observations import InlineChannel
from expertly.scheduler.prefetch_gate import Moment, PrefetchGate
from expertly.scheduler.scheduler import Scheduler
from tests.scheduler.checked import CheckedScheduler
from tests.scheduler.drive import geometry, one_token, routed
from tests.scheduler.soak import nothing_seen

LAYERS, EXPERTS = 4, 8


class NextLayer(Predictor):
    """Of the next layer: what it needs, or what it does not."""

    def __init__(self, routers: list[RouterRan], *, right: bool) -> None:
        super().__init__()
        self.routers, self.right = routers, right
        self.step = 0

    def begin_iteration(self, began: Began) -> Iterator[Prediction]:
        return iter(())

    def router_ran(self, seen: Routed) -> Iterator[Prediction]:
        if seen.layer + 1 < LAYERS:
            needed = self.routers[self.step + 1].experts
            experts = needed if self.right else [e for e in range(EXPERTS) if e not in needed][:2]
            yield Prediction(seen.layer + 1, experts, [0.9, 0.8], 1)


class SlowLink:
    """One span after the other, each for `load_ns`, on a clock that computing moves, too."""

    def __init__(self, load_ns: int) -> None:
        self.load_ns = load_ns
        self.now_ns = self.free_ns = 0
        self.queues: dict[bool, list[Span]] = {True: [], False: []}  # demands, ahead
        self.moving: list[tuple[int, Span]] = []
        self.num_ahead = 0

    def submit(self, spans: Any) -> None:
        self._begin()
        self.queues[True] += spans
        self._begin()

    def prefetch(self, spans: Any) -> None:
        self._begin()
        self.queues[False] += spans
        self.num_ahead += len(spans)
        self._begin()

    def cancel(self, layer: int, experts: Any = None) -> list[Span]:
        self._begin()
        gone = [one for one in self.queues[False] if one.layer == layer and (experts is None or one.expert in experts)]
        self.queues[False] = [one for one in self.queues[False] if one not in gone]
        return gone

    def poll(self) -> Span | None:
        self._begin()
        if self.moving and self.moving[0][0] <= self.now_ns:
            return self.moving.pop(0)[1]
        return None

    def wait(self) -> Span:
        self._begin()
        while (span := self.poll()) is None:
            self.now_ns = max(self.now_ns, self.free_ns)
        return span

    def _begin(self) -> None:
        while self.free_ns <= self.now_ns and (queue := self.queues[True] or self.queues[False]):
            self.free_ns = max(self.free_ns, self.now_ns - self.load_ns) + self.load_ns
            self.moving.append((self.free_ns, queue.pop(0)))


class Run:
    """Decode steps that each need two other experts of every layer than the step before, which is never here."""

    def __init__(
        self, *, right: bool, load_ns: int = 100, gate: PrefetchGate | None = None, checked: bool = True
    ) -> None:
        self.shape = geometry(layers=LAYERS, experts=EXPERTS, top_k=2)
        budget = Budget(0, (4,), (2 * LAYERS,), (2,) * LAYERS)
        self.gate = gate
        kind = CheckedScheduler if checked else Scheduler
        self.control = kind(self.shape, budget, lambda capacity, layers: LRU(), ahead="staging", gate=gate)
        self.link = SlowLink(load_ns)
        self.routers: list[RouterRan] = []
        self.predictor = NextLayer(self.routers, right=right)
        self.loads = Prefetcher(self.control, self.link, InlineChannel(self.predictor), now=lambda: self.link.now_ns)

    def steps(self, num: int) -> int:
        """The time of so many more."""
        first, begin_ns = len(self.routers), self.link.now_ns
        for number in range(first // LAYERS, first // LAYERS + num):
            self.routers += [one_token(layer, [2 * number % 8, (2 * number + 1) % 8]) for layer in range(LAYERS)]
        for step in range(first, len(self.routers)):
            self.predictor.step, router = step, self.routers[step]
            if router.layer == 0:
                self.loads.begin_iteration(nothing_seen)
            self.link.now_ns += 1000
            run_layer(self.control, self.link, router, lambda spans: None, self.loads, routed(router))
            if router.layer == LAYERS - 1:
                self.loads.end_iteration(True)
        return self.link.now_ns - begin_ns

    @property
    def facts(self) -> dict[str, Any]:
        assert self.gate is not None
        return self.gate.facts()


@pytest.mark.parametrize(("right", "load_ns", "state"), [(True, 300, "on"), (False, 1500, "off")])
def test_the_better_way_is_taken_after_a_few_steps(right: bool, load_ns: int, state: str) -> None:
    """Six pairs in turns, two where it is that clear, then the slower way in one step of ten at most."""
    run = Run(right=right, load_ns=load_ns, gate=PrefetchGate())
    run.steps(12)
    tried = run.facts["steps_without" if state == "on" else "steps_with"]
    assert run.facts["state"] == state and tried == (6 if state == "on" else 2)
    run.steps(300)
    assert run.facts["state"] == state and (run.facts["difference"] < 0) == (state == "on")
    slower = run.facts["steps_without" if state == "on" else "steps_with"]
    assert tried < slower <= tried + 300 // 10


@pytest.mark.parametrize("right", [True, False])
def test_it_is_about_as_fast_as_the_better_way_on_a_link_that_changes(right: bool) -> None:
    """Prefetching wins 16 % while the link is fast and predictions are right, and loses where they are wrong and loads
    take longer than a layer; where a load takes next to nothing it does not matter.
    """
    gates = (None, PrefetchGate(), Closed())
    always, gated, never = (Run(right=right, gate=gate, checked=False) for gate in gates)
    for load_ns in (300, 1500, 10, 1500, 300):
        for run in (always, gated, never):
            run.link.load_ns = load_ns
        better = min(always.steps(400), never.steps(400))
        assert gated.steps(400) < 1.03 * better, load_ns


class Closed(PrefetchGate):
    """Never prefetches."""

    def at(self, moment: Moment, now_ns: int) -> None:
        self.is_open = False

    def router_ran(self, router: RouterRan, absent_nbytes: int) -> None: ...


class Link:
    """Steps through one gate: with prefetching a step takes `open_ns`, without `closed_ns`."""

    def __init__(self) -> None:
        self.gate, self.now_ns = PrefetchGate(), 0

    def step(self, open_ns: int, closed_ns: int, *, absent: int = 0, tokens: int = 1, is_decode: bool = True) -> bool:
        """Whether it prefetched. Every absent byte takes a nanosecond more."""
        self.gate.at(Moment.PASS_BEGAN, self.now_ns)
        self.gate.router_ran(RouterRan(0, [0], [tokens], [is_decode], tokens), absent)
        self.now_ns += (open_ns if self.gate.is_open else closed_ns) + absent
        self.gate.at(Moment.PASS_ENDED, self.now_ns)
        return self.gate.is_open

    def share(self, num: int, open_ns: int, closed_ns: int, **more: Any) -> float:
        """Of so many steps, those that prefetched."""
        return sum(self.step(open_ns, closed_ns, **more) for _ in range(num)) / num


def test_a_link_that_becomes_slow_or_fast_is_noticed() -> None:
    link = Link()
    assert link.share(100, 900, 1000) > 0.8, "prefetching hides loads"
    link.share(40, 4000, 3000)
    assert link.share(100, 4000, 3000) < 0.1, "the link is busy: it delays loads"
    link.share(40, 900, 1000)
    assert link.share(100, 900, 1000) > 0.8


def test_steps_that_lack_more_are_not_taken_for_a_worse_way() -> None:
    """What a step lacks varies by four times what prefetching spares; it is known of each step."""
    dice, link = random.Random(0), Link()
    for _ in range(32):
        link.step(900, 1000, absent=dice.randrange(400, 1600))
    assert link.gate.facts()["state"] == "on" and -0.08 < link.gate.facts()["difference"] < -0.03
    link = Link()
    for _ in range(32):
        link.step(1000, 900, absent=dice.randrange(400, 1600))
    assert link.gate.facts()["state"] == "off" and 0.03 < link.gate.facts()["difference"] < 0.08


def test_steps_of_other_batches_are_compared_apart() -> None:
    link = Link()
    for _ in range(10):
        link.share(20, 900, 1000)
        link.share(20, 3000, 2000, tokens=8)
    assert link.share(20, 900, 1000) > 0.7 and link.share(20, 3000, 2000, tokens=8) < 0.3


def test_prompts_and_failed_passes_are_no_steps() -> None:
    link = Link()
    for _ in range(10):
        link.step(900, 1000)
        link.step(10**9, 1, is_decode=False, tokens=50)
        link.gate.at(Moment.PASS_BEGAN, link.now_ns)
        link.gate.router_ran(RouterRan(0, [0], [1], [True], 1), 0)
        link.gate.abandon()
        link.now_ns += 10**9
        link.gate.at(Moment.PASS_ENDED, link.now_ns)
    assert link.gate.facts()["steps_with"] + link.gate.facts()["steps_without"] == 10
