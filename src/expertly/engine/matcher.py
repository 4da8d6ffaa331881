"""A thread that predicts beside the forward pass, which never waits for it (fMoE, section 4.3)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from expertly.core.observation import Began, Routed
from expertly.policies.predictor import Predictor
from expertly.scheduler.observations import ObservationQueue, Seen, Work


class ThreadChannel:
    """A Channel whose predictor has a thread of its own.

    Of what is published, `backlog` says what waits and what goes. What predicting raises is raised by the next `take`,
    once; from then on nothing is predicted. `save` is called by the thread some `save_every_s` seconds after it had
    something to do, when nothing waits, or after twice the time between two contexts. `context` is entered by the
    thread.
    """

    def __init__(
        self,
        predictor: Predictor,
        backlog: ObservationQueue,
        save: Callable[[], object] | None = None,
        save_every_s: float = 60.0,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.error: BaseException | None = None
        """What ended predicting, once it was raised by `take`, too."""
        self._predictor = predictor
        self._backlog = backlog
        self._save = save
        self._save_every_s = save_every_s
        self._context = context
        self._ready: deque[Seen] = deque()
        self._untold: BaseException | None = None
        self._busy_since: float | None = None  # when it first had something to do after `save`
        self._is_open = True
        self._ends_at: float | None = None  # when the thread ends, whatever waits
        self._saves_last = False  # nobody waits for its end
        self._lock = threading.RLock()  # re-entrant: a garbage collection may close another model's channel
        self._changed = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._serve, name="expertly-matcher", daemon=True)
        self._thread.start()

    # -- the forward pass's side -------------------------------------------------------------------------------
    # An interrupt may come anywhere; it cannot come between taking the lock itself and the block that gives it back, as
    # it could within the condition's own code.

    @property
    def num_dropped(self) -> int:
        """Contexts that nobody read, because of too many."""
        return self._backlog.num_dropped

    def save_every(self, seconds: float) -> None:
        """From now on."""
        with self._lock:
            self._save_every_s = seconds
            self._changed.notify()

    def begin_iteration(self, step: int, began: Callable[[], Began]) -> None:
        with self._lock:
            if self._is_open:
                self._backlog.begin_iteration(step, began)
                self._changed.notify()

    def router_ran(self, step: int, routed: Callable[[], Routed]) -> None:
        with self._lock:
            if self._is_open:
                self._backlog.router_ran(step, routed)
                self._changed.notify()

    def end_iteration(self, ok: bool) -> None:
        with self._lock:
            if self._is_open:
                self._backlog.end_iteration(ok)
                self._changed.notify()

    def take(self) -> Seen | None:
        """The next prediction that is ready. Raises what making one raised, once."""
        if self._untold is not None:
            error, self._untold = self._untold, None
            raise error
        return self._ready.popleft() if self._ready else None  # nobody else takes

    def close(self, wait_s: float = 1.0) -> bool:
        """Read what still waits, for so long at most, and end the thread. Idempotent; True when it has ended. Called by
        the thread itself it cannot have: then it calls `save` at its end.
        """
        with self._lock:
            self._is_open = False
            if self._ends_at is None:
                self._ends_at = time.monotonic() + wait_s
            self._changed.notify()
        if self._thread is threading.current_thread():  # a garbage collection in the thread itself
            self._saves_last = True
            return False
        with contextlib.suppress(RuntimeError):  # until it is not ours: an interrupt may have come as it was given back
            while True:
                self._lock.release()
        self._thread.join(wait_s + 10.0)
        return not self._thread.is_alive()

    # -- the thread's side -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            with self._context():
                while (work := self._next()) is not None:
                    work()
                if self._saves_last and self._save is not None:
                    self._save_now()
        except BaseException as error:  # handed to the next `take`
            with self._changed:
                self._is_open = False
                self._backlog.clear()
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
                work = self._backlog.next()
                if work is not None:
                    self._busy_since = self._busy_since or now
                    return partial(self._read, work)
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

    def _read(self, work: Work) -> None:
        for prediction in work.do(self._predictor):
            self._ready.append(Seen(work.step, prediction))
