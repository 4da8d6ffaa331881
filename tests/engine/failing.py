"""What goes wrong while a model runs: reads that fail, interrupts at the worst of times."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Case
from tests.engine.disk import Preads, path_of
from tests.engine.observe import loaded
from tests.families import generate


def raising(error: BaseException) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


class FailOnce:
    """A pread that fails at its `at`-th call, once."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.path: Path | None = None
        self._lock = threading.Lock()

    def __call__(self, file: int, buffer: memoryview, offset: int) -> int:
        with self._lock:
            self.at -= 1
            is_now = self.at == 0
        if is_now:
            self.path = path_of(file)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(file, [buffer], offset)


class InterruptAt:
    """Sends SIGINT before the `at`-th line that runs in the engine, the scheduler or the policies."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        is_ours = "/expertly/engine/" in name or "/expertly/scheduler/" in name or "/expertly/policies/" in name
        return self._line if is_ours else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._line


def interrupt_at_lines(case: Case, lines: Sequence[int], check: Callable[[Any], None], **settings: Any) -> None:
    """Interrupt a model before each of these lines: it works on and `check` passes."""
    with loaded(case.store, **settings) as model:
        generate(model, case.prompts, 3)
        for at in lines:
            sys.settrace(InterruptAt(at))
            try:
                with pytest.raises(KeyboardInterrupt):
                    generate(model, case.prompts)
            finally:
                sys.settrace(None)
            assert generate(model, case.prompts, 5) == [tokens[:5] for tokens in case.tokens], f"line {at}"
            check(model)


def interrupt_twice(case: Case, monkeypatch: pytest.MonkeyPatch, check: Callable[[Any], None], **settings: Any) -> None:
    """Interrupt a model that waits for a slow disk, and again while it waits for the reads under way: it works on and
    `check` passes.
    """
    may_read, waits = threading.Event(), threading.Event()
    may_read.set()

    def slowly(file: int, buffer: memoryview, offset: int) -> int:
        waits.set()
        if threading.current_thread() is not threading.main_thread():  # out of which no interrupt would come
            may_read.wait(3)
        return os.preadv(file, [buffer], offset)

    def interrupt() -> None:
        waits.wait(30)
        for _ in range(2):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
        may_read.set()

    Preads(monkeypatch, slowly)
    with loaded(case.store, **settings) as model:
        assert generate(model, case.prompts) == case.tokens
        may_read.clear()
        waits.clear()
        user = threading.Thread(target=interrupt)
        user.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                generate(model, case.prompts)
        finally:
            user.join()
            may_read.set()
        assert generate(model, case.prompts) == case.tokens
        check(model)
