"""One channel for several devices: published once, heard by all, by none before it has come there itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Began, Routed
from expertly.core.placement import Placement
from expertly.engine.group import SharedChannel
from expertly.policies.predictor import Predictor
from expertly.scheduler.observations import InlineChannel

SHAPE = Geometry((LayerGeometry(6, 2, 8, 4, 3, 2),) * 3)


class Counting(Predictor):
    """Says of the next layer that it needs all experts, in order; notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def begin_iteration(self, began: Began) -> Iterable[Prediction]:
        self.told.append("begin")
        return [self._of(0, 1)]

    def router_ran(self, routed: Routed) -> Iterable[Prediction]:
        self.told.append(f"router {routed.layer}")
        return [self._of(routed.layer + 1, 1)] if routed.layer < 2 else []

    def end_iteration(self, ok: bool) -> None:
        self.told.append(f"end {ok}")

    def _of(self, layer: int, distance: int) -> Prediction:
        return Prediction(layer, list(range(6)), [1 - e / 10 for e in range(6)], distance)


def began() -> Began:
    raise NotImplementedError


@pytest.fixture
def predictor() -> Counting:
    return Counting()


@pytest.fixture
def shared(predictor: Counting) -> SharedChannel:
    return SharedChannel(InlineChannel(predictor), Placement(SHAPE, 2))


def shown(layer: int) -> Callable[[], Routed]:
    return lambda: Routed(RouterRan(layer, [0], [1], [True], 1))


def start() -> Began:
    import numpy as np

    return Began(np.zeros(1, np.int64), np.zeros(1, np.bool_))


def test_whoever_comes_first_publishes(shared: SharedChannel, predictor: Counting) -> None:
    first, second = shared.of_shards
    for iteration in range(2):
        base = iteration * 3
        for tap in (second, first):
            tap.begin_iteration(base - 1, start)
        for layer in range(3):
            for tap in (first, second) if layer % 2 else (second, first):
                tap.router_ran(base + layer, shown(layer))
        first.end_iteration(True)
        second.end_iteration(True)
    assert predictor.told == ["begin", "router 0", "router 1", "router 2", "end True"] * 2


def test_each_hears_of_its_experts(shared: SharedChannel) -> None:
    named = []
    for device, tap in enumerate(shared.of_shards):
        tap.begin_iteration(-1, start)
        seen = tap.take()
        assert seen is not None and seen.step == -1 and tap.take() is None
        held = Placement(SHAPE, 2).shares[device].experts[0]
        named += [held[number] for number in seen.prediction.experts]
    assert sorted(named) == list(range(6))


def test_nobody_hears_of_a_step_before_it_has_come_there(shared: SharedChannel) -> None:
    """One device is already at layer 0's router while the other has yet to see what came before."""
    fast, slow = shared.of_shards
    for tap in (fast, slow):
        tap.begin_iteration(-1, start)
    fast.router_ran(0, shown(0))
    heard = [fast.take(), fast.take()]
    assert [None if seen is None else seen.step for seen in heard] == [-1, 0]
    first = slow.take()
    assert first is not None and first.step == -1
    assert slow.take() is None, "of step 0 it hears when it is there"
    slow.router_ran(0, shown(0))
    second = slow.take()
    assert second is not None and (second.step, second.prediction.layer) == (0, 1)


def test_an_end_is_told_once_and_a_failed_beginning_has_none(
    shared: SharedChannel, predictor: Counting
) -> None:
    first, second = shared.of_shards

    with pytest.raises(NotImplementedError):
        first.begin_iteration(-1, began)
    second.begin_iteration(-1, start)
    for tap in (first, second):
        tap.begin_iteration(2, start)
    for tap in (second, first):
        tap.end_iteration(False)
    assert predictor.told == ["begin", "end False"]
