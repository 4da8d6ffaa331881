"""Items that several processes share."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import Any, TypeVar

from expertly.core.errors import ExpertlyError

Worker = TypeVar("Worker")
Item = TypeVar("Item")
Found = TypeVar("Found")

_workers: list[Callable[[], Any]] = []
"""Gives the worker of this process, where it is one of several; at most one."""


def as_finished(
    jobs: int, make: Callable[[], Worker], do: Callable[[Worker, Item], Found], items: Sequence[Item]
) -> Iterator[tuple[int, Found]]:
    """`do(worker, item)` of each item with the item's number, as they end; so many at once, each in a process with a
    worker of its own, which `make` makes there. All of them are pickled. What one
    raises is raised here, and ends the others, as closing this iterator does. Raises ExpertlyError where a process ends
    by itself.
    """
    context = multiprocessing.get_context("spawn")  # threads, as of libraries and progress bars, do not survive a fork
    pool = ProcessPoolExecutor(min(jobs, len(items)), context, _begin, (make,))
    futures: dict[Future[Found], int] = {}
    try:
        # Processes inherit the mask: an interrupt is for this one, which ends them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            futures = {pool.submit(_do, do, item): number for number, item in enumerate(items)}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise ExpertlyError("a process ended, perhaps for want of memory; --jobs 1 needs least") from None
    finally:
        if not all(future.done() for future in futures):
            for process in pool._processes.values():
                process.kill()
        pool.shutdown(cancel_futures=True)


def _begin(make: Callable[[], Any]) -> None:
    os.dup2(2, 1)  # what libraries print is no result of the command
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _workers.append(cache(make))


def _end_with_parent() -> None:
    """A parent that was killed cannot end its processes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _do(do: Callable[[Any, Item], Found], item: Item) -> Found:
    return do(_workers[0](), item)
