"""What the filter lets through, as stories: what is sure and has time."""

from __future__ import annotations

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
from expertly.scheduler.prefetch_filter import Moment, PredictedExpert, PrefetchFilter
from expertly.scheduler.scheduler import Scheduler
from tests.scheduler.checked import CheckedScheduler
from tests.scheduler.drive import geometry, one_token, routed
from tests.scheduler.soak import nothing_seen

LAYERS, EXPERTS = 4, 8


class Guesses(Predictor):
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
        self,
        has_filter: bool,
        *,
        right: bool,
        load_ns: int = 100,
        layer_ns: int = 1000,
        kept: int = 2,
    ) -> None:
        self.shape = geometry(layers=LAYERS, experts=EXPERTS, top_k=2)
        budget = Budget(0, (4,), (kept * LAYERS,), (kept,) * LAYERS)
        self.control: Scheduler = CheckedScheduler(
            self.shape,
            budget,
            lambda capacity, layers: LRU(),
            ahead="ring",
            prefetch_filter=PrefetchFilter(self.shape, budget.layer_shares) if has_filter else None,
        )
        self.link = SlowLink(load_ns)
        self.layer_ns = layer_ns
        self.routers: list[RouterRan] = []
        self.guesses = Guesses(self.routers, right=right)
        self.loads = Prefetcher(self.control, self.link, InlineChannel(self.guesses), now=lambda: self.link.now_ns)
        self.ahead_by_step: list[int] = []

    def steps(self, num: int) -> Run:
        first = len(self.routers)
        for number in range(first // LAYERS, first // LAYERS + num):
            self.routers += [one_token(layer, [2 * number % 8, (2 * number + 1) % 8]) for layer in range(LAYERS)]
        for step in range(first, len(self.routers)):
            self.guesses.step, router = step, self.routers[step]
            if router.layer == 0:
                before = self.link.num_ahead
                self.loads.begin_iteration(nothing_seen)
            self.link.now_ns += self.layer_ns
            run_layer(self.control, self.link, router, lambda spans: None, self.loads, routed(router))
            if router.layer == LAYERS - 1:
                self.loads.end_iteration(True)
                self.ahead_by_step.append(self.link.num_ahead - before)
        return self

    @property
    def facts(self) -> dict[str, Any]:
        assert self.control.filter is not None
        return self.control.filter.facts()


def test_what_is_right_and_has_time_is_loaded() -> None:
    run = Run(True, right=True).steps(40)
    assert sum(run.ahead_by_step) == 2 * (LAYERS - 1) * 40, "all of it"
    assert run.facts["refused"] == 0 and run.facts["accuracy"] == 1
    assert run.control.counters[2].decode.rates()["timeliness"] == 1


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_what_is_never_right_is_not_loaded_for_long_where_it_keeps_loads_waiting(kept: int) -> None:
    plain, filtered = (Run(has_filter, right=False, load_ns=1500, kept=kept).steps(60) for has_filter in (False, True))
    assert sum(plain.ahead_by_step[-20:]) > 0
    assert sum(filtered.ahead_by_step[-20:]) == 0
    assert filtered.facts["refused"] > 0 and filtered.facts["accuracy"] < 0.1
    assert filtered.link.now_ns < 0.95 * plain.link.now_ns


def test_nothing_is_loaded_where_loads_keep_the_link_busy() -> None:
    run = Run(True, right=True, load_ns=1000, layer_ns=0).steps(30)
    assert sum(run.ahead_by_step[2:]) == 0


def trained(*, covers: bool) -> PrefetchFilter:
    """Of each layer two experts are guessed first, which are needed if it `covers`, and two more, which never are. The
    link is free for 1000 ns a layer; a load takes 1500 ns.
    """
    shape = geometry(layers=LAYERS, experts=EXPERTS, top_k=2)
    prefetch_filter, now_ns = PrefetchFilter(shape, (2,) * LAYERS), 0
    for number in range(40):
        prefetch_filter.at(Moment.PASS_BEGAN, now_ns)
        for layer in range(LAYERS):
            needed = [2 * number % EXPERTS, (2 * number + 1) % EXPERTS]
            prefetch_filter.at(Moment.NOW, now_ns)
            prefetch_filter.router_ran(one_token(layer, needed))
            prefetch_filter.asked(layer, 2)
            now_ns += 2 * 1500
            prefetch_filter.at(Moment.ALL_CAME, now_ns)
            others = [expert for expert in range(EXPERTS) if expert not in needed]
            first = shape.first_expert_id((layer + 1) % LAYERS)
            for rank, expert in enumerate(
                [*(needed if covers else others[4:]), *others[:2]] if layer + 1 < LAYERS else ()
            ):
                guess = PredictedExpert(rank, 0.9 / (rank + 1), 1)
                prefetch_filter.lets(layer + 1, first + expert, guess, layer, 1, 0, evicts=False)
            now_ns += 1000
    prefetch_filter.at(Moment.PASS_BEGAN, now_ns)
    prefetch_filter.router_ran(one_token(0, [0, 1]))
    prefetch_filter.asked(0, 1)
    return prefetch_filter


def test_a_wrong_guess_costs_less_where_nearly_all_that_is_missed_is_guessed() -> None:
    """What is then still to come of it keeps no load waiting."""
    for covers in (True, False):
        prefetch_filter = trained(covers=covers)
        assert prefetch_filter.lets(1, EXPERTS + 7, PredictedExpert(3, 0.9 / 4, 1), 0, 1, 0, evicts=False) == covers


def test_what_comes_behind_others_has_less_time() -> None:
    prefetch_filter = trained(covers=True)
    for num_queued in (0, 1):
        assert prefetch_filter.lets(1, EXPERTS + 7, PredictedExpert(0, 0.9, 1), 0, 1, num_queued, evicts=False) == (
            num_queued == 0
        )
