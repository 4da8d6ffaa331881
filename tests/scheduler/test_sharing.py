"""Shares that change while layers run: nothing is lost, nothing protected goes, and the sums stay."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from expertly.scheduler.sharing import Sharing

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan, Span
from expertly.policies.allocation.base import Allocation
from expertly.policies.eviction import EVICTIONS
from expertly.policies.known import Known
from expertly.scheduler.budget import check_shares, split_budget
from expertly.scheduler.decisions import JournaledScheduler, replay
from expertly.scheduler.loop import Prefetcher
from expertly.scheduler.loop import run_layer as loop_layer
from expertly.scheduler.observations import InlineChannel
from expertly.scheduler.presets import get_system
from expertly.testing.made_up import ListFuture
from tests.scheduler.ahead import CheckedController
from tests.scheduler.drive import geometry, kept, run_layer, scheduler
from tests.scheduler.links import Failure, RandomLink
from tests.scheduler.test_ahead import LAYERS, RandomGuesses, nothing_seen, random_router


class RandomShares(Allocation):
    """Any shares at all, every few layers, with the sums there are."""

    is_online = True

    def __init__(self, shape: Geometry, dice: random.Random) -> None:
        self.shape, self.dice = shape, dice
        self.said: list[list[int]] = []

    def shares(self, kept_slots: Sequence[int]) -> list[int]:
        raise AssertionError("it is given the shares that it begins with")

    def begin(self, shares: Sequence[int]) -> None:
        self.now = list(shares)

    def ran(self, demand: RouterRan, recall: Callable[[int], float]) -> list[int] | None:
        assert all(0 <= recall(layer) <= 1 for layer in range(self.shape.num_layers))
        if self.dice.random() < 0.6:
            return None
        now, dice = self.now, self.dice
        for _ in range(4):
            layer = dice.randrange(len(now))
            others = [one for one, c in enumerate(self.shape.size_classes) if c == self.shape.size_classes[layer]]
            other = dice.choice(others)
            most = self.shape.layers[other].num_experts * self.shape.segments_per_expert
            num = dice.randint(0, min(now[layer], most - now[other])) if layer != other else 0
            now[layer] -= num
            now[other] += num
        self.said.append(list(now))
        return list(now)


def soak(
    seed: str,
    segments: int,
    share: float,
    *,
    eviction: str = "lru",
    admission: str = "always",
    ahead: str = "cache",
    failures: float = 0.0,
    num_iterations: int = 10,
) -> tuple[CheckedController, RandomShares, set[str]]:
    """Demands, guesses and resizes by dice; `check()` after every event. What happened on the way is named."""
    dice = random.Random(seed)
    shape = Geometry(LAYERS, segments)
    kinds = [dice.choice(["token", "token", "token", "prefill", "mixed"]) for _ in range(num_iterations)]
    routers = [random_router(dice, layer, one, kind) for kind in kinds for layer, one in enumerate(LAYERS)]
    future = ListFuture(shape, [(router.layer, router.experts) for router in routers])
    allocation = RandomShares(shape, dice)
    budget = split_budget(shape, int(shape.nbytes * share))
    control = CheckedController(
        shape,
        budget,
        lambda capacity: EVICTIONS[eviction].make(shape, capacity, Known(future=future)),
        admission=admission,
        ahead=ahead,
        allocation=allocation,
    ).watch(future)
    link, happened = RandomLink(dice, dice.choice([0.1, 0.4, 0.8])), set()
    guesses = RandomGuesses(dice, shape, routers)
    loads_ahead = Prefetcher(control, link, InlineChannel(guesses))
    link.fails = lambda: dice.random() < failures

    def compute(span: Span) -> None:
        control.keeper.check()
        if dice.random() < failures:
            raise Failure

    for step, router in enumerate(routers):
        future.step = guesses.step = step
        try:
            if router.layer == 0:
                loads_ahead.begin_iteration(nothing_seen)
            loop_layer(control, link, router, compute, loads_ahead)
        except Failure:
            link.drop()
            control.abandon()
        control.check()
        keeper = control.keeper
        assert [cache.capacity for cache in control.caches] == keeper.shares
        assert all(n <= m for n, m in zip(check_shares(shape, keeper.shares), budget.kept_slots, strict=True))
        if control.speculation.in_flight:
            happened.add("in flight")
        if keeper.targets is not None:
            happened.add("on the way")
            assert keeper.targets == allocation.said[-1]
        elif allocation.said:
            happened.add("there")
            assert keeper.shares == allocation.said[-1]
    if not failures:
        control.counts_agree()
    return control, allocation, happened


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("ahead", ["cache", "ring"])
@pytest.mark.parametrize(
    ("eviction", "admission"), [("lru", "always"), ("lfu", "best"), ("random", "always"), ("belady", "best")]
)
def test_whatever_is_shared_out_every_promise_holds(segments: int, ahead: str, eviction: str, admission: str) -> None:
    happened: set[str] = set()
    for share in (0.35, 0.6, 0.9):
        for failures in (0.0, 0.02):
            some = {"eviction": eviction, "admission": admission, "ahead": ahead, "failures": failures}
            happened |= soak(f"{share} {failures}", segments, share, **some)[2]  # type: ignore[arg-type]
    assert happened == {"in flight", "on the way", "there"} or (ahead == "ring" and "there" in happened)


def test_a_layer_that_shrinks_evicts_by_its_policy_and_one_that_grows_fills_by_demand() -> None:
    shape = geometry(layers=2, experts=8, top_k=2)
    control = scheduler(shape, 10 / 16)  # 2 of the ring, 4 a layer
    for layer in range(2):
        for pair in ([0, 1], [2, 3]):
            run_layer(control, layer, pair)
    run_layer(control, 0, [0, 2])
    control.keeper.resize([2, 6])
    control.keeper.rearrange(set())
    assert kept(control, 0) == {0, 2} and kept(control, 1) == {0, 1, 2, 3}, "1 and 3 were used least recently"
    assert (control.keeper.shares, control.keeper.targets) == ([2, 6], None)
    assert control.counters[0].decode.evicted_nbytes == 2 * shape.layers[0].expert_nbytes
    control.check()
    run_layer(control, 1, [4, 5], check=True)
    assert kept(control, 1) == {0, 1, 2, 3, 4, 5} and not control.counters[1].decode.evicted_nbytes


def test_what_is_protected_goes_later() -> None:
    shape = geometry(layers=2, experts=8, top_k=2)
    control = scheduler(shape, 10 / 16)
    for layer in range(2):
        for pair in ([0, 1], [2, 3]):
            run_layer(control, layer, pair)
    keeper = control.keeper
    keeper.resize([1, 7])
    keeper.rearrange({0, 2, 3})
    assert (keeper.shares, kept(control, 0), keeper.targets) == ([3, 5], {0, 2, 3}, [1, 7])
    control.check()
    keeper.rearrange({0})
    assert (keeper.shares, kept(control, 0), keeper.targets) == ([1, 7], {0}, None)
    control.check()


def test_a_part_of_an_expert_goes_from_its_end() -> None:
    shape = geometry(layers=2, experts=8, top_k=2, segments=4)
    control = scheduler(shape, 10 / 16)
    for pair in ([0, 1], [2, 3]):
        run_layer(control, 0, pair)
    control.keeper.resize([16 - 6, 16 + 6])
    control.keeper.rearrange(set())
    assert control.residency.resident[:4] == [0, 0b0011, 0b1111, 0b1111]
    control.check()


def test_prompts_fill_the_share_there_is_now() -> None:
    control = scheduler(geometry(layers=2, experts=8, top_k=2), 10 / 16)
    control.keeper.resize([1, 7])
    control.keeper.rearrange(set())
    for layer in range(2):
        run_layer(control, layer, list(range(8)), decode=False, check=True)
    assert (len(kept(control, 0)), len(kept(control, 1))) == (1, 7)


@pytest.mark.parametrize("shares", [[4, 5], [3, 4], [-1, 9], [4], [9, -1]])
def test_shares_of_another_sum_are_refused(shares: list[int]) -> None:
    control = scheduler(geometry(layers=2, experts=8, top_k=2), 10 / 16)
    with pytest.raises(ConfigError, match="allocation: "):
        control.keeper.resize(shares)
    assert control.keeper.targets is None


def test_size_classes_never_mix() -> None:
    shape = Geometry(LAYERS)
    control = scheduler(shape, 0.7)
    shares = list(control.keeper.shares)
    shares[0] -= 1
    shares[1] += 1
    with pytest.raises(ConfigError, match="must have the sum of"):
        control.keeper.resize(shares)


# -- by what layers are asked for ----------------------------------------------------------------------------------


def skewed_token(control: JournaledScheduler, dice: random.Random) -> None:
    """Layer 1 chooses among all its experts, the others among three."""
    for layer, one in enumerate(control.geometry.layers):
        run_layer(control, layer, dice.sample(range(one.num_experts if layer == 1 else 3), one.top_k))


@pytest.mark.parametrize("segments", [1, 4])
def test_adapmoe_gives_the_layer_that_misses_more_and_is_replayed(segments: int) -> None:
    shape, system, lines = geometry(layers=3, experts=12, top_k=2, segments=segments), get_system("adapmoe"), []
    budget = system.budget(shape, split_budget(shape, shape.nbytes // 2))
    control = system.journaled_scheduler(shape, budget)
    control.start_journal({}, lines.append)
    dice = random.Random(0)
    for _ in range(255):
        skewed_token(control, dice)
    assert tuple(control.keeper.shares) == budget.layer_shares, "before 256 tokens nobody knows"
    for _ in range(300):
        skewed_token(control, dice)
        control.check()
    assert [share // segments for share in control.keeper.shares] == [3, 10, 3]
    assert sum(control.keeper.shares) == sum(budget.layer_shares)
    sharing = system.sharing(control)
    assert sharing is not None and (sharing["name"], sharing["experts"]) == ("adapmoe", [3, 10, 3])
    again = system.journaled_scheduler(shape, budget)
    assert replay(lines[1:], again, "here").difference is None
    assert again.keeper.shares == control.keeper.shares


def test_late_predictions_name_nothing() -> None:
    """Of 8 experts needed in layer 1, half the passes had a prediction, which was right: recall is a half."""
    shape = geometry(layers=2, experts=8, top_k=2)
    seen: list[float] = []

    class Watcher(RandomShares):
        def ran(self, demand: RouterRan, recall: Callable[[int], float]) -> list[int] | None:
            seen.append(recall(1))
            return None

    system = get_system("adapmoe")
    control = system.scheduler(shape, split_budget(shape, shape.nbytes // 2))
    watched = CheckedController(
        shape,
        control.budget,
        lambda capacity: EVICTIONS["lru"].make(shape, capacity),
        allocation=Watcher(shape, random.Random(0)),
    ).watch()
    link = RandomLink(random.Random(0), 1.0)
    for token in range(4):
        for layer in range(2):
            if layer == 1 and token % 2:
                watched.predict(Prediction(1, [token, token + 1], [0.5, 0.5], 1))
            experts = [token, token + 1]
            loop_layer(watched, link, RouterRan(layer, experts, [1, 1], [True, True], 1), lambda span: None)
    assert seen[-1] == 0.5


# -- nothing kept --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("share", [2 / 32, 3 / 32, 0.25, 1.0])
def test_with_nothing_kept_what_is_loaded_ahead_passes_the_ring(share: float, segments: int) -> None:
    """At the least budget, too: nothing waits for ever, nothing is evicted, and nothing stays but what is to come."""
    shape, dice = geometry(layers=4, experts=8, top_k=2, segments=segments), random.Random(0)
    system = get_system("lru:allocation=none:prediction=counts:ahead=ring")
    budget = system.budget(shape, split_budget(shape, int(shape.nbytes * share)))
    assert budget.kept_slots == (0,)
    control = CheckedController(
        shape,
        budget,
        lambda capacity: EVICTIONS["lru"].make(shape, capacity),
        ahead="ring",
    ).watch()
    link = RandomLink(dice, 0.7)
    routers = [
        RouterRan(layer, dice.sample(range(8), 2), [1, 1], [True, True], 1) for _ in range(60) for layer in range(4)
    ]
    guesses = RandomGuesses(dice, shape, routers)
    loads_ahead = Prefetcher(control, link, InlineChannel(guesses))
    for step, router in enumerate(routers):
        guesses.step = step
        if router.layer == 0:
            loads_ahead.begin_iteration(nothing_seen)
        loop_layer(control, link, router, lambda span: None, loads_ahead)
        coming = {*control.speculation.waiting, *control.speculation.in_flight}
        for eid in range(shape.num_experts):
            held = control.residency.resident[eid] | control.residency.loading[eid]
            assert not held or eid in coming, "nothing stays between layers but what is loaded ahead"
    counts = [counters.decode for counters in control.counters]
    assert sum(one.prefetched_in_time for one in counts), "the ring is used for what is to come"
    assert not sum(one.evicted_nbytes for one in counts)


class Listening(RandomShares):
    """Shares stay; what it is told of predictions is noted."""

    def ran(self, demand: RouterRan, recall: Callable[[int], float]) -> list[int] | None:
        self.heard = recall(demand.layer)
        return None


@pytest.mark.parametrize(("is_gated", "expected"), [(False, 0.8), (True, 0.25)])
def test_what_a_gate_refused_spared_nothing(is_gated: bool, expected: float) -> None:
    shape = geometry()
    told, control = Listening(shape, random.Random(0)), scheduler(shape, 0.5)
    of_layer = control.counters[1].decode
    of_layer.predicted_needed, of_layer.predicted_of, of_layer.misses = 8, 10, 6
    of_layer.prefetched = of_layer.prefetched_needed = of_layer.prefetched_in_time = 2
    sharing = Sharing(told, control.keeper, control.counters, control.budget.layer_shares, is_gated=is_gated)
    sharing.layer_ended(RouterRan(1, [0], [1], [True], 1), lambda: ())
    assert told.heard == expected
