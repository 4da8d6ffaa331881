"""Runs the same requests through the engine under every system, on this machine's clock, in turn.

Each model lives in a child process. This module imports nothing slow, because a child reads it before it can ignore
interrupts.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from expertly.core.errors import ExpertlyError
from expertly.core.resources import cpu_name
from expertly.lab.compare.settings import ComparisonSettings
from expertly.scheduler.presets import get_system
from expertly.sim.hardware import Hardware

if TYPE_CHECKING:
    from expertly.lab.playing import RecordedRequest
    from expertly.sim.schedule import Selection

# -- a child process that holds one model ----------------------------------------------------------------------------


_ENDING_S = 10.0


class WorkerError(ExpertlyError):
    """A worker's method failed, or its process ended; the message says how."""


Progress = Callable[[str, int, int], None]

_SHOW_EVERY_S = 0.1


class Worker:
    """One child process. Its exceptions are raised here as WorkerError; it can be started again after `end`, or when it
    died. `loading` is told of the bytes that the child packs and loads.
    """

    def __init__(self, name: str, loading: Progress | None = None) -> None:
        self.name = name
        self._loading = loading
        self._process: Any = None
        self._connection: Connection | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def start(self) -> None:
        """Begin to start the child, unless it runs; `ask` waits until it is ready. Raises WorkerError."""
        if self.is_alive:
            return
        self.end()
        context = multiprocessing.get_context("spawn")
        with ExitStack() as stack:
            try:
                ours, theirs = context.Pipe()
                stack.callback(ours.close)
                with theirs:
                    arguments = (theirs, self._loading is not None)
                    process = context.Process(target=serve, args=arguments, name=self.name, daemon=True)
                    process.start()
            except OSError as error:
                raise WorkerError(f"its process could not be started: {error.strerror or error}") from error
            stack.pop_all()
        self._process, self._connection = process, ours

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the child's Player and return its result."""
        self.start()
        assert self._connection is not None
        try:
            self._connection.send((method, arguments))
            while (said := self._connection.recv())[0] == "loading":
                assert self._loading is not None, "the child was told whether anybody listens"
                self._loading(*said[1])
        except (EOFError, ConnectionError):
            self._process.join(_ENDING_S)
            code = self._process.exitcode
            self.end()
            raise WorkerError(f"its process ended ({_ending(code)}) when asked to {method}") from None
        if said[0] == "failed":
            raise WorkerError(said[1])
        return said[1]

    def hang_up(self) -> None:
        """Let the child end after what it is doing, without waiting; several children end at the same time that way."""
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


def serve(connection: Connection, tells_loading: bool) -> None:
    """The child's loop: calls what its parent asks for until the parent hangs up. It ignores interrupts, which the
    parent handles.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what libraries print is no result of the command
    from expertly.lab.compare.player import Player

    player = Player(_told_to(connection) if tells_loading else None)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            break
        try:
            answer = ("done", getattr(player, method)(*arguments))
        except ExpertlyError as error:
            answer = ("failed", str(error))
        except Exception as error:  # handed to who waits for it
            answer = ("failed", f"{type(error).__name__}: {error}")
        try:
            connection.send(answer)
        except ConnectionError:
            break
    player.unload()


def _told_to(connection: Connection) -> Progress:
    """A progress callback that sends to the parent, a few times a second."""
    next_s = 0.0

    def tell(what: str, done: int, total: int) -> None:
        nonlocal next_s
        if done >= total or time.monotonic() >= next_s:
            next_s = time.monotonic() + _SHOW_EVERY_S
            with suppress(ConnectionError):  # the parent has hung up: the next answer ends this process
                connection.send(("loading", (what, done, total)))

    return tell


def _ending(code: int | None) -> str:
    if code is None:
        return "it does not answer"
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}; the system may have run out of memory" if name == "SIGKILL" else name


def load_arguments(arguments: dict[str, Any], memory: str, name: str) -> dict[str, Any]:
    """The arguments of `expertly.load` for one system, without weights and plans that it does not use."""
    system = get_system(name)
    given = arguments | {"memory": None if system.keeps_everything else memory, "system": name}
    if not system.takes_weights:
        given["predictor"] = "auto"
    if not system.takes_plan:
        given["plan"] = None
    return given


class MachineWorker:
    """A worker that measures the machine. Where measuring fails the comparison goes on with what was measured before,
    and `problem` says why.
    """

    def __init__(self, loading: Progress | None = None) -> None:
        self.worker = Worker("machine", loading)
        self.problem: str | None = None
        self.memory: str | None = None  # what the experts had of it while they were measured
        self._profile: Hardware | None = None

    def measure(self, arguments: dict[str, Any], memories: Sequence[str]) -> None:
        """Measure all costs of the model, with the first of these budgets under which it can be measured."""
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
        """Measure again what a decode step depends on, because a machine's speed drifts."""
        if self.memory is not None and self.problem is None:
            try:
                self.worker.ask("measure", False)
            except WorkerError as error:
                self.problem = str(error)

    def hardware(self, device: str) -> Hardware | None:
        """The medians of all measurements as a machine to simulate; None where there are none."""
        if self.problem is None and self._profile is not None:
            try:
                self._profile = self.worker.ask("profile")
            except WorkerError as error:
                self.problem = str(error)
        if self._profile is None:
            return None
        return replace(self._profile, name=cpu_name() if device == "cpu" else device)


# -- the systems in turn ---------------------------------------------------------------------------------------------


MOST_OF_FREE = 0.8
"""The share of the free memory that several models may take together."""


@dataclass(frozen=True, slots=True)
class RunFailure:
    """A system that failed, where, and why."""

    where: str  # "engine" or "simulator"
    memory: str
    system: str
    cause: str
    is_skipped: bool = False  # there is nothing that it could run on: it was not tried


@dataclass(slots=True)
class ComparedRuns:
    """The measurements so far: `played[memory, system][round][request]`, see Player.play."""

    played: dict[tuple[str, str], list[list[dict[str, Any]]]] = field(default_factory=dict)
    loaded: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    failures: list[RunFailure] = field(default_factory=list)
    together: dict[str, bool] = field(default_factory=dict)  # by budget: whether all models were held at once

    def has_failed(self, memory: str, name: str) -> bool:
        return any((one.memory, one.system) == (memory, name) for one in self.failures)

    def as_dict(self) -> dict[str, Any]:
        """The measurements, request by request."""
        loaded = [{"memory": memory, "asked": name, **facts} for (memory, name), facts in self.loaded.items()]
        runs = [{"memory": memory, "system": name, "rounds": rounds} for (memory, name), rounds in self.played.items()]
        return {"together": self.together, "loaded": loaded, "runs": runs}


@dataclass(slots=True)
class EngineRuns:
    """Runs all systems. Every round loads the models anew, so that it begins with empty caches.

    Where memory allows it, every system has its own process and they take turns request by request; else one process
    after the other holds a model, and they take turns round by round. Only one computes at a time.
    """

    settings: ComparisonSettings
    arguments: dict[str, Any]  # of `expertly.load`, without memory and system
    requests: Sequence[RecordedRequest]
    lesson: tuple[str, Selection] | None  # the trace whose training part predictors learn from
    between: Callable[[], None]  # called when nothing runs, about once a round
    progress: Progress = lambda what, done, total: None
    tell: Callable[[str], None] = lambda what: None  # in words
    loading: Progress | None = None  # bytes that are packed and loaded
    runs: ComparedRuns = field(init=False, default_factory=ComparedRuns)
    _workers: dict[str, Worker] = field(init=False)
    _num_done: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._workers = {name: Worker(name, self.loading) for name in self.settings.systems}

    def run(self, fits_together: Callable[[str], bool]) -> None:
        """Run everything. Failures are noted and left out. `runs` holds what there is, whatever this raises."""
        settings = self.settings
        try:
            for memory in settings.memories:
                together = self.runs.together[memory] = fits_together(memory)
                names = list(settings.systems)
                for number in range(settings.rounds):
                    self.tell(f"running the engine: {memory} of memory, round {number + 1} of {settings.rounds}")
                    names = [name for name in names if not self.runs.has_failed(memory, name)]
                    shift = number % len(names) if names else 0
                    in_turn = [*names[shift:], *names[:shift]]
                    if together:
                        self._round(memory, in_turn)
                    else:
                        for name in in_turn:
                            self._round(memory, [name])
                            self._workers[name].end()
                    self.between()
        finally:
            for worker in self._workers.values():
                worker.hang_up()
            for worker in self._workers.values():
                worker.end()

    def _round(self, memory: str, names: list[str]) -> None:
        """Load these systems, let them take turns request by request, and unload them."""
        for name in names:
            with suppress(WorkerError):  # what is asked of it then says so
                self._workers[name].start()
        ready = [name for name in names if self._load(memory, name)]
        for turn, request in enumerate(self.requests):
            for index in range(len(ready)):
                name = ready[(turn + index) % len(ready)]
                if not self.runs.has_failed(memory, name):
                    self._play(memory, name, request)
        for name in ready:
            if not self.runs.has_failed(memory, name):
                self._asked(memory, name, "unload")

    def _load(self, memory: str, name: str) -> bool:
        facts = self._asked(memory, name, "load", load_arguments(self.arguments, memory, name))
        if facts is None:
            return False
        self.runs.loaded[memory, name] = facts
        if self.lesson is not None:
            self._asked(memory, name, "learn", *self.lesson)
        self.runs.played.setdefault((memory, name), []).append([])
        return not self.runs.has_failed(memory, name)

    def _play(self, memory: str, name: str, request: RecordedRequest) -> None:
        played = self._asked(memory, name, "play", request)
        if played is not None:
            self.runs.played[memory, name][-1].append(played)
        self._num_done += 1
        settings = self.settings
        total = len(settings.memories) * settings.rounds * len(settings.systems) * len(self.requests)
        self.progress(f"engine, {memory}", self._num_done, total)

    def _asked(self, memory: str, name: str, method: str, *arguments: Any) -> Any:
        """The worker's answer, or None where it failed; the failure is noted."""
        try:
            return self._workers[name].ask(method, *arguments)
        except WorkerError as error:
            self.runs.failures.append(RunFailure("engine", memory, name, str(error)))
            self._workers[name].end()
            return None


def can_be_together(each_nbytes: Sequence[int], free_nbytes: int, device: str) -> bool:
    """Whether processes that need so much memory each can hold their models at the same time."""
    return device == "cpu" and sum(each_nbytes) <= MOST_OF_FREE * free_nbytes
