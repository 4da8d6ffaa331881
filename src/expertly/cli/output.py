"""What every command prints with: the --json rule, tables, units, progress.

With --json a command prints exactly one JSON object on stdout and everything else on stderr. Progress is shown only
where stderr is a terminal.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from expertly.core.files import finite


def print_json(result: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Print the command's one JSON object. What JSON cannot say (NaN, infinity) becomes null."""
    stream = stream or sys.stdout
    stream.write(json.dumps(finite(result), ensure_ascii=False, allow_nan=False) + "\n")
    stream.flush()


def message(text: str) -> None:
    """Say something that is not the result."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def reserved_stdout() -> Iterator[TextIO]:
    """The real stdout for what the caller writes itself; what libraries print meanwhile goes to stderr."""
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        yield stdout


def quiet_libraries() -> None:
    """Before transformers is imported: its advice is not for users of a command, its bars are for terminals."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@contextlib.contextmanager
def progress_bar(unit: str = "B") -> Iterator[Callable[[str, int, int], None] | None]:
    """A `progress(what, done, total)` that draws a bar, or None where stderr is no terminal. "B": bytes."""
    if not sys.stderr.isatty():
        yield None
        return
    counted = (
        (DownloadColumn(binary_units=True), TransferSpeedColumn()) if unit == "B" else (MofNCompleteColumn(), unit)
    )
    columns = ("{task.description}", BarColumn(), *counted, TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for task in tasks.values():
                    bar.remove_task(task)
                tasks.clear()
                tasks[what] = bar.add_task(escape(what))
            bar.update(tasks[what], completed=done, total=total)

        yield progress


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right. Lines may be longer than a terminal is wide."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for at, header in enumerate(headers):
        made.add_column(Text(header), justify="right" if at else "left", no_wrap=True)
    for row in rows:
        made.add_row(*map(Text, row))
    text = io.StringIO()
    Console(file=text, width=100_000, color_system=None).print(made)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def printable(value: object) -> str:
    """What a file says, so that a terminal shows it and does not obey it."""
    text = str(value)
    return text if text.isprintable() else repr(text)
