"""Workers that are processes of this machine, and what a worker's process does wherever it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress

from expertly.engine.pair import Address, Pair

HOST = "127.0.0.1"

_RUN = """
import json, sys
sys.path[:], *arguments = json.load(sys.stdin)
from expertly.engine.local_workers import serve
serve(*arguments)
"""


def serve(memory: str | int, threads: int | None, address: tuple[str, int, str]) -> None:
    """Answer the engine that waits at this address, until it closes the connection. `threads` None: the processors of
    this machine.
    """
    import torch

    from expertly.core.resources import granted_cpus
    from expertly.engine import process
    from expertly.engine.worker import ExpertWorker

    process.keep_few_primitives()
    process.give_back_large_blocks()
    process.keep_off_trapped_instructions()
    torch.set_num_threads(min(threads or granted_cpus(), granted_cpus()))
    worker, engine = ExpertWorker(memory), Pair.join(Address(*address))
    with suppress(ConnectionError):  # it has ended
        while True:
            engine.send(worker.answer(engine.receive()))


class LocalProcess:
    """A WorkerProcess that ends with this one: its connection is closed then."""

    def __init__(self, memory: str | int, threads: int, address: Address) -> None:
        """Raises ConnectionError."""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _RUN],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the engine
                text=True,
            )
        except OSError as error:
            raise ConnectionError(str(error)) from error
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as arguments:
            json.dump([sys.path, memory, threads, address], arguments)

    def problem(self) -> str | None:
        code = self._process.poll()
        return None if code is None else f"its process ended with {code}"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
