"""Workers in threads of this process: everything of a worker but its process, its messages over a connection."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import pytest

from expertly import api
from expertly.engine import wire
from expertly.engine.pair import Address, Pair
from expertly.engine.peer import Peer
from expertly.engine.worker import ExpertWorker


class ThreadWorker:
    """A WorkerProcess."""

    def __init__(self, peer: ThreadPeer, address: Address) -> None:
        self.worker = ExpertWorker(peer.memory)
        self._peer = peer
        self._engine = Pair.join(address)
        self._thread = threading.Thread(target=self._serve, name=f"worker-{peer.name}", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(ConnectionError):
            while True:
                message = self._engine.receive()
                kind = wire.Kind(message[0])
                self._peer.kinds.append(kind)
                self._peer.before(kind)
                if not self._peer.is_dead:
                    self._engine.send(self.worker.answer(message))
        self.worker.close()

    def problem(self) -> str | None:
        return "killed" if self._peer.is_dead else None

    def kill(self) -> None:
        self._engine.close()

    def end(self) -> None:
        self.kill()
        self._thread.join(3)  # longer where it stalls


class ThreadPeer(Peer):
    """A worker that tests can kill, stall and look into."""

    is_dead = False

    def __init__(self, name: str, memory: str | int) -> None:
        self.memory = memory
        self.kinds: list[wire.Kind] = []
        self.before: Callable[[wire.Kind], object] = lambda kind: None
        """Called by the worker before each message; tests kill and stall here."""
        super().__init__(name, "127.0.0.1", self._launch_thread)

    def _launch_thread(self, address: Address) -> ThreadWorker:
        self.running = ThreadWorker(self, address)
        return self.running

    def kill(self) -> None:
        self.is_dead = True
        self.running.kill()


def put_in_threads(monkeypatch: pytest.MonkeyPatch, *memories: str) -> list[ThreadPeer]:
    """Make `workers=N` start threads; the list has those of the last load. `memories`: of each, instead of the option
    `memory`.
    """
    made: list[ThreadPeer] = []

    def start(workers: str | int, memory: str | int, opened: ExitStack) -> Sequence[ThreadPeer]:
        made[:] = [ThreadPeer(f"w{number}", each) for number, each in enumerate(memories or [memory] * int(workers))]
        for peer in made:
            opened.callback(peer.end)
        return made

    monkeypatch.setattr(api, "start_workers", start)
    return made
