"""The predictor's thread: it predicts beside who publishes, who never waits; what it raises is told once; it ends."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Began, Routed
from expertly.engine.observe import PredictorThread
from expertly.policies.predictor import Predictor
from expertly.scheduler.observations import Channel, InlineChannel, ObservationQueue, Seen

pytestmark = pytest.mark.timeout(180)

NUM_LAYERS = 4


class Diary(Predictor):
    """Notes what it is told, and says that the next layer will need what this one did; waits for `may_go`."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.fail_at: int | None = None
        self.busy = threading.Event()

    def begin_iteration(self, began: Began) -> Iterable[Prediction]:
        self._note("begin", int(began.requests[0]))
        return [Prediction(0, [int(began.requests[0])], [1.0], 1)]

    def router_ran(self, routed: Routed) -> Iterable[Prediction]:
        self._note("router", routed.layer)
        return [Prediction(routed.layer + 1, routed.router.experts, [1.0], 1)]

    def end_iteration(self, ok: bool) -> None:
        self._note("end", ok)

    def _note(self, *what: Any) -> None:
        self.busy.set()
        self.may_go.wait(30)
        if self.fail_at is not None and len(self.told) >= self.fail_at:
            raise ValueError(f"no more after {len(self.told)}")
        self.told.append(what)


def began(request: int) -> Callable[[], Began]:
    return lambda: Began(np.array([request]), np.array([False]))


def routed(layer: int) -> Callable[[], Routed]:
    return lambda: Routed(RouterRan(layer, [layer], [1], [True], 1))


def publish(
    channel: Channel, iteration: int, layers: Iterable[int] = range(NUM_LAYERS), ok: bool | None = True
) -> None:
    """A forward pass of one token of request `iteration`; `ok` None: its end is never told."""
    step = iteration * NUM_LAYERS
    channel.begin_iteration(step - 1, began(iteration))
    for layer in layers:
        channel.router_ran(step + layer, routed(layer))
    if ok is not None:
        channel.end_iteration(ok)


def a_pass(iteration: int, ok: bool = True) -> list[Any]:
    return [("begin", iteration), *(("router", layer) for layer in range(NUM_LAYERS)), ("end", ok)]


def until(is_true: Callable[[], object], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


def all_ready(channel: Channel) -> list[Seen]:
    return list(iter(channel.take, None))


@contextmanager
def channel_of(predictor: Predictor, max_waiting: int = 1000, **kwargs: Any) -> Iterator[PredictorThread]:
    channel = PredictorThread(predictor, ObservationQueue(max_waiting), **kwargs)
    try:
        yield channel
    finally:
        for may_go in [predictor.may_go] if isinstance(predictor, Diary) else []:
            may_go.set()
        assert channel.close()


def test_it_tells_the_predictor_and_hands_out_what_an_inline_channel_does() -> None:
    threaded, inline = Diary(), Diary()
    expected = InlineChannel(inline)
    with channel_of(threaded) as channel:
        for iteration in range(5):
            publish(channel, iteration, ok=iteration != 3)
            publish(expected, iteration, ok=iteration != 3)
        until(lambda: len(threaded.told) == len(inline.told))
        assert threaded.told == inline.told == [one for i in range(5) for one in a_pass(i, ok=i != 3)]
        found = all_ready(channel)
        assert found == all_ready(expected)
        assert [seen.step for seen in found[:3]] == [-1, 0, 1]
        assert channel.num_dropped == 0


def test_publishing_never_waits_and_the_oldest_passes_go() -> None:
    """The predictor is stuck in the first pass while ten more are published."""
    diary = Diary()
    diary.may_go.clear()
    with channel_of(diary, max_waiting=2 * (NUM_LAYERS + 1)) as channel:
        publish(channel, 0)
        until(diary.busy.is_set)
        for iteration in range(1, 11):
            publish(channel, iteration)
            assert channel.take() is None
        assert not diary.told, "it has not moved meanwhile"
        diary.may_go.set()
        until(lambda: diary.told[-1:] == [("end", True)] and ("begin", 10) in diary.told)
        assert diary.told == [*a_pass(0), *a_pass(10)], "what was being read is read to its end"
        assert channel.num_dropped == 9 * (NUM_LAYERS + 1)


def test_what_the_predictor_raises_is_raised_by_take_once() -> None:
    diary = Diary()
    diary.fail_at = 3
    with channel_of(diary) as channel:
        publish(channel, 0)
        until(lambda: channel.error is not None)
        with pytest.raises(ValueError, match="no more after 3"):
            all_ready(channel)
        for iteration in range(1, 50):  # nothing piles up, nothing is predicted, nobody is told again
            publish(channel, iteration)
        assert all(seen.step < NUM_LAYERS for seen in all_ready(channel))
        assert channel.take() is None
        assert isinstance(channel.error, ValueError)
        assert diary.told == a_pass(0)[:3]


def test_closing_reads_what_waits_and_ends_the_thread() -> None:
    diary = Diary()
    before = threading.active_count()
    channel = PredictorThread(diary, ObservationQueue(1000))
    assert threading.active_count() == before + 1
    for iteration in range(20):
        publish(channel, iteration)
    assert channel.close() and channel.close()
    assert threading.active_count() == before
    assert diary.told == [one for i in range(20) for one in a_pass(i)]
    publish(channel, 20)
    assert diary.told[-1] == ("end", True) and ("begin", 20) not in diary.told


def test_closing_does_not_wait_for_all_that_a_slow_predictor_has_to_read() -> None:
    class Slow(Diary):
        def _note(self, *what: Any) -> None:
            time.sleep(0.05)
            self.told.append(what)

    slow = Slow()
    channel = PredictorThread(slow, ObservationQueue(1000))
    for iteration in range(100):
        publish(channel, iteration)
    until(lambda: slow.told)
    assert channel.close(wait_s=0.2)
    assert len(slow.told) < 300, "half of them"


def test_saving_happens_in_the_thread_when_nothing_waits_and_only_after_work() -> None:
    saved: list[tuple[str, int]] = []
    diary = Diary()
    with channel_of(
        diary, save=lambda: saved.append((threading.current_thread().name, len(diary.told))), save_every_s=0.01
    ) as channel:
        time.sleep(0.05)
        assert not saved, "there was nothing to save"
        channel.save_every(60)
        for iteration in range(2):
            publish(channel, iteration)
        until(lambda: len(diary.told) == 2 * len(a_pass(0)))
        channel.save_every(0.01)
        until(lambda: saved)
        assert saved == [("expertly-predictor", 2 * len(a_pass(0)))]
        time.sleep(0.05)
        assert len(saved) == 1, "nothing has happened since"
        publish(channel, 2)
        until(lambda: len(saved) == 2)


def test_who_is_always_busy_is_saved_too() -> None:
    saved: list[tuple[float, int]] = []

    class Slow(Diary):
        def _note(self, *what: Any) -> None:
            time.sleep(0.005)
            self.told.append(what)

    slow = Slow()
    with channel_of(slow, save=lambda: saved.append((time.monotonic(), len(slow.told))), save_every_s=0.05) as channel:
        start = time.monotonic()
        for iteration in range(40):  # a second of work, there from the beginning
            publish(channel, iteration)
        until(lambda: len(saved) >= 2)
        assert saved[0][0] - start >= 0.1 and 0 < saved[0][1] <= 0.1 / 0.005 + 1
        channel.close(wait_s=0.0)


def test_a_collection_in_the_thread_may_close_it() -> None:
    """The garbage collector runs where it likes: also in the predictor's thread, and there it may unload the model."""
    holder: list[PredictorThread] = []
    closed: list[bool] = []
    saved: list[int] = []

    class Unloading(Diary):
        def _note(self, *what: Any) -> None:
            closed.append(holder[0].close())

    holder.append(PredictorThread(Unloading(), ObservationQueue(10), save=lambda: saved.append(len(closed))))
    publish(holder[0], 0)
    until(lambda: closed)
    assert closed[0] is False, "it cannot have ended"
    until(lambda: holder[0].close())
    assert saved == [NUM_LAYERS + 2], "once, when it had read all"


def test_an_interrupt_leaves_no_lock_taken() -> None:
    """Python's own code may be interrupted, too, between taking a condition's lock and the block that gives it back."""

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code is not threading.Condition.__enter__.__code__:
            return trace
        if event == "return":
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    diary = Diary()
    with channel_of(diary) as channel:
        publish(channel, 0)
        for publishing in (
            lambda: channel.begin_iteration(NUM_LAYERS - 1, began(1)),
            lambda: channel.router_ran(NUM_LAYERS, routed(0)),
            lambda: channel.end_iteration(True),
        ):
            sys.settrace(trace)
            try:
                with contextlib.suppress(KeyboardInterrupt):
                    publishing()
            finally:
                sys.settrace(None)
        publish(channel, 2)
        until(lambda: ("begin", 2) in diary.told)
        assert channel.close()


def test_two_threads_soak() -> None:
    """Publishing at full speed against a predictor of changing speed: what is read is in order, and all is counted."""
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        diary = Diary()
        with channel_of(diary, max_waiting=7) as channel:
            num_taken = 0
            for iteration in range(400):
                if iteration % 50 == 20:
                    diary.may_go.clear()
                if iteration % 50 == 40:
                    diary.may_go.set()
                publish(channel, iteration)
                num_taken += len(all_ready(channel))
            channel.close(wait_s=20)
            num_taken += len(all_ready(channel))
            num_read = sum(what != "end" for what, _ in diary.told)
            assert num_read + channel.num_dropped == 400 * (NUM_LAYERS + 1)
            assert num_taken == num_read
            requests = [value for what, value in diary.told if what == "begin"]
            assert requests == sorted(set(requests)) and requests[-1] == 399
            assert channel.num_dropped > 0
    finally:
        sys.setswitchinterval(switch)
        gc.collect()
