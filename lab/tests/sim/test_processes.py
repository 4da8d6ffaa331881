"""Items that several processes work on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from expertly.core.errors import ConfigError, ExpertlyError
from expertly_lab.sim.processes import as_finished


def made(folder: Path) -> Path:
    """The worker of a process: a folder, in which it leaves a file of its number."""
    (folder / str(os.getpid())).touch()
    return folder


def do(folder: Path, item: int) -> int:
    """Items from 90 on do something else."""
    with (folder / "begun").open("a") as file:
        file.write(f"{item} ")
    if item == 90:
        raise ConfigError("item: wrong")
    if item == 91:
        os.kill(os.getpid(), signal.SIGKILL)
    if item == 92:
        (folder / "sleeps").touch()
        time.sleep(600)
    while item == 93 and not (folder / "go on").exists():
        time.sleep(0.01)
    return 10 * item


def started(folder: Path, items: list[int]) -> Iterator[tuple[int, int]]:
    return as_finished(2, partial(made, folder), do, items)


def are_gone(folder: Path) -> bool:
    return not any(Path("/proc", each.name).exists() for each in folder.iterdir() if each.name.isdecimal())


def test_results_come_from_as_many_workers_as_asked_for(tmp_path: Path) -> None:
    assert dict(started(tmp_path, [3, 1, 2, 5])) == {0: 30, 1: 10, 2: 20, 3: 50}
    workers = {each.name for each in tmp_path.iterdir() if each.name.isdecimal()}
    assert 1 <= len(workers) <= 2 and str(os.getpid()) not in workers and are_gone(tmp_path)


def test_what_ends_first_comes_first(tmp_path: Path) -> None:
    result = as_finished(2, partial(made, tmp_path), do, [93, 1, 2])
    assert [next(result), next(result)] in ([(1, 10), (2, 20)], [(2, 20), (1, 10)])
    (tmp_path / "go on").touch()
    assert list(result) == [(0, 930)]


def test_an_error_is_the_callers_and_ends_the_others(tmp_path: Path) -> None:
    rows = started(tmp_path, [1, 90, 92, 92])
    assert next(rows) == (0, 10)
    with pytest.raises(ConfigError, match="item: wrong"):
        next(rows)
    assert are_gone(tmp_path)


def test_a_process_that_is_killed_is_said(tmp_path: Path) -> None:
    with pytest.raises(ExpertlyError, match="a process ended"):
        list(started(tmp_path, [91, 1, 1]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_interrupted_or_killed_leaves_no_process(number: int, tmp_path: Path) -> None:
    """An interrupt goes to all processes of a terminal; only the one that was typed answers."""
    parent = os.fork()
    if not parent:
        os.setsid()
        try:
            list(started(tmp_path, [92, 92]))
        except KeyboardInterrupt:
            os._exit(130)
        os._exit(1)
    deadline = time.monotonic() + 60
    while not (tmp_path / "sleeps").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(parent, number) if number == signal.SIGINT else os.kill(parent, number)
    ended = os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1])
    assert ended == (130 if number == signal.SIGINT else -signal.SIGTERM)
    while not are_gone(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.02)
