"""Work for other processes: items that several share, and work whose memory is to go back when it is done."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import Any, NoReturn, TypeVar

from expertly.core.errors import ExpertlyError

Worker = TypeVar("Worker")
Item = TypeVar("Item")
Found = TypeVar("Found")
Result = TypeVar("Result")

_workers: list[Callable[[], Any]] = []
"""Gives the worker of this process, where it is one of several; at most one."""


def in_processes(
    jobs: int,
    make: Callable[[], Worker],
    do: Callable[[Worker, Item], Found],
    items: Sequence[Item],
    is_long: Callable[[Item], bool] = lambda item: False,
) -> Iterator[Found]:
    """`do(worker, item)` of each item, in their order; so many at once, each in a process with a worker of its own,
    which `make` makes there. All of them are pickled. Long items begin before the others. What one raises is raised
    here, and ends the others, as closing this iterator does. Raises ExpertlyError where a process ends by itself.
    """
    for _, found in _shared(jobs, make, do, items, is_long, in_order=True):
        yield found


def as_finished(
    jobs: int,
    make: Callable[[], Worker],
    do: Callable[[Worker, Item], Found],
    items: Sequence[Item],
    is_long: Callable[[Item], bool] = lambda item: False,
) -> Iterator[tuple[int, Found]]:
    """As `in_processes`, but each with the number of its item, in the order in which they end."""
    return _shared(jobs, make, do, items, is_long, in_order=False)


def _shared(
    jobs: int,
    make: Callable[[], Worker],
    do: Callable[[Worker, Item], Found],
    items: Sequence[Item],
    is_long: Callable[[Item], bool],
    in_order: bool,
) -> Iterator[tuple[int, Found]]:
    context = multiprocessing.get_context("spawn")  # threads, as of libraries and progress bars, do not survive a fork
    pool = ProcessPoolExecutor(min(jobs, len(items)), context, _begin, (make,))
    futures: dict[Future[Found], int] = {}
    try:
        # Processes inherit the mask: an interrupt is for this one, which ends them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for number in sorted(range(len(items)), key=lambda number: not is_long(items[number])):
                futures[pool.submit(_do, do, items[number])] = number
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for future in sorted(futures, key=lambda one: futures[one]) if in_order else as_completed(futures):
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


# -- work whose memory goes back ---------------------------------------------------------------------------------------

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl
_PATIENCE_S = 5.0


class _InChildError(Exception):
    """Where an error was raised in a child, as the cause of the same error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def in_child(work: Callable[[Callable[[Any], None]], Result], hear: Callable[[Any], None], name: str) -> Result:
    """`work(tell)` in a child of this process, whose memory goes back to the system when it is done: its result. What
    it calls `tell` with is what `hear` is called with here, in order. All of that is pickled.

    The child is a fork: it shares this process's memory until it writes to it, and knows whatever was imported and
    registered here. It has no other threads, so `work` must not use pools of threads that run already. It ends with
    this process, and where waiting for it is interrupted. Raises what `work` raises, and ExpertlyError, which calls the
    work `name`, where the child is killed.
    """
    receiving, sending = os.pipe()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # an interrupt is for this process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, for any fork beside threads
            try:
                child = os.fork()
            except OSError as error:
                os.close(receiving)
                os.close(sending)
                raise ExpertlyError(f"{name}: the system refuses another process ({error.strerror})") from error
        if not child:
            os.close(receiving)
            _be_child(work, sending, parent)
        os.close(sending)
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            result: Result = _result_of(receiving, hear, child, name)
            return result
        finally:
            os.close(receiving)
            _end(child)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _be_child(work: Callable[[Callable[[Any], None]], Any], sending: int, parent: int) -> NoReturn:
    status = 1
    gc.freeze()  # a collection would write to all that is shared
    held = sys.stdout, sys.stderr  # noqa: F841  they would write what they have when they go
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was begun is left in order
        try:
            sys.stdout = sys.stderr = os.fdopen(
                2, "w", 1, errors="backslashreplace", closefd=False
            )  # no thread's lock on it
        except OSError:  # closed
            sys.stdout = sys.stderr = None
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(status)

        def tell(message: Any) -> None:
            _send(sending, ("told", message))

        try:
            answer: tuple[str, Any] = "done", work(tell)
        except BaseException as error:  # the parent raises it
            answer = "failed", (error, "".join(traceback.format_exception(error)))
        try:
            _send(sending, answer)
        except (pickle.PicklingError, TypeError, AttributeError):  # an exception of a library, with what it is about
            raised, trace = answer[1]
            _send(sending, ("failed", (RuntimeError(f"{type(raised).__name__}: {raised}"), trace)))
        status = 0
    except BrokenPipeError:  # the parent has gone
        pass
    finally:
        os._exit(status)


def _send(sending: int, message: tuple[str, Any]) -> None:
    content = memoryview(pickle.dumps(message))
    while content:
        content = content[os.write(sending, content) :]


def _result_of(receiving: int, hear: Callable[[Any], None], child: int, name: str) -> Any:
    with os.fdopen(receiving, "rb", closefd=False) as file:
        while True:
            try:
                kind, content = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # it ended within a message, or before the last one
                break
            if kind == "done":
                return content
            if kind == "failed":
                error, trace = content
                error.__cause__ = _InChildError(trace)
                raise error
            hear(content)
    how = "ended without an answer"
    with contextlib.suppress(ChildProcessError):  # this process ignores SIGCHLD, or its handler waited first
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
    reason = ", perhaps for want of memory" if how.endswith("(SIGKILL)") else ""
    raise ExpertlyError(f"{name}: the process that did it {how}{reason}")


def _end(child: int) -> None:
    """Of a child that has ended, or is to end now."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        if os.waitpid(child, os.WNOHANG)[0]:
            return
        os.kill(child, signal.SIGTERM)
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            if os.waitpid(child, os.WNOHANG)[0]:
                return
            time.sleep(0.005)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
