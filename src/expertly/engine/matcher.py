"""A thread that predicts beside the forward pass, which never waits for it (fMoE, section 4.3)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from expertly.control.channel import Seen
from expertly.core.observation import Began, Routed
from expertly.policies.predictor import Predictor

Context = tuple[int, Callable[[], Routed]]
"""The step, and what a router said then."""


@dataclass(slots=True, eq=False)
class _Pass:
    """What has been published of a forward pass and not been read."""

    step: int
    began: Callable[[], Began] | None
    routed: deque[Context] = field(default_factory=deque)
    ok: bool | None = None  # None: it runs, or nobody said how it ended

    @property
    def num_contexts(self) -> int:
        return len(self.routed) + (self.began is not None)


class ThreadChannel:
    """A Channel whose predictor has a thread of its own.

    Of what is published, `max_waiting` contexts may wait; of more, the oldest go: passes that have ended as a whole,
    then what the routers of the running one said. What predicting raises is raised by the next `take`, once; from then
    on nothing is predicted. `save` is called by the thread some `save_every_s` seconds after it had something to do,
    when nothing waits, or after twice the time between two contexts. `context` is entered by the thread.
    """

    def __init__(
        self,
        predictor: Predictor,
        max_waiting: int,
        save: Callable[[], object] | None = None,
        save_every_s: float = 60.0,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        assert max_waiting >= 1
        self.num_dropped = 0
        """Contexts that nobody read, because of too many."""
        self.error: BaseException | None = None
        """What ended predicting, once it was raised by `take`, too."""
        self._predictor = predictor
        self._max_waiting = max_waiting
        self._save = save
        self._save_every_s = save_every_s
        self._context = context
        self._passes: deque[_Pass] = deque()
        self._num_waiting = 0
        self._ready: deque[Seen] = deque()
        self._untold: BaseException | None = None
        self._busy_since: float | None = None  # when it first had something to do after `save`
        self._is_open = True
        self._ends_at: float | None = None  # when the thread ends, whatever waits
        self._changed = threading.Condition()  # re-entrant: a garbage collection may close another model's channel
        self._thread = threading.Thread(target=self._serve, name="expertly-matcher", daemon=True)
        self._thread.start()

    # -- the forward pass's side -------------------------------------------------------------------------------

    def begin_iteration(self, step: int, began: Callable[[], Began]) -> None:
        with self._changed:
            if self._is_open:
                self._passes.append(_Pass(step, began))
                self._published()

    def router_ran(self, step: int, routed: Callable[[], Routed]) -> None:
        with self._changed:
            if self._is_open and self._passes and self._passes[-1].ok is None:
                self._passes[-1].routed.append((step, routed))
                self._published()

    def end_iteration(self, ok: bool) -> None:
        with self._changed:
            if self._is_open and self._passes:
                self._passes[-1].ok = ok
                self._changed.notify()

    def take(self) -> Seen | None:
        """The next prediction that is ready. Raises what making one raised, once."""
        if self._untold is not None:
            error, self._untold = self._untold, None
            raise error
        try:
            return self._ready.popleft()
        except IndexError:
            return None

    def close(self, wait_s: float = 1.0) -> bool:
        """Read what still waits, for so long at most, and end the thread. Idempotent; True when it has ended."""
        with self._changed:
            self._is_open = False
            if self._ends_at is None:
                self._ends_at = time.monotonic() + wait_s
            self._changed.notify()
        if self._thread is threading.current_thread():  # a garbage collection in the thread itself
            return False
        self._thread.join(wait_s + 10.0)
        return not self._thread.is_alive()

    def _published(self) -> None:
        self._num_waiting += 1
        while self._num_waiting > self._max_waiting:
            self._drop_oldest()
        self._changed.notify()

    def _drop_oldest(self) -> None:
        oldest = next(one for one in self._passes if one.num_contexts)
        if oldest is self._passes[-1]:  # it may run, and be of use without them
            oldest.routed.popleft()
            num_dropped = 1
        else:
            self._passes.remove(oldest)
            num_dropped = oldest.num_contexts
        self.num_dropped += num_dropped
        self._num_waiting -= num_dropped

    # -- the thread's side -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            with self._context():
                while (work := self._next()) is not None:
                    work()
        except BaseException as error:  # handed to the next `take`
            with self._changed:
                self._is_open = False
                self._passes.clear()
                self._untold = self.error = error

    def _next(self) -> Callable[[], None] | None:
        """What to do next, when there is something; None: end."""
        with self._changed:
            while True:
                now = time.monotonic()
                if self._ends_at is not None and now >= self._ends_at:
                    return None
                waited_s = 0.0 if self._busy_since is None else now - self._busy_since
                if self._save is not None and waited_s >= 2 * self._save_every_s:
                    return self._save_now
                work = self._next_published()
                if work is not None:
                    self._busy_since = self._busy_since or now
                    return work
                if not self._is_open:
                    return None
                if self._save is None or self._busy_since is None:
                    self._changed.wait()
                elif waited_s >= self._save_every_s:
                    return self._save_now
                else:
                    self._changed.wait(self._save_every_s - waited_s)

    def _save_now(self) -> None:
        assert self._save is not None
        self._busy_since = None
        self._save()

    def _next_published(self) -> Callable[[], None] | None:
        while self._passes:
            first = self._passes[0]
            if first.began is not None:
                began, first.began = first.began, None
                self._num_waiting -= 1
                return partial(self._begin, first.step, began)
            if first.routed:
                self._num_waiting -= 1
                return partial(self._ran, *first.routed.popleft())
            if first.ok is None and len(self._passes) == 1:
                return None  # it runs
            self._passes.popleft()
            if first.ok is not None:
                return partial(self._predictor.end_iteration, first.ok)
        return None

    def _begin(self, step: int, began: Callable[[], Began]) -> None:
        for prediction in self._predictor.begin_iteration(began()):
            self._ready.append(Seen(step, prediction))

    def _ran(self, step: int, routed: Callable[[], Routed]) -> None:
        for prediction in self._predictor.router_ran(routed()):
            self._ready.append(Seen(step, prediction))
