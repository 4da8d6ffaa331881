"""Ctrl-C waits until the engine is between two layers."""

from __future__ import annotations

import signal
import threading

import pytest

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
