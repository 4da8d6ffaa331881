"""A child process that holds one model, and its parent's side of the conversation."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from expertly.core.costs import CodecCosts, Link, MeasuredCompute
from expertly.core.errors import ExpertlyError
from expertly.core.resources import cpu_name
from expertly.scheduler.presets import get_system
from expertly.sim.hardware import Hardware

Profile = tuple[Link, MeasuredCompute, CodecCosts | None]


_ENDING_S = 10.0


class WorkerError(ExpertlyError):
    """What a worker was asked for failed, or the worker did; the message says how."""


class Worker:
    """One child. What it raises is raised here as WorkerError; after `end`, or when it died, it can be started anew."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._process: Any = None
        self._connection: Connection | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def start(self) -> None:
        """Begin to start it, if it is not there; what is asked first waits for it. Raises WorkerError."""
        if self.is_alive:
            return
        self.end()
        context = multiprocessing.get_context("spawn")
        with ExitStack() as stack:
            try:
                ours, theirs = context.Pipe()
                stack.callback(ours.close)
                with theirs:
                    process = context.Process(target=serve, args=(theirs,), name=self.name, daemon=True)
                    process.start()
            except OSError as error:
                raise WorkerError(f"its process could not be started: {error.strerror or error}") from error
            stack.pop_all()
        self._process, self._connection = process, ours

    def ask(self, method: str, *arguments: Any) -> Any:
        """What a method of the child's Player gives."""
        self.start()
        assert self._connection is not None
        try:
            self._connection.send((method, arguments))
            is_done, answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join(_ENDING_S)
            code = self._process.exitcode
            self.end()
            raise WorkerError(f"its process ended ({_ending(code)}) when asked to {method}") from None
        if not is_done:
            raise WorkerError(answer)
        return answer

    def hang_up(self) -> None:
        """Let the child end, when it has done what it does. Several end at the same time that way."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def end(self) -> None:
        """End the child and free what it holds. Idempotent."""
        self.hang_up()
        process, self._process = self._process, None
        if process is not None:
            process.join(_ENDING_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def serve(connection: Connection) -> None:
    """The child: does what it is asked until its parent hangs up. An interrupt is its parent's to deal with."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what libraries print is no result of the command
    from expertly.lab.compare.player import Player

    player = Player()
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            break
        try:
            answer = (True, getattr(player, method)(*arguments))
        except ExpertlyError as error:
            answer = (False, str(error))
        except Exception as error:  # handed to who waits for it
            answer = (False, f"{type(error).__name__}: {error}")
        try:
            connection.send(answer)
        except ConnectionError:
            break
    player.unload()


def _ending(code: int | None) -> str:
    if code is None:
        return "it does not answer"
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}; the system may have run out of memory" if name == "SIGKILL" else name


def load_arguments(arguments: dict[str, Any], memory: str, name: str) -> dict[str, Any]:
    """Those of `expertly.load` for one system: what is of use to others alone is left out."""
    system = get_system(name)
    given = arguments | {"memory": None if system.keeps_everything else memory, "system": name}
    if not system.takes_weights:
        given["predictor"] = "auto"
    if not system.takes_plan:
        given["plan"] = None
    return given


class MachineWorker:
    """A worker beside those of the systems. Where measuring fails the comparison goes on: `problem` says why. What was
    measured before it failed is kept.
    """

    def __init__(self) -> None:
        self.worker = Worker("machine")
        self.problem: str | None = None
        self.memory: str | None = None  # what the experts had of it while they were measured
        self._profile: Profile | None = None

    def measure(self, arguments: dict[str, Any], memories: Sequence[str]) -> None:
        """All costs of a model, with the first of these budgets that leaves enough in memory to measure."""
        for memory in memories:
            try:
                loading = load_arguments(arguments | {"segments": None}, memory, "lru")
                self.worker.ask("load", loading)
                self.worker.ask("measure", True)
                self._profile = self.worker.ask("profile")
            except WorkerError as error:
                self.problem = str(error)
            else:
                self.problem, self.memory = None, memory
                break

    def measure_again(self) -> None:
        """What a decode step depends on, to follow a machine that is now faster and now slower."""
        if self.memory is not None and self.problem is None:
            try:
                self.worker.ask("measure", False)
            except WorkerError as error:
                self.problem = str(error)

    def hardware(self, device: str) -> Hardware | None:
        """The medians of what was measured, as a machine to simulate; None where there is nothing."""
        if self.problem is None and self._profile is not None:
            try:
                self._profile = self.worker.ask("profile")
            except WorkerError as error:
                self.problem = str(error)
        if self._profile is None:
            return None
        link, compute, codec = self._profile
        name = cpu_name() if device == "cpu" else device
        return replace(Hardware.read("infinite").with_model(link, compute), codec=codec, name=name)
