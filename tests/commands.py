"""Commands as processes of their own that begin with everything imported, which is most of what a small one takes."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from expertly.cli import run, serve
from expertly.cli.commands import GROUPS
from expertly.engine import process
from expertly.policies.registry import ALLOCATIONS, EVICTIONS, PREDICTORS
from expertly.scheduler.systems import SYSTEMS

PRELOADED = [
    *("tests.commands", "expertly.cli.main", "expertly.cli.chat", "expertly.serve.server", "expertly.engine.cpu"),
    *("transformers.generation.continuous_batching", "transformers.models.qwen3_moe.modeling_qwen3_moe"),
]


class RunningCommand:
    """`expertly ARGUMENTS`, or `python SCRIPT.py ARGUMENTS`, in `folder`; what it prints goes to files in `printed`.
    `path` stands before what Python imports from; `within` is a context that it runs in.
    """

    def __init__(
        self,
        context: Any,
        printed: Path,
        arguments: tuple[str, ...],
        folder: Path,
        path: Path | None = None,
        stdin: Path | None = None,
        within: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._files = [printed / "stdout", printed / "stderr"]
        for file in self._files:
            file.write_text("")
        how = (arguments, [stdin, *self._files], dict(os.environ), folder, path, within)
        self.process = context.Process(target=_run, args=how)
        self.process.start()

    @property
    def out(self) -> str:
        return self._files[0].read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._files[1].read_text(errors="replace")

    def wait_until(self, is_so: Callable[[], bool], seconds: float = 120) -> None:
        """Fails where the command ends before, or takes longer."""
        end = time.monotonic() + seconds
        while not is_so():
            assert self.process.is_alive() and time.monotonic() < end, self.err
            time.sleep(0.005)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(self.process.pid, number)

    def exit_code(self, seconds: float) -> int:
        """When it has ended, which must be within `seconds`."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running after {seconds} s"
        return int(self.process.exitcode)


def _run(
    arguments: tuple[str, ...],
    files: list[Path | None],
    environment: dict[str, str],
    folder: Path,
    path: Path | None,
    within: Callable[[], AbstractContextManager[object]],
) -> None:
    """Leads a process group of its own. `files` are stdin, where it is not as it is, stdout and stderr."""
    from expertly.cli.main import main

    keep_the_code_of_libraries()
    gc.freeze()  # a collection that looks through what this is forked from makes a copy of it
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if path is not None:
        sys.path.insert(0, str(path))
        for registry in (GROUPS, EVICTIONS, PREDICTORS, ALLOCATIONS, SYSTEMS):
            vars(registry).pop("_entries", None)  # what is installed there was read by whom this is forked from
    for number, file in enumerate(files):
        if file is not None:
            os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    if files[0] is not None:  # multiprocessing has closed Python's own
        sys.stdin = os.fdopen(0, closefd=False)
    if arguments[0].endswith(".py"):
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
        sys.exit()
    with within():
        code = main(list(arguments))
    sys.exit(code)


def keep_the_code_of_libraries(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Each load and command gives it back to the system (engine/test_process.py): here, that and getting it again took
    a third.
    """
    for module in (process, run, serve):
        set_attribute(module, "give_back_code", lambda: 0)
    set_attribute(process, "give_back_heap", lambda: None)


@pytest.fixture(scope="session")
def imported() -> Iterator[Any]:
    """A context whose processes are forked from one that has imported what they need."""
    yield from importing(PRELOADED)


def importing(modules: Sequence[str]) -> Iterator[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*modules])
    yield context
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture
def start(imported: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RunningCommand]]:
    """Starts a command (in `folder`, with `path` before what Python imports from, and fed with `stdin`), and kills it
    at the end of the test where it still runs.
    """
    started: list[RunningCommand] = []

    def begin(
        *arguments: object, folder: Path = Path(), path: Path | None = None, stdin: Path | None = None
    ) -> RunningCommand:
        printed, words = tmp_path_factory.mktemp("printed"), tuple(map(str, arguments))
        started.append(RunningCommand(imported, printed, words, folder.absolute(), path, stdin))
        return started[-1]

    yield begin
    for command in started:
        command.process.kill()
        command.process.join()
