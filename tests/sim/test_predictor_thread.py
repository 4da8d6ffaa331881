"""The predictor's virtual thread: when its predictions are there, and what it does not get to."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest

from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Began, Routed
from expertly.lab.compare.simulated import TokenTimeline
from expertly.policies.predictor import Predictor
from expertly.scheduler.observations import Channel, InlineChannel, ObservationQueue
from expertly.sim.hardware import PredictorCosts
from expertly.sim.link import Clock
from expertly.sim.simulator import VirtualPredictorThread

BEGAN = Began(np.zeros(1, np.int64), np.zeros(1, np.bool_))
FREE = PredictorCosts(0, float("inf"), float("inf"))


class Notes(Predictor):
    """Writes down what it is told; says one thing at a begin and two of each router, for 100 bytes and 30 operations
    each."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[object] = []

    def begin_iteration(self, began: Began) -> Iterable[Prediction]:
        self.told.append("begin")
        return [self._say(0, 1)]

    def router_ran(self, routed: Routed) -> Iterable[Prediction]:
        self.told.append(routed.layer)
        for distance in (1, 2):
            yield self._say(routed.layer + distance, distance)

    def end_iteration(self, ok: bool) -> None:
        self.told.append(("end", ok))
        self.work.read_nbytes += 1000

    def _say(self, layer: int, distance: int) -> Prediction:
        self.work.read_nbytes += 100
        self.work.flops += 30
        return Prediction(layer, [distance], [1.0], distance)


def publish(channel: Channel, step: int, layer: int) -> None:
    channel.router_ran(step, partial(Routed, RouterRan(layer, [0], [1], [True], 1)))


def taken(channel: Channel) -> list[tuple[int, int]]:
    """(step, layer) of what is there."""
    found = []
    while (seen := channel.take()) is not None:
        found.append((seen.step, seen.prediction.layer))
    return found


def test_predictions_come_when_they_have_been_made() -> None:
    """7 ns an observation; 100 bytes take 50 ns, more than 30 operations do."""
    predictor, clock = Notes(), Clock()
    channel = VirtualPredictorThread(predictor, clock, PredictorCosts(7, 2e9, 1e9), ObservationQueue(100))
    clock.now_ns = 1000
    channel.begin_iteration(-1, lambda: BEGAN)
    assert taken(channel) == [] and predictor.told == ["begin"], "begun at once, made at 1057"
    clock.now_ns = 1010
    publish(channel, 0, 0)  # read at 1057: two predictions, at 1114 and 1164
    clock.now_ns = 1056
    assert taken(channel) == [] and predictor.told == ["begin"]
    clock.now_ns = 1057
    assert taken(channel) == [(-1, 0)]
    clock.now_ns = 1113
    assert taken(channel) == []
    clock.now_ns = 1114
    assert taken(channel) == [(0, 1)]
    clock.now_ns = 1500
    assert taken(channel) == [(0, 2)]
    channel.end_iteration(True)  # takes 507
    channel.begin_iteration(1, lambda: BEGAN)  # read at 2007
    clock.now_ns = 2063
    assert taken(channel) == []
    clock.now_ns = 2064
    assert taken(channel) == [(1, 0)]
    assert predictor.told == ["begin", 0, ("end", True), "begin"]
    assert channel.busy_ns == 57 + 107 + 507 + 57


@pytest.mark.parametrize(("waited_ns", "takes_ns"), [(0, 5 + 30), (5, 5 + 15), (10, 5), (20, 5)])
def test_showing_a_router_takes_time_of_the_pass_while_it_does_not_wait(waited_ns: int, takes_ns: int) -> None:
    clock = Clock()
    channel = VirtualPredictorThread(Notes(), clock, PredictorCosts(10), ObservationQueue(9), observe_ns=30, plan_ns=5)
    channel.begin_iteration(-1, lambda: BEGAN)
    publish(channel, 0, 0)
    assert (clock.now_ns, channel.stall_ns) == (0, 0)
    assert (channel.layer_ended(waited_ns), channel.layer_ended()) == (takes_ns, 0)


@pytest.mark.parametrize("seed", range(2))
def test_without_costs_it_is_an_inline_channel(seed: int) -> None:
    rng, clock = np.random.default_rng(seed), Clock()
    told = [Notes(), Notes()]
    channels: list[Channel] = [
        InlineChannel(told[0]),
        VirtualPredictorThread(told[1], clock, FREE, ObservationQueue(1)),
    ]
    for iteration in range(20):
        for channel in channels:
            channel.begin_iteration(iteration * 4 - 1, lambda: BEGAN)
        for layer in range(4):
            if rng.random() < 0.5:
                assert taken(channels[0]) == taken(channels[1])
            for channel in channels:
                publish(channel, iteration * 4 + layer, layer)
            clock.now_ns += int(rng.integers(0, 3))
        ok = bool(rng.random() < 0.8)
        for channel in channels:
            channel.end_iteration(ok)
    assert taken(channels[0]) == taken(channels[1])
    assert isinstance(channels[1], VirtualPredictorThread)
    channels[1].close()
    assert told[0].told == told[1].told and channels[1].num_dropped == 0


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_unless_it_is_counted(seed: int) -> None:
    rng, predictor, clock = np.random.default_rng(seed), Notes(), Clock()
    channel = VirtualPredictorThread(
        predictor, clock, PredictorCosts(50, 1e9, 1e9), ObservationQueue(int(rng.integers(1, 12)))
    )
    published = num_taken = 0
    for iteration in range(60):
        channel.begin_iteration(iteration * 5 - 1, lambda: BEGAN)
        for layer in range(5):
            publish(channel, iteration * 5 + layer, layer)
            clock.now_ns += int(rng.integers(0, 500))
            num_taken += len(taken(channel))
        published += 6
        channel.end_iteration(True)
    channel.close()
    clock.now_ns = 1 << 61
    num_taken += len(taken(channel))
    contexts = [what for what in predictor.told if not isinstance(what, tuple)]
    assert len(contexts) + channel.num_dropped == published
    assert num_taken == sum(1 if what == "begin" else 2 for what in contexts)
    assert channel.num_dropped > 0, "it was busy"


def test_catching_up_waits_until_everything_was_read() -> None:
    predictor, clock, watcher = Notes(), Clock(), TokenTimeline(0)
    costs, waiting = PredictorCosts(100, 1e9, float("inf")), ObservationQueue(10)
    channel = VirtualPredictorThread(predictor, clock, costs, waiting, watcher)
    channel.begin_iteration(-1, lambda: BEGAN)  # until 200
    clock.now_ns = 50
    publish(channel, 0, 0)  # until 500
    channel.catch_up()
    watcher.computed("head", -1, 500, 500)
    drawn = watcher.as_dict()
    assert drawn is not None
    assert [(one["kind"], one["begin_ns"], one["end_ns"]) for one in drawn["events"] if one["lane"] == "device"] == [
        ("decide", 50, 500)
    ]
    assert (clock.now_ns, channel.stall_ns) == (500, 450) and predictor.told == ["begin", 0]
    assert taken(channel) == [(-1, 0), (0, 1), (0, 2)]
    channel.catch_up()
    clock.now_ns = 600
    channel.catch_up()
    assert (clock.now_ns, channel.stall_ns) == (600, 450), "nothing to wait for"
    channel.end_iteration(True)
    channel.catch_up()
    assert (clock.now_ns, channel.stall_ns) == (1700, 1550), "learning, too"
