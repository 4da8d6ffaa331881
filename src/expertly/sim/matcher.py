"""A predictor beside the simulated device: it takes its time, and what it says is there when it has been made."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from expertly.core.observation import Began, Routed
from expertly.policies.predictor import Predictor
from expertly.scheduler.observations import ObservationQueue, Seen, Work
from expertly.sim.hardware import PredictorCosts
from expertly.sim.link import Clock
from expertly.sim.server import NEVER_NS


class MatcherWatcher(Protocol):
    """Sees what the predictor does, with its times."""

    def predicted(self, what: str, begin_ns: int, end_ns: int) -> None:
        """It read what a pass showed when it began ("begin"), of a router ("router") or at its end ("update")."""
        ...


class VirtualChannel:
    """A Channel whose other end is one thread, as the engine's: it reads one context after the other, in order; each
    takes `call_ns` and the time of the work that the predictor counts for it. Nothing waits for it but `catch_up`.

    Of what is published, `backlog` says what waits and what goes. The predictor runs when the clock has come to where
    the thread begins: it never sees what was dropped. With costs of 0 this is an InlineChannel.
    """

    def __init__(
        self,
        predictor: Predictor,
        clock: Clock,
        costs: PredictorCosts,
        backlog: ObservationQueue,
        watcher: MatcherWatcher | None = None,
    ) -> None:
        self.busy_ns = 0
        """Time that the thread was not idle."""
        self.stall_ns = 0
        """Time that `catch_up` took."""
        self._predictor = predictor
        self._clock = clock
        self._costs = costs
        self._backlog = backlog
        self._watcher = watcher
        self._ready: deque[tuple[int, Seen]] = deque()  # when it is there
        self._free_at_ns = 0

    @property
    def num_dropped(self) -> int:
        """Contexts that nobody read, because of too many."""
        return self._backlog.num_dropped

    def begin_iteration(self, step: int, began: Callable[[], Began]) -> None:
        """See Channel."""
        self._read_until(self._clock.now_ns)
        self._backlog.begin_iteration(step, began, self._clock.now_ns)

    def router_ran(self, step: int, routed: Callable[[], Routed]) -> None:
        """See Channel."""
        self._read_until(self._clock.now_ns)
        self._backlog.router_ran(step, routed, self._clock.now_ns)

    def end_iteration(self, ok: bool) -> None:
        """See Channel. What is learned from the pass takes its time, too."""
        self._backlog.end_iteration(ok, self._clock.now_ns)

    def take(self) -> Seen | None:
        """See Channel: only what has been made by now."""
        now = self._clock.now_ns
        self._read_until(now)
        if self._ready and self._ready[0][0] <= now:
            return self._ready.popleft()[1]
        return None

    def catch_up(self) -> None:
        """Move the clock to where the thread has read all that was published."""
        now = self._clock.now_ns
        self._read_until(NEVER_NS)
        if self._free_at_ns > now:
            self.stall_ns += self._free_at_ns - now
            self._clock.now_ns = self._free_at_ns

    def close(self) -> None:
        """Read all that is left: nothing else will be published."""
        self._read_until(NEVER_NS)

    def _read_until(self, now_ns: int) -> None:
        """Read what the thread begins with by then, of what has been published by now."""
        while self._free_at_ns <= now_ns and (work := self._backlog.next()) is not None:
            self._read(work)

    def _read(self, work: Work) -> None:
        """One context. A prediction is there when it has been made, which may be before the last of them."""
        done, costs = self._predictor.work, self._costs
        begin = max(self._free_at_ns, work.at_ns)
        called = begin + costs.call_ns
        nbytes, flops = done.read_nbytes, done.flops
        for prediction in work.do(self._predictor):
            made = called + costs.work_ns(done.read_nbytes - nbytes, done.flops - flops)
            self._ready.append((made, Seen(work.step, prediction)))
        self._free_at_ns = called + costs.work_ns(done.read_nbytes - nbytes, done.flops - flops)
        self.busy_ns += self._free_at_ns - begin
        if self._watcher is not None:
            self._watcher.predicted(work.what, begin, self._free_at_ns)
