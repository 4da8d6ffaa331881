"""A predictor beside the simulated device: it takes its time, and what it says is there when it has been made."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from expertly.control.channel import Seen
from expertly.core.messages import Prediction
from expertly.core.observation import Began, Routed
from expertly.policies.predictor import Predictor
from expertly.sim.hardware import PredictorCosts
from expertly.sim.link import Clock
from expertly.sim.server import NEVER_NS

PASSES_WAITING = 4
"""Forward passes whose contexts may wait, as in the engine."""


class MatcherWatcher(Protocol):
    """Sees what the predictor does, with its times."""

    def predicted(self, what: str, begin_ns: int, end_ns: int) -> None:
        """It read what a pass showed when it began ("begin"), of a router ("router") or at its end ("update")."""
        ...


class _Context(NamedTuple):
    at_ns: int
    step: int
    routed: Callable[[], Routed]


@dataclass(slots=True, eq=False)
class _Pass:
    """What has been published of a forward pass and not been read."""

    at_ns: int
    step: int
    began: Callable[[], Began] | None
    routed: deque[_Context] = field(default_factory=deque)
    ended_ns: int | None = None
    ok: bool = True

    @property
    def num_contexts(self) -> int:
        return len(self.routed) + (self.began is not None)


class VirtualChannel:
    """A Channel whose other end is one thread, as the engine's: it reads one context after the other, in order; each
    takes `call_ns` and the time of the work that the predictor counts for it. Nothing waits for it.

    Of what is published, `max_waiting` contexts may wait; of more, the oldest go: passes that have ended as a whole,
    then what the routers of the running one said. The predictor runs when the clock has come to where the thread
    begins: it never sees what was dropped. With costs of 0 this is an InlineChannel.
    """

    def __init__(
        self,
        predictor: Predictor,
        clock: Clock,
        costs: PredictorCosts,
        max_waiting: int,
        watcher: MatcherWatcher | None = None,
    ) -> None:
        assert max_waiting >= 1
        self.num_dropped = 0
        """Contexts that nobody read, because of too many."""
        self.busy_ns = 0
        """Time that the thread was not idle."""
        self._predictor = predictor
        self._clock = clock
        self._costs = costs
        self._max_waiting = max_waiting
        self._watcher = watcher
        self._passes: deque[_Pass] = deque()
        self._num_waiting = 0  # contexts
        self._num_unread = 0  # ends of passes, too
        self._ready: deque[tuple[int, Seen]] = deque()  # when it is there
        self._free_at_ns = 0

    def begin_iteration(self, step: int, began: Callable[[], Began]) -> None:
        """See Channel."""
        self._read_until(self._clock.now_ns)
        self._passes.append(_Pass(self._clock.now_ns, step, began))
        self._published()

    def router_ran(self, step: int, routed: Callable[[], Routed]) -> None:
        """See Channel."""
        self._read_until(self._clock.now_ns)
        self._passes[-1].routed.append(_Context(self._clock.now_ns, step, routed))
        self._published()

    def end_iteration(self, ok: bool) -> None:
        """See Channel. What is learned from the pass takes its time, too."""
        self._passes[-1].ended_ns, self._passes[-1].ok = self._clock.now_ns, ok
        self._num_unread += 1

    def take(self) -> Seen | None:
        """See Channel: only what has been made by now."""
        now = self._clock.now_ns
        if self._num_unread and self._free_at_ns <= now:
            self._read_until(now)
        if self._ready and self._ready[0][0] <= now:
            return self._ready.popleft()[1]
        return None

    def close(self) -> None:
        """Read all that is left: nothing else will be published."""
        self._read_until(NEVER_NS)

    def _published(self) -> None:
        self._num_waiting += 1
        self._num_unread += 1
        while self._num_waiting > self._max_waiting:
            oldest = next(one for one in self._passes if one.num_contexts)
            if oldest is self._passes[-1]:  # it runs, and is of use without them
                oldest.routed.popleft()
                num_dropped = 1
            else:
                self._passes.remove(oldest)
                num_dropped = oldest.num_contexts
                self._num_unread -= 1  # its end
            self.num_dropped += num_dropped
            self._num_waiting -= num_dropped
            self._num_unread -= num_dropped

    def _read_until(self, now_ns: int) -> None:
        """Read what the thread begins with by then, of what has been published by now."""
        while self._num_unread and self._free_at_ns <= now_ns:
            first = self._passes[0]
            if first.began is not None:
                began, first.began = first.began, None
                self._num_waiting -= 1
                self._read("begin", first.at_ns, first.step, partial(self._begin, began))
            elif first.routed:
                context = first.routed.popleft()
                self._num_waiting -= 1
                self._read("router", context.at_ns, context.step, partial(self._ran, context.routed))
            else:
                assert first.ended_ns is not None, "a pass that runs is the last, and all of it has been read"
                self._passes.popleft()
                self._read("update", first.ended_ns, first.step, partial(self._end, first.ok))

    def _read(self, what: str, at_ns: int, step: int, look: Callable[[], Iterable[Prediction]]) -> None:
        """One context. A prediction is there when it has been made, which may be before the last of them."""
        self._num_unread -= 1
        work, costs = self._predictor.work, self._costs
        begin = max(self._free_at_ns, at_ns)
        called = begin + costs.call_ns
        nbytes, flops = work.read_nbytes, work.flops
        for prediction in look():
            made = called + costs.work_ns(work.read_nbytes - nbytes, work.flops - flops)
            self._ready.append((made, Seen(step, prediction)))
        self._free_at_ns = called + costs.work_ns(work.read_nbytes - nbytes, work.flops - flops)
        self.busy_ns += self._free_at_ns - begin
        if self._watcher is not None:
            self._watcher.predicted(what, begin, self._free_at_ns)

    def _begin(self, began: Callable[[], Began]) -> Iterable[Prediction]:
        return self._predictor.begin_iteration(began())

    def _ran(self, routed: Callable[[], Routed]) -> Iterable[Prediction]:
        return self._predictor.router_ran(routed())

    def _end(self, ok: bool) -> Iterable[Prediction]:
        self._predictor.end_iteration(ok)
        return ()
