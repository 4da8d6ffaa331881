"""Threads that do what they are given, one a device, so that devices work side by side."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from expertly.core.errors import EngineClosedError

_LOOK_EVERY_S = 1.0
"""Whoever waits looks so often whether the threads still run."""


class Failure(NamedTuple):
    """What a thread's call raised."""

    thread: int
    error: BaseException


class _Job(NamedTuple):
    call: Callable[[], Any]
    number: int
    done: SimpleQueue[tuple[int, Any, BaseException | None]]


class Workers:
    """A thread a name. Calls given to one run in order. Used by one thread at a time.

    An interrupt may come while the caller waits: what it has given runs on, and what it gives next comes after it.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._queues: list[SimpleQueue[_Job | None]] = [SimpleQueue() for _ in names]
        self._threads = [
            threading.Thread(target=_serve, args=(queue,), name=name, daemon=True)
            for name, queue in zip(names, self._queues, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, calls: Sequence[Callable[[], Any]]) -> tuple[list[Any], Failure | None]:
        """Run one call on each thread, all at once, and wait until all have ended: their results, and the failure that
        came first. Raises EngineClosedError where a thread has ended.
        """
        done: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        jobs = [_Job(call, number, done) for number, call in enumerate(calls)]
        deque(map(SimpleQueue.put, self._queues, jobs), maxlen=0)  # in one step: an interrupt gives to all or to none
        results: list[Any] = [None] * len(jobs)
        first: Failure | None = None
        for _ in jobs:
            number, results[number], error = self._next(done)
            if error is not None and first is None:
                first = Failure(number, error)
        return results, first

    def close(self) -> None:
        """End the threads, when they have done what they were given. Idempotent."""
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # a garbage collection in the thread itself
                thread.join()

    def _next(self, done: SimpleQueue[Any]) -> Any:
        while True:
            try:
                return done.get(timeout=_LOOK_EVERY_S)
            except Empty:
                for thread in self._threads:
                    if not thread.is_alive() and done.empty():
                        raise EngineClosedError(
                            f"the thread {thread.name} has ended, so its device cannot run; call expertly.load again"
                        ) from None


def _serve(queue: SimpleQueue[_Job | None]) -> None:
    with torch.inference_mode():
        while (job := queue.get()) is not None:
            result: Any = None
            error: BaseException | None = None
            try:
                result = job.call()
            except BaseException as e:  # a thread's entry: whoever waits raises it
                error = e
            job.done.put((job.number, result, error))
            del job, result, error  # nothing is held on to while nothing is to be done
