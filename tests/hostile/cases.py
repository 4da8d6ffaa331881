"""Commands run on hostile input: each in a fork of a process that has imported everything, under its own limits.

A test module here is a table of cases: what is changed in an input that works, and what is to be said of it. Every case
is to end within the limits, in the right text or in one line on stderr with exit code 2.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.commands import RunningCommand

MAX_CPU_S = 5
MAX_NBYTES = 1 << 30
"""Of memory beyond what the process has when it begins."""

MAX_S = 120.0
"""Time in all, beside busy neighbours: what takes longer hangs."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int  # negative: the signal
    out: str
    err: str
    cpu_s: float
    peak_nbytes: int

    def is_refused(self, sentence: str) -> None:
        """Assert that it ended as bad input is to: exit code 2, one line that says `sentence`, no traceback."""
        assert self.status == 2, f"exit code {self.status}, not 2\n{self.out}{self.err}"
        lines = [line for line in self.err.splitlines() if line.startswith("expertly: error: ")]
        assert len(lines) == 1 and "Traceback" not in self.err, self.err
        assert sentence in lines[0], f"expected: {sentence}\nsaid: {lines[0]}"
        assert len(lines[0]) < 1000, f"{len(lines[0])} characters: {lines[0][:300]}"

    def is_answered(self) -> None:
        """Assert that it ended well."""
        assert self.status == 0 and "Traceback" not in self.err, f"exit code {self.status}\n{self.out}{self.err}"


def run_command(imported: Any, folder: Path, *arguments: str) -> Ended:
    """`expertly ARGUMENTS` with `folder` as its working directory and cache; `imported`: the fixture of that name."""
    printed = folder / ".printed"
    printed.mkdir(exist_ok=True)
    result, child = imported.Pipe(duplex=False)
    within = partial(limited, child, folder / ".cache")
    running = RunningCommand(imported, printed, arguments, folder, stdin=Path(os.devnull), within=within)
    child.close()
    running.process.join(MAX_S)
    status = running.process.exitcode
    if status is None:
        running.process.kill()
        running.process.join()
        raise AssertionError(f"{' '.join(arguments)}: still running after {MAX_S:.0f} s\n{running.err}")
    try:
        cpu_s, peak_nbytes = result.recv()
    except EOFError:  # a signal ended it
        cpu_s, peak_nbytes = float("nan"), 0
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        raise AssertionError(f"{' '.join(arguments)}: took more than {MAX_CPU_S} processor seconds")
    return Ended(status, running.out, running.err, cpu_s, peak_nbytes)


@contextmanager
def limited(result: Any, cache: Path) -> Iterator[None]:
    """Limits what this process may take, and sends what it took in the end."""
    os.environ["EXPERTLY_CACHE"] = str(cache)
    status = Path("/proc/self/status").read_text()
    data_nbytes = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (data_nbytes + MAX_NBYTES,) * 2)
    begun = resource.getrusage(resource.RUSAGE_SELF)
    spent = begun.ru_utime + begun.ru_stime  # a fork begins at 0, but for what starting it took
    resource.setrlimit(resource.RLIMIT_CPU, (int(spent) + MAX_CPU_S, int(spent) + MAX_CPU_S + 1))
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        result.send((usage.ru_utime + usage.ru_stime - spent, usage.ru_maxrss << 10))


def edited(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A change of the JSON object in a file of a checkpoint folder: `change` edits it, or returns another."""

    def apply(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        changed = change(value)
        (folder / name).write_text(json.dumps(value if changed is None else changed))

    return apply
