"""Workers in threads of this process: everything of a worker but Ray, its messages really bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import pytest

from expertly import api
from expertly.engine import remote, wire
from expertly.engine.remote import PeerLostError
from expertly.engine.worker import ExpertWorker


class ThreadAnswer:
    def __init__(self) -> None:
        self.future: Future[bytes] = Future()

    def is_there(self) -> bool:
        return self.future.done()

    def result(self, timeout_s: float) -> bytes:
        try:
            return self.future.result(timeout_s)
        except FutureTimeoutError:
            raise TimeoutError from None


class ThreadPeer:
    """A worker that tests can kill, stall and look into."""

    is_here = False

    def __init__(self, name: str, memory: str | int) -> None:
        self.name = name
        self.kinds: list[wire.Kind] = []
        self.num_starts = 0
        self.before: Callable[[wire.Kind], None] = lambda kind: None
        """Called by the worker before each message; tests kill and stall here."""
        self.can_start = True
        self._memory = memory
        self._start()

    def _start(self) -> None:
        self.num_starts += 1
        self.worker: Any = ExpertWorker(self._memory)
        self.is_dead = False
        self._queue: SimpleQueue[tuple[bytes, ThreadAnswer] | None] = SimpleQueue()
        args = self.worker, self._queue
        self._thread = threading.Thread(target=self._serve, args=args, name=f"worker-{self.name}", daemon=True)
        self._thread.start()

    def _serve(self, worker: ExpertWorker, queue: SimpleQueue[tuple[bytes, ThreadAnswer] | None]) -> None:
        while (given := queue.get()) is not None:
            message, answer = given
            kind = wire.Kind(message[0])
            self.kinds.append(kind)
            self.before(kind)
            if self.is_dead:
                answer.future.set_exception(PeerLostError("killed"))
            else:
                answer.future.set_result(worker.answer(message))
        worker.close()

    def ask(self, message: bytes) -> ThreadAnswer:
        assert type(message) is bytes
        if self.is_dead:
            raise PeerLostError("killed")
        answer = ThreadAnswer()
        self._queue.put((message, answer))
        return answer

    def call(self, message: bytes) -> ThreadAnswer:
        return self.ask(message)

    def kill(self) -> None:
        self.is_dead = True

    def renew(self) -> None:
        if not self.can_start:
            raise PeerLostError("cannot be started")
        self._queue.put(None)
        self._start()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(20)


def put_in_threads(monkeypatch: pytest.MonkeyPatch, *memories: str) -> list[ThreadPeer]:
    """Make `workers=N` start threads; the list has those of the last load. `memories`: of each, instead of the option
    `worker_memory`. Dropped workers are asked back at every pass.
    """
    made: list[ThreadPeer] = []

    def start(workers: str | int, memory: str | int, opened: ExitStack) -> Sequence[ThreadPeer]:
        each = memories or [memory] * int(workers)
        made[:] = [ThreadPeer(f"w{number}", one) for number, one in enumerate(each)]
        for one in made:
            opened.callback(one.close)
        return made

    monkeypatch.setattr(api, "start_workers", start)
    monkeypatch.setattr(remote, "_AGAIN_S", (0.0,))
    return made
