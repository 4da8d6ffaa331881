"""What goes wrong while a model runs: reads that fail, interrupts at the worst of times."""

from __future__ import annotations

import dis
import errno
import linecache
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import expertly
from expertly.core.errors import EngineClosedError, TransferError
from expertly.engine.reading import ReadQueue
from expertly.engine.transfer import Readers
from expertly.store.reader import ExpertFile
from tests.engine.conftest import Case
from tests.engine.observe import loaded
from tests.families import generate


def raising(error: BaseException) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


def replace_reads(patch: pytest.MonkeyPatch, read_into: Callable[..., bool]) -> None:
    """Put `read_into` in the place of `ExpertFile.read_into`, and have readers read everything."""
    patch.setattr(ExpertFile, "read_into", read_into)
    patch.setattr(Readers, "_direct", lambda *_: None)


class FailOnce:
    """`ExpertFile.read_into` that fails at its `at`-th call, once."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.path: Path | None = None
        self._lock = threading.Lock()
        self._original = ExpertFile.read_into

    def __call__(self, file: ExpertFile, offset: int, buffers: Sequence[memoryview]) -> bool:
        with self._lock:
            self.at -= 1
            is_now = self.at == 0
        if is_now:
            self.path = file.path
            error = OSError(errno.EIO, os.strerror(errno.EIO))
            raise TransferError(f"{file.path}: reading at offset {offset} failed ({error.strerror})") from error
        return self._original(file, offset, buffers)


class InterruptAt:
    """Raises KeyboardInterrupt before the `at`-th line that runs in the engine, the control plane or the policies."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        is_ours = "/expertly/engine/" in name or "/expertly/scheduler/" in name or "/expertly/policies/" in name
        return self._line if is_ours else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line" and not _leaves_with(frame):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def _leaves_with(frame: Any) -> bool:
    """The line of a `with` comes again where its block has ended, before `__exit__` is called. No signal is handled
    between the two: CPython looks for one after calls, not where it loads the three None that `__exit__` is given.
    """
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
    return line.startswith("with ") and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "LOAD_CONST"


def interrupt_at_lines(case: Case, lines: Sequence[int], check: Callable[[Any], None], **settings: Any) -> None:
    """Interrupt a model before each of these lines: mostly it works on and `check` passes; else it says it cannot, and
    the next line is another model's.
    """
    num_closed, model = 0, None
    try:
        for at in lines:
            if model is None:
                model, _ = expertly.load(str(case.store), **({"device": "cpu"} | settings))
                generate(model, case.prompts, 3)
            sys.settrace(InterruptAt(at))
            try:
                with pytest.raises(KeyboardInterrupt):
                    generate(model, case.prompts)
            finally:
                sys.settrace(None)
            try:
                assert generate(model, case.prompts, 5) == [tokens[:5] for tokens in case.tokens], f"line {at}"
                check(model)
            except EngineClosedError:
                num_closed += 1
                expertly.unload(model)
                model = None
    finally:
        if model is not None:
            expertly.unload(model)
    assert num_closed < len(lines) / 2, f"mostly it works on: not after {num_closed} of {len(lines)} lines"


def interrupt_twice(case: Case, monkeypatch: pytest.MonkeyPatch, check: Callable[[Any], None], **settings: Any) -> None:
    """Interrupt a model that waits for a slow disk, and again while it waits for the reads under way, those of readers
    and those without one: it works on and `check` passes.
    """
    may_read, waits = threading.Event(), threading.Event()
    may_read.set()

    def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_call(*args: Any) -> Any:
            waits.set()
            may_read.wait(30)
            return function(*args)

        return wait_and_call

    def interrupt() -> None:
        waits.wait(30)
        for _ in range(2):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

    for owner, name in ((ExpertFile, "read_into"), (ReadQueue, "ended"), (ReadQueue, "close")):
        monkeypatch.setattr(owner, name, slowly(getattr(owner, name)))
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
