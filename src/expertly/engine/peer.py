"""A way to one worker: a process, on this machine or another, that connects to where this one waits for it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from expertly.engine.pair import Address, Meeting, Pair

OPENING_S = 180.0
"""How long a worker may take until it holds its experts: it starts Python and torch, and may load all of them."""

_SENDING_S = 30.0
"""How long it may take to read a message that is longer than what the system holds on its way."""

_LOOKING_S = 1.0
"""How often a process that does not connect is asked whether it is there."""


class WorkerProcess(Protocol):
    """A process that serves the engine at the address that it was given."""

    def problem(self) -> str | None:
        """How it ended; None while it runs."""

    def end(self) -> None:
        """Idempotent."""


class Peer:
    """Carries messages to a worker and its answers back. A message is `send`, then `receive`, by one thread, or nobody
    wants the answer: `forget`. Others wait meanwhile. Both raise ConnectionError where the worker is gone.
    """

    def __init__(
        self, name: str, host: str, launch: Callable[[Address], WorkerProcess], *, is_here: bool = False
    ) -> None:
        """`host`: an address of this machine, for the worker. `launch`: starts it and does not wait; raises
        ConnectionError. `is_here`: it runs on this machine. `start` is the first call.
        """
        self.name = name
        self.is_here = is_here
        self._host = host
        self._launch = launch
        self._pair: Pair | None = None
        self._process: WorkerProcess | None = None
        self._lock = threading.Lock()  # held from a message until its answer
        self._owner = os.getpid()
        self._is_ended = False

    def start(self) -> None:
        """Start a worker, which holds nothing, in place of any that runs. Does not wait. Raises ConnectionError."""
        self.close()
        self._meeting = Meeting(self._host)
        self._num_owed = 0  # answers that were not received
        self._process = self._launch(self._meeting.address)
        if self._is_ended:  # meanwhile
            self.close()
            raise ConnectionError("the model was unloaded")

    def send(self, message: bytes, timeout_s: float = _SENDING_S) -> None:
        """Waits for a worker that starts, but not for an answer. Raises TimeoutError."""
        if not self._lock.acquire(timeout=timeout_s):
            raise TimeoutError
        try:
            pair = self._pair or self._connected()
            while self._num_owed:  # else both might wait until the other reads
                self._receive(pair, timeout_s)
            pair.send(message, _SENDING_S)
            self._num_owed += 1
        except BaseException:
            self._lock.release()
            raise

    def receive(self, timeout_s: float) -> bytes:
        """The answer. Raises TimeoutError; an answer that comes later is dropped."""
        try:
            assert self._pair is not None
            return self._receive(self._pair, timeout_s)
        finally:
            self._lock.release()

    def forget(self) -> None:
        """Nobody wants the answer."""
        self._lock.release()

    def ask(self, message: bytes, timeout_s: float) -> bytes:
        self.send(message, timeout_s)
        return self.receive(timeout_s)

    def end(self) -> None:
        """End the worker for good; the connection that a forked process shares is not its to end. Idempotent."""
        if os.getpid() == self._owner:
            self._is_ended = True
            self.close()

    def close(self) -> None:
        """End the worker that runs. Idempotent."""
        if self._pair is not None:
            self._pair.close()
            self._pair = None
        if self._process is not None:
            self._process.end()

    def _connected(self) -> Pair:
        until_s = time.monotonic() + OPENING_S
        while self._pair is None:
            try:
                self._pair = self._meeting.accept(_LOOKING_S)
            except TimeoutError:
                problem = None if self._process is None else self._process.problem()
                if problem is not None:
                    raise ConnectionError(problem) from None
                if time.monotonic() > until_s:
                    raise
        return self._pair

    def _receive(self, pair: Pair, timeout_s: float) -> bytes:
        answer = pair.receive(timeout_s)
        self._num_owed -= 1
        return answer
