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
    wait meanwhile. All raise OSError where the worker is gone, fails to start or takes too long.
    """

    def __init__(self, name: str, host: str, launch: Callable[[Address], WorkerProcess]) -> None:
        """`host`: an address of this machine, for the worker. `launch`: starts it and does not wait; raises OSError.
        `start` is the first call.
        """
        self.name = name
        self._host = host
        self._launch = launch
        self._pair: Pair | None = None
        self._process: WorkerProcess | None = None
        self._lock = threading.Lock()  # held from a message until its answer
        self._owner = os.getpid()

    def start(self) -> None:
        """Start a worker, which holds nothing, in place of any that runs. Does not wait."""
        self.close()
        self._meeting, self._until_s = Meeting(self._host), time.monotonic() + OPENING_S
        self._process = self._launch(self._meeting.address)

    def connected(self, timeout_s: float) -> Pair | None:
        """The connection; None: the worker is still starting."""
        if self._pair is None:
            self._pair = self._meeting.accept(timeout_s)
        if self._pair is None:
            problem = None if self._process is None else self._process.problem()
            if problem is not None:
                raise ConnectionError(problem)
            if time.monotonic() > self._until_s:
                raise TimeoutError
        return self._pair

    def send(self, message: bytes, timeout_s: float = _SENDING_S) -> None:
        """Waits for a worker that starts, but not for an answer. `timeout_s`: for another thread's answer."""
        if not self._lock.acquire(timeout=timeout_s):
            raise TimeoutError
        try:
            while (pair := self.connected(_LOOKING_S)) is None:
                pass
            pair.send(message, _SENDING_S)
        except BaseException:
            self._lock.release()
            raise

    def has_answer(self) -> bool:
        """Whether `receive` need not wait."""
        return self._pair is None or self._pair.has_message()

    def receive(self, timeout_s: float) -> bytes:
        """The answer. A worker that does not give it in time can be asked no more."""
        try:
            pair = self._pair
            if pair is None:
                raise ConnectionError("it was ended")
            return pair.receive(timeout_s)
        finally:
            self._lock.release()

    def end(self) -> None:
        """End the worker for good; the connection that a forked process shares is not its to end. Idempotent."""
        if os.getpid() == self._owner:
            self.close()

    def close(self) -> None:
        """End the worker that runs. Idempotent."""
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()
        if self._process is not None:
            self._process.end()
