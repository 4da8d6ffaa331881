"""What every command prints with: the --json rule, tables, units, progress.

With --json a command prints exactly one JSON object on stdout and everything else on stderr. Progress is shown only
where stderr is a terminal.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
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
    print(fitted(text, sys.stderr), file=sys.stderr, flush=True)


def fitted(text: str, stream: TextIO) -> str:
    """With its lines broken between words where the stream is a terminal that is narrower."""
    if not stream.isatty():
        return text
    width = max(40, shutil.get_terminal_size().columns)
    how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    return "\n".join(textwrap.fill(line, width, **how) for line in text.split("\n"))


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


class ProgressBar:
    """One bar on a terminal: `bar(what, done, total)` counts in `unit`, `bar.in_bytes(what, done, total)` in bytes."""

    def __init__(self, shown: Progress, unit: str) -> None:
        self._shown = shown
        self._unit = unit
        self._what: tuple[str, str] | None = None
        self._task: TaskID | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        self._show(what, done, total, self._unit)

    def in_bytes(self, what: str, done: int, total: int) -> None:
        """What a model's packing, loading and preloading are counted in."""
        self._show(what, done, total, "B")

    def _show(self, what: str, done: int, total: int, unit: str) -> None:
        if self._task is None or self._what != (what, unit):
            if self._task is not None:
                self._shown.remove_task(self._task)
            self._what, self._task = (what, unit), self._shown.add_task(escape(what), unit=unit)
        self._shown.update(self._task, completed=done, total=total)


class _AmountColumn(ProgressColumn):
    """How much of how much, and of bytes how fast."""

    def __init__(self) -> None:
        super().__init__()
        self._nbytes, self._speed = DownloadColumn(binary_units=True), TransferSpeedColumn()

    def render(self, task: Task) -> Text:
        if task.fields["unit"] == "B":
            return Text(" ").join([self._nbytes.render(task), self._speed.render(task)])
        return Text(f"{task.completed:.0f}/{task.total or 0:.0f} {task.fields['unit']}", style="progress.download")


@contextlib.contextmanager
def progress_bar(unit: str = "B") -> Iterator[ProgressBar | None]:
    """None where stderr is no terminal. `unit` of what is counted, "B": bytes."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = ("{task.description}", BarColumn(), _AmountColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as shown:
        yield ProgressBar(shown, unit)


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, width: int = 100_000, folded: str | None = None
) -> str:
    """Aligned columns: the first and the one of the header `folded` to the left, the others to the right. Where lines
    would be longer than `width`, `folded` takes several.
    """
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for at, header in enumerate(headers):
        made.add_column(
            Text(header),
            justify="right" if at and header != folded else "left",
            no_wrap=header != folded,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*map(Text, row))
    text = io.StringIO()
    Console(file=text, width=width, color_system=None).print(made)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


Column = tuple[str, Callable[[Any], str]]
"""The key of what it shows, and how that is written."""


def figures_table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Column]) -> str:
    """A line for each of several dictionaries of figures; `columns` by their headers. What is not known is "-"; an
    empty dictionary leaves a gap.
    """
    return table(list(columns), [cells(row, columns.values()) if row else [""] * len(columns) for row in rows])


def cells(row: Mapping[str, Any], columns: Iterable[Column]) -> list[str]:
    return ["-" if row[key] is None else write(row[key]) for key, write in columns]


def in_brackets(*parts: str) -> str:
    """`[20 tokens | 8.1 tokens/s]`: facts in one line."""
    return f"[{' | '.join(parts)}]"


def show(result: Mapping[str, Any], is_json: bool, text: Callable[[], str], stream: TextIO | None = None) -> None:
    """Print a command's result: as its one JSON object, or as the text for people that is made of it."""
    if is_json:
        print_json(result, stream)
    else:
        print(text(), file=stream or sys.stdout, flush=True)


def origin() -> dict[str, Any]:
    """What files that a command writes say of how they came to be."""
    return {"created": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": typed()}


def typed() -> str:
    """The command line, as a shell takes it."""
    return shlex.join(["expertly", *sys.argv[1:]])


def printable(value: object) -> str:
    """What a file says, so that a terminal shows it and does not obey it."""
    text = str(value)
    return text if text.isprintable() else repr(text)
