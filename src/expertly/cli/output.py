"""What every command prints with: JSON, tables, progress.

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
from rich.table import Column as TableColumn
from rich.table import Table
from rich.text import Text

from expertly.core.files import finite


def print_json(result: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Print the command's one JSON object. What JSON cannot say (NaN, infinity) becomes null."""
    stream = stream or sys.stdout
    stream.write(json.dumps(finite(result), ensure_ascii=False, allow_nan=False) + "\n")
    stream.flush()


def message(text: str) -> None:
    """Print to stderr what is not the result."""
    print(fitted(text, sys.stderr), file=sys.stderr, flush=True)


def fitted(text: str, stream: TextIO) -> str:
    """The text with lines broken between words, and rules of tables cut, where the stream is a terminal and narrower
    than they are. A line that ends in a command to copy stays whole.
    """
    if not stream.isatty():
        return text
    width = max(40, shutil.get_terminal_size().columns)
    how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    lines = (line[:width] if line.startswith("──") else line for line in text.split("\n"))
    return "\n".join(line if ": expertly " in line else textwrap.fill(line, width, **how) for line in lines)


@contextlib.contextmanager
def reserved_stdout() -> Iterator[TextIO]:
    """Gives the real stdout for the caller's own result; whatever libraries print meanwhile goes to stderr."""
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        yield stdout


def quiet_libraries() -> None:
    """Turn off transformers' advice and, without a terminal, its progress bars. Call it before transformers is
    imported.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


class ProgressBar:
    """One bar, or none: `bar(what, done, total)` counts in `unit`, `bar.in_bytes(what, done, total)` in bytes."""

    def __init__(self, shown: Progress | None, unit: str) -> None:
        self._shown = shown
        self._unit = unit
        self._what: tuple[str, str] | None = None
        self._task: TaskID | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        self._show(what, done, total, self._unit)

    def say(self, what: str) -> None:
        """What begins: in the bar, or as a line where there is none."""
        if self._shown is None:
            message(what)
        else:
            self(what, 0, 1)

    def in_bytes(self, what: str, done: int, total: int) -> None:
        """As packing, loading and preloading of a model are counted."""
        self._show(what, done, total, "B")

    def _show(self, what: str, done: int, total: int, unit: str) -> None:
        if self._shown is None:
            return
        if self._task is None or self._what != (what, unit):
            if self._task is not None:
                self._shown.remove_task(self._task)
            self._what, self._task = (what, unit), self._shown.add_task(escape(what), total=total, unit=unit)
        self._shown.update(self._task, completed=done, total=total)


class _AmountColumn(ProgressColumn):
    """How much is done of how much; for bytes also how fast."""

    def __init__(self) -> None:
        super().__init__(TableColumn(no_wrap=True))
        self._nbytes, self._speed = DownloadColumn(binary_units=True), TransferSpeedColumn()

    def render(self, task: Task) -> Text:
        if task.fields["unit"] == "B":
            return Text(" ").join([self._nbytes.render(task), self._speed.render(task)])
        return Text(f"{task.completed:.0f}/{task.total or 0:.0f} {task.fields['unit']}", style="progress.download")


@contextlib.contextmanager
def progress_bar(unit: str = "B") -> Iterator[ProgressBar]:
    """Shown where stderr is a terminal. `unit` of what is counted, "B": bytes."""
    if not sys.stderr.isatty():
        yield ProgressBar(None, unit)
        return
    columns = ("{task.description}", BarColumn(), _AmountColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as shown:
        yield ProgressBar(shown, unit)


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, width: int = 100_000, folded: str | None = None
) -> str:
    """Aligned columns. The first column and the one called `folded` are aligned left, the others right. Where lines
    would be longer than `width`, cells of `folded` take several lines.
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
"""Which figure a column shows, by its key, and how that is written."""


def figures_table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Column], width: int | None = None) -> str:
    """A table with a row for each dictionary of figures; `columns` maps headers to figures. An unknown figure is "-";
    an empty dictionary leaves an empty row. Within `width`, by default that of a terminal, names of systems take
    several lines.
    """
    lines = [cells(row, columns.values()) if row else [""] * len(columns) for row in rows]
    if width is not None:
        return table(list(columns), lines, width=width, folded="system")
    if "system" not in columns or sys.__stdout__ is None or not sys.__stdout__.isatty():
        return table(list(columns), lines)
    others = sum(2 + max(map(len, column)) for column in zip(columns, *lines, strict=True) if column[0] != "system")
    width = max(shutil.get_terminal_size().columns, others + 12)  # else numbers would be cut
    return table(list(columns), lines, width=width, folded="system")


def budgets_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Column], width: int | None = None) -> str:
    """A figures_table of systems under several budgets. A budget is named in its first row, with a gap before it."""
    told: list[Mapping[str, Any]] = []
    memory = None
    for row in rows:
        is_first, memory = row["memory"] != memory, row["memory"]
        if is_first and told and len(rows) > 3:
            told.append({})
        told.append(row if is_first else {**row, "memory": ""})
    return figures_table(told, {"memory": ("memory", str), "system": ("system", str), **columns}, width)


def cells(row: Mapping[str, Any], columns: Iterable[Column]) -> list[str]:
    return ["-" if row[key] is None else write(row[key]) for key, write in columns]


def in_brackets(*parts: str) -> str:
    """`[20 tokens | 8.1 tokens/s]`: facts in one line."""
    return f"[{' | '.join(parts)}]"


def show(result: Mapping[str, Any], is_json: bool, text: Callable[[], str], stream: TextIO | None = None) -> None:
    """Print a command's result: with --json as its one JSON object, else as text that fits the terminal."""
    stream = stream or sys.stdout
    if is_json:
        print_json(result, stream)
    else:
        print(fitted(text(), stream), file=stream, flush=True)


def origin() -> dict[str, Any]:
    """When and by which command a file was made, for the file itself."""
    return {"created": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": typed()}


def typed() -> str:
    """This process's command line, quoted for a shell."""
    return shlex.join(["expertly", *sys.argv[1:]])


def printable(value: object) -> str:
    """A text from a file with control characters escaped, so that a terminal does not obey them."""
    text = str(value)
    return text if text.isprintable() else repr(text)
