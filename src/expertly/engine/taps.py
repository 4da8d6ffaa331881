"""One channel for several devices: what a pass shows is published once, and each device hears of its experts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from expertly.core.observation import Began, Routed
from expertly.core.placement import Placement, Share
from expertly.scheduler.observations import Channel, Seen


class Taps:
    """A Channel for each device of a placement, by number in `of_devices`. Each may have a thread of its own.

    What the devices say that a pass shows is the same; whoever says it first publishes it, and what predicting inline
    takes the others wait for. Each prediction is cut to the experts of each device.
    """

    def __init__(self, channel: Channel, placement: Placement) -> None:
        self.of_devices = [_Tap(self, share) for share in placement.shares]
        self._channel = channel
        self._lock = threading.RLock()  # re-entrant: a garbage collection may close what predicts
        self._num_begun = self._num_ended = 0
        self._step = -1  # of the last router that was published

    def begin_iteration(self, number: int, step: int, began: Callable[[], Began]) -> None:
        """The device's iteration `number`, from 1, begins."""
        with self._lock:
            if number > self._num_begun:
                self._num_begun, self._step = number, step
                self._channel.begin_iteration(step, began)

    def router_ran(self, step: int, routed: Callable[[], Routed]) -> None:
        with self._lock:
            if step > self._step:
                self._step = step
                self._channel.router_ran(step, routed)

    def end_iteration(self, ok: bool) -> None:
        with self._lock:
            if self._num_ended < self._num_begun:
                self._num_ended = self._num_begun
                self._channel.end_iteration(ok)

    def drain(self) -> None:
        """Hand what is ready to all devices."""
        with self._lock:
            while (seen := self._channel.take()) is not None:
                for tap in self.of_devices:
                    tap.put(seen)


class _Tap:
    """See Channel. A device hears nothing of a step before it has come there itself, however far others are: so a run
    can be repeated exactly where its predictions can.
    """

    def __init__(self, taps: Taps, share: Share) -> None:
        self._taps = taps
        self._share = share
        self._ready: deque[Seen] = deque()
        self._num_begun = 0
        self._step = -1

    def put(self, seen: Seen) -> None:
        self._ready.append(Seen(seen.step, self._share.prediction(seen.prediction)))

    def begin_iteration(self, step: int, began: Callable[[], Began]) -> None:
        self._num_begun += 1
        self._step = step
        self._taps.begin_iteration(self._num_begun, step, began)

    def router_ran(self, step: int, routed: Callable[[], Routed]) -> None:
        self._step = step
        self._taps.router_ran(step, routed)

    def end_iteration(self, ok: bool) -> None:
        self._taps.end_iteration(ok)

    def take(self) -> Seen | None:
        self._taps.drain()
        if self._ready and self._ready[0].step <= self._step:
            return self._ready.popleft()
        return None
