"""What of an overloaded predictor's contexts goes: always enough is left to learn from, and the newest to predict."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest

from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Began, Routed
from expertly.policies.predictor import Predictor
from expertly.scheduler.observations import PASSES_WAITING, ObservationQueue

NUM_LAYERS = 5


class Reader(Predictor):
    """Notes for each pass what it was told, and which passes it was told as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.whole: list[int] = []
        self.layers: list[int] = []

    def begin_iteration(self, began: Began) -> Iterable[Prediction]:
        self.begun.append(int(began.requests[0]))
        self.layers = []
        return ()

    def router_ran(self, routed: Routed) -> Iterable[Prediction]:
        self.layers.append(routed.layer)
        return ()

    def end_iteration(self, ok: bool) -> None:
        if ok and self.layers == list(range(NUM_LAYERS)):
            self.whole.append(self.begun[-1])


def began(number: int) -> Began:
    return Began(np.array([number]), np.array([False]))


def routed(layer: int) -> Routed:
    return Routed(RouterRan(layer, [0], [1], [True], 1))


def read(backlog: ObservationQueue, reader: Reader, limit: int = 1 << 30) -> int:
    """Read so many at most; how many."""
    for done in range(limit):
        if (work := backlog.next()) is None:
            return done
        list(work.do(reader))
    return limit


def publish(backlog: ObservationQueue, number: int, reader: Reader, reads: float = 0.0, start: float = 0.0) -> float:
    """A pass, beside which so many contexts are read for each that is published."""
    done = start
    for step in range(NUM_LAYERS + 1):
        if step:
            backlog.router_ran(step, partial(routed, step - 1))
        else:
            backlog.begin_iteration(step, partial(began, number))
        done += reads
        done -= read(backlog, reader, int(done))
    backlog.end_iteration(True)
    return done


def test_everything_is_read_in_order_with_its_time() -> None:
    backlog, reader = ObservationQueue(100), Reader()
    backlog.begin_iteration(-1, partial(began, 7), 10)
    backlog.router_ran(0, partial(routed, 0), 11)
    backlog.end_iteration(False, 12)
    found = []
    while (work := backlog.next()) is not None:
        found.append((work.what, work.step, work.at_ns))
        list(work.do(reader))
    assert found == [("begin", -1, 10), ("router", 0, 11), ("update", -1, 12)]
    assert (reader.begun, reader.layers, reader.whole) == ([7], [0], [])
    backlog.router_ran(1, partial(routed, 1))
    backlog.end_iteration(True)
    assert backlog.next() is None, "no pass is open"


@pytest.mark.parametrize("reads", [0.1, 0.3, 0.5, 0.8, 0.95])
def test_however_long_the_overload_lasts_whole_passes_are_read(reads: float) -> None:
    """All the time that there is goes to passes that are seen whole, but for the last ones."""
    backlog, reader = ObservationQueue.of_layers(NUM_LAYERS), Reader()
    done, passes = 0.0, 400
    for number in range(passes):
        done = publish(backlog, number, reader, reads, done)
        assert len(reader.begun) - len(reader.whole) <= 1, "the one that is being read"
    most = passes * reads * (NUM_LAYERS + 1) / (NUM_LAYERS + 2)  # an end takes its time, too
    assert most - 2 <= len(reader.whole) <= most
    read(backlog, reader)
    assert backlog.num_dropped == (NUM_LAYERS + 1) * (passes - len(reader.begun)) > 0


def test_under_overload_the_running_pass_is_read_next() -> None:
    backlog, reader = ObservationQueue.of_layers(NUM_LAYERS), Reader()
    for number in range(PASSES_WAITING):
        publish(backlog, number, reader)
    assert backlog.num_dropped == 0
    read(backlog, reader, 2)
    backlog.begin_iteration(0, partial(began, 100))
    backlog.router_ran(0, partial(routed, 0))
    assert backlog.num_dropped == 0
    backlog.router_ran(1, partial(routed, 1))
    assert backlog.num_dropped == 3 * (NUM_LAYERS + 1)
    read(backlog, reader)
    assert reader.whole == [0] and reader.begun == [0, 100] and reader.layers == [0, 1]


def test_with_little_room_the_pass_that_is_read_goes_then_the_oldest_routers() -> None:
    backlog, reader = ObservationQueue(3), Reader()
    publish(backlog, 0, reader, reads=0.2)  # one of its six
    assert (reader.begun, backlog.num_dropped) == ([0], 2)
    backlog.begin_iteration(0, partial(began, 1))
    assert backlog.num_dropped == 2 + 3
    for layer in range(4):
        backlog.router_ran(layer, partial(routed, layer))
    assert backlog.num_dropped == 2 + 3 + 2
    read(backlog, reader)
    assert reader.begun == [0, 1] and reader.layers == [2, 3]


def test_a_pass_whose_end_was_never_told_is_followed_by_the_next() -> None:
    backlog, reader = ObservationQueue(100), Reader()
    backlog.begin_iteration(0, partial(began, 0))
    publish(backlog, 1, reader)
    read(backlog, reader)
    assert reader.begun == [0, 1] and reader.whole == [1]


def test_nothing_waits_after_it_was_cleared() -> None:
    backlog, reader = ObservationQueue(NUM_LAYERS + 1), Reader()
    publish(backlog, 0, reader)
    backlog.clear()
    assert backlog.next() is None
    publish(backlog, 1, reader)
    read(backlog, reader)
    assert reader.whole == [1] and backlog.num_dropped == 0
