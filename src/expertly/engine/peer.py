"""A worker as the engine reaches it: a process, on this machine or another, that connects to where this one waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from expertly.engine.pair import Address, Meeting, Pair

HOST = "127.0.0.1"

OPENING_S = 180.0
"""How long a worker may take until it holds its experts: it starts Python and torch, and may load all of them."""

_SENDING_S = 30.0
"""How long it may take to read a message that is longer than what the system holds on its way."""

_LOOKING_S = 1.0
"""How often a process that does not connect is asked whether it is there."""

_RUN = """
import json, sys
sys.path[:], *arguments = json.load(sys.stdin)
from expertly.engine.worker import serve
serve(*arguments)
"""


class WorkerProcess(Protocol):
    """A process that serves the engine at the address that it was given."""

    def problem(self) -> str | None:
        """How it ended; None while it runs."""

    def end(self) -> None:
        """Idempotent."""


Launch = Callable[[Address], WorkerProcess]
"""Starts a worker that connects to this address, and does not wait."""


class LocalProcess:
    """A WorkerProcess of this machine, which ends with this one: its connection is closed then."""

    def __init__(self, memory: str | int, threads: int, address: Address) -> None:
        """Raises OSError."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUN],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the engine
            text=True,
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as arguments:
            json.dump([sys.path, memory, threads, address], arguments)

    def problem(self) -> str | None:
        code = self._process.poll()
        return None if code is None else f"its process ended with {code}"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Peer:
    """Carries messages to a worker and its answers back. A message is `send`, then `receive`, by one thread; others
    wait meanwhile. All raise OSError where the worker is gone, failed to start or takes too long.
    """

    def __init__(self, name: str, host: str, launch: Launch) -> None:
        """`host`: an address of this machine, for the worker. `launch`: starts it and does not wait. Raises OSError."""
        self.name = name
        self._meeting, self._until_s = Meeting(host), time.monotonic() + OPENING_S
        self._pair: Pair | None = None  # once the worker has connected
        self._lock = threading.Lock()  # held from a message until its answer
        self._owner = os.getpid()
        self._process = launch(self._meeting.address)

    def _connected(self) -> Pair:
        while self._pair is None:
            self._pair = self._meeting.accept(_LOOKING_S)
            if self._pair is None and (problem := self._process.problem()) is not None:
                raise ConnectionError(problem)
            if self._pair is None and time.monotonic() > self._until_s:
                raise TimeoutError
        return self._pair

    def send(self, message: bytes, timeout_s: float = _SENDING_S) -> None:
        """Waits for a worker that starts, but not for an answer. `timeout_s`: for another thread's answer."""
        if not self._lock.acquire(timeout=timeout_s):
            raise TimeoutError
        try:
            self._connected().send(message, _SENDING_S)
        except BaseException:
            self._lock.release()
            raise

    def receive(self, timeout_s: float) -> bytes:
        """The answer. A worker that does not give it in time can be asked no more."""
        try:
            return self._connected().receive(timeout_s)
        finally:
            self._lock.release()

    def end(self) -> None:
        """End the worker; the connection that a forked process shares is not its to end. Idempotent."""
        if os.getpid() == self._owner:
            if self._pair is not None:
                self._pair.close()
            self._process.end()
