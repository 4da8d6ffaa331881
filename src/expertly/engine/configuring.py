"""A thread that works out what layers should keep, beside the forward passes, which never wait for it."""

from __future__ import annotations

import threading
import time

from expertly.engine.step_times import StepTimes
from expertly.policies.allocation import Job
from expertly.policies.allocation.moepic import SplitPlan, Timing
from expertly.scheduler.scheduler import Scheduler

_CLOSE_S = 10.0


class Configuring:
    """Of one device: when its scheduler says that something is due, and times are known, the job gets a thread; what
    comes of it is kept from the beginning of a pass on. What the job raises is raised there, once; then nothing is
    worked out any more.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.times = StepTimes(scheduler.geometry)
        self._scheduler = scheduler
        self._thread: threading.Thread | None = None
        self._plan: SplitPlan | None = None
        self._error: BaseException | None = None

    def begin_iteration(self) -> None:
        """A pass begins: nothing runs yet."""
        self.times.begin(time.perf_counter_ns())
        if self._thread is None:
            if self.times.is_known and (job := self._scheduler.configuration_due()) is not None:
                self._thread = threading.Thread(
                    target=self._work, args=(job, self.times.timing()), name="expertly-configurator", daemon=True
                )
                self._thread.start()
            return
        if self._thread.is_alive():
            return
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        assert self._plan is not None
        self._scheduler.configure(self._plan)

    def close(self) -> None:
        """Forget what is worked out. Idempotent. The job holds nothing of the model: it may end later."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    def _work(self, job: Job, timing: Timing) -> None:
        try:
            self._plan = job(timing).plan
        except BaseException as error:  # a thread's entry: the next pass raises it
            self._error = error
