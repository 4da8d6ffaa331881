"""Ctrl-C waits until the engine is between two layers."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from typing import Any

import pytest

from expertly.engine import runtime
from expertly.engine.runtime import DeferredInterrupts


def test_an_interrupt_is_raised_when_the_context_ends() -> None:
    deferred, handler, steps = DeferredInterrupts(), signal.getsignal(signal.SIGINT), list[str]()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), deferred:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            steps.append("went on")
        assert signal.getsignal(signal.SIGINT) is handler
    with deferred:
        steps.append("not interrupted")
    assert steps == ["went on", "went on", "not interrupted"]


def test_an_error_within_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt) as interrupted, DeferredInterrupts():
        signal.raise_signal(signal.SIGINT)
        raise OSError("the disk")
    assert str(interrupted.value.__context__) == "the disk"


def test_handlers_of_the_program_are_called_and_signals_without_one_stay() -> None:
    noted: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with DeferredInterrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            assert not noted
        assert noted == [signal.SIGTERM] and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_other_threads_are_not_interrupted_and_change_no_handler() -> None:
    seen: list[object] = []

    def run() -> None:
        with DeferredInterrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_at_any_line_of_a_context_leaves_handlers_that_work(number: int) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise InterruptedError(number)

    def interrupt_at(lines: int) -> None:
        left = iter(range(lines, -1, -1))

        def line(frame: Any, event: str, arg: Any) -> Any:
            if event == "line" and next(left) == 0:
                sys.settrace(None)
                signal.raise_signal(number)
            return line

        sys.settrace(lambda frame, event, arg: line if frame.f_code.co_filename == runtime.__file__ else None)

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
    deferred, is_reached = DeferredInterrupts(), list[bool]()
    try:
        for lines in range(40):
            with contextlib.suppress(InterruptedError):
                interrupt_at(lines)
                with deferred:
                    pass
            is_reached.append(sys.gettrace() is None)
            sys.settrace(None)
            for each in before:
                with pytest.raises(InterruptedError):
                    signal.raise_signal(each)
            with deferred:
                pass
            assert all(signal.getsignal(each) is interrupt for each in before), f"line {lines}"
        assert is_reached[10] and not is_reached[-1]
    finally:
        sys.settrace(None)
        for each, handler in before.items():
            signal.signal(each, handler)
