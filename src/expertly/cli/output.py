"""What every command prints with: JSON, tables, progress.

With --json a command prints exactly one JSON object on stdout and everything else on stderr. Progress is shown only
where stderr is a terminal.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from expertly.core.files import finite
from expertly.core.units import format_nbytes


def print_json(result: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Print the command's one JSON object. What JSON cannot say (NaN, infinity) becomes null."""
    stream = stream or sys.stdout
    stream.write(json.dumps(finite(result), ensure_ascii=False, allow_nan=False) + "\n")
    stream.flush()


def message(text: str) -> None:
    """Print to stderr what is not the result."""
    print(fitted(text, sys.stderr), file=sys.stderr, flush=True)


def fitted(text: str, stream: TextIO) -> str:
    """The text for a terminal that is narrower: lines are broken between words, and what follows is indented; rules of
    tables are cut. A line that ends in a command to copy stays whole.
    """
    if not stream.isatty():
        return text
    wrap = textwrap.TextWrapper(
        max(40, shutil.get_terminal_size().columns),
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )

    def broken(line: str) -> str:
        if ": expertly " in line:
            return line
        if line.startswith("──"):
            return line[: wrap.width]
        wrap.subsequent_indent = " " * (2 + len(line) - len(line.lstrip(" ")))
        return wrap.fill(line)

    return "\n".join(map(broken, text.split("\n")))


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
            self._what, self._task = (what, unit), self._shown.add_task(escape(what), total=total, amount="")
        is_bytes = unit == "B"
        amount = f"{format_nbytes(done)} of {format_nbytes(total)}" if is_bytes else f"{done}/{total} {unit}"
        self._shown.update(self._task, completed=done, total=total, amount=amount)


@contextlib.contextmanager
def progress_bar(unit: str = "B") -> Iterator[ProgressBar]:
    """Shown where stderr is a terminal. `unit` of what is counted, "B": bytes."""
    if not sys.stderr.isatty():
        yield ProgressBar(None, unit)
        return
    columns = ("{task.description}", BarColumn(), "{task.fields[amount]}", TimeRemainingColumn())
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


def figures_table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Column]) -> str:
    """A table with a row for each dictionary of figures; `columns` maps headers to figures. An unknown figure is "-";
    an empty dictionary leaves an empty row. On a narrow terminal names of systems take several lines.
    """
    lines = [
        ["-" if row[key] is None else write(row[key]) for key, write in columns.values()]
        if row
        else [""] * len(columns)
        for row in rows
    ]
    if "system" not in columns or sys.__stdout__ is None or not sys.__stdout__.isatty():
        return table(list(columns), lines)
    others = sum(2 + max(map(len, column)) for column in zip(columns, *lines, strict=True) if column[0] != "system")
    width = max(shutil.get_terminal_size().columns, others + 12)  # else numbers would be cut
    return table(list(columns), lines, width=width, folded="system")


def budgets_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Column]) -> str:
    """A figures_table of systems under several budgets. A budget is named in its first row, with a gap before it."""
    told: list[Mapping[str, Any]] = []
    memory = None
    for row in rows:
        is_first, memory = row["memory"] != memory, row["memory"]
        if is_first and told and len(rows) > 3:
            told.append({})
        told.append(row if is_first else {**row, "memory": ""})
    return figures_table(told, {"memory": ("memory", str), "system": ("system", str), **columns})


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
