"""The same requests through the engine under every system, on this machine's clock: request by request in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from expertly.lab.compare.settings import ComparisonSettings
from expertly.lab.compare.worker import Worker, WorkerError, load_arguments
from expertly.lab.playing import RecordedRequest
from expertly.sim.schedule import Selection

MOST_OF_FREE = 0.8
"""Of the memory that is free, what models that are held at the same time may take."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class RunFailure:
    """A system that did not come through, and why."""

    where: str  # "engine" or "simulator"
    memory: str
    system: str
    cause: str
    is_skipped: bool = False  # there is nothing that it could run on: it was not tried


@dataclass(slots=True)
class ComparedRuns:
    """What was measured so far: `played[memory, system][round][request]`, see Player.play."""

    played: dict[tuple[str, str], list[list[dict[str, Any]]]] = field(default_factory=dict)
    loaded: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    failures: list[RunFailure] = field(default_factory=list)
    together: dict[str, bool] = field(default_factory=dict)  # by budget: whether all models were held at once

    def has_failed(self, memory: str, name: str) -> bool:
        return any((one.memory, one.system) == (memory, name) for one in self.failures)

    def num_measured(self, memory: str, name: str) -> int:
        """Requests, each round's."""
        return sum(map(len, self.played.get((memory, name), [])))


class EngineRuns:
    """Plays. Every round begins with models that have just been loaded, so that each begins with empty caches.

    Where the memory allows it every system has a process of its own that holds its model, and they take turns request
    by request; else one process after the other holds a model and they take turns round by round. One computes at a
    time.
    """

    def __init__(
        self,
        settings: ComparisonSettings,
        arguments: dict[str, Any],  # of `expertly.load`, without memory and system
        requests: Sequence[RecordedRequest],
        lesson: tuple[str, Selection] | None,  # the trace whose training part predictors learn from
        between: Callable[[], None],  # called when nothing runs, about once a round
        progress: Progress | None = None,
        tell: Callable[[str], None] | None = None,  # in words, where nobody sees the progress
    ) -> None:
        self.runs = ComparedRuns()
        self._settings = settings
        self._arguments = arguments
        self._requests = requests
        self._lesson = lesson
        self._between = between
        self._progress = progress
        self._tell = tell
        self._workers = {name: Worker(name) for name in settings.systems}
        self._num_done = 0

    def run(self, fits_together: Callable[[str], bool]) -> None:
        """All of it; what fails is noted and left out. `runs` holds what there is, whatever this raises."""
        settings = self._settings
        try:
            for memory in settings.memories:
                together = self.runs.together[memory] = fits_together(memory)
                names = list(settings.systems)
                for number in range(settings.rounds):
                    if self._tell is not None:
                        self._tell(f"running the engine: {memory} of memory, round {number + 1} of {settings.rounds}")
                    names = [name for name in names if not self.runs.has_failed(memory, name)]
                    shift = number % len(names) if names else 0
                    in_turn = [*names[shift:], *names[:shift]]
                    if together:
                        self._round_together(memory, in_turn)
                    else:
                        self._round_apart(memory, in_turn)
                    self._between()
        finally:
            for worker in self._workers.values():
                worker.hang_up()
            for worker in self._workers.values():
                worker.end()

    def _round_together(self, memory: str, names: list[str]) -> None:
        for name in names:
            with suppress(WorkerError):  # what is asked of it then says so
                self._workers[name].start()
        ready = [name for name in names if self._load(memory, name)]
        for turn, request in enumerate(self._requests):
            for index in range(len(ready)):
                name = ready[(turn + index) % len(ready)]
                if not self.runs.has_failed(memory, name):
                    self._play(memory, name, request)
        for name in ready:
            if not self.runs.has_failed(memory, name):
                self._asked(memory, name, "unload")

    def _round_apart(self, memory: str, names: list[str]) -> None:
        for name in names:
            if self._load(memory, name):
                for request in self._requests:
                    if not self.runs.has_failed(memory, name):
                        self._play(memory, name, request)
            self._workers[name].end()

    def _load(self, memory: str, name: str) -> bool:
        facts = self._asked(memory, name, "load", load_arguments(self._arguments, memory, name))
        if facts is None:
            return False
        self.runs.loaded[memory, name] = facts
        if self._lesson is not None:
            self._asked(memory, name, "learn", *self._lesson)
        self.runs.played.setdefault((memory, name), []).append([])
        return not self.runs.has_failed(memory, name)

    def _play(self, memory: str, name: str, request: RecordedRequest) -> None:
        played = self._asked(memory, name, "play", request)
        if played is not None:
            self.runs.played[memory, name][-1].append(played)
        self._num_done += 1
        if self._progress is not None:
            settings = self._settings
            total = len(settings.memories) * settings.rounds * len(settings.systems) * len(self._requests)
            self._progress(f"engine, {memory}", self._num_done, total)

    def _asked(self, memory: str, name: str, method: str, *arguments: Any) -> Any:
        """The answer, or None where it failed, which is noted."""
        try:
            return self._workers[name].ask(method, *arguments)
        except WorkerError as error:
            self.runs.failures.append(RunFailure("engine", memory, name, str(error)))
            self._workers[name].end()
            return None


def can_be_together(each_nbytes: Sequence[int], free_nbytes: int, device: str) -> bool:
    """Whether processes that take so much each may hold a model at the same time."""
    return device == "cpu" and sum(each_nbytes) <= MOST_OF_FREE * free_nbytes
