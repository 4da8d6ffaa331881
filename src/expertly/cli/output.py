"""What every command prints with: JSON, tables, progress.

With --json a command prints exactly one JSON object on stdout and everything else on stderr. Progress is shown only
where stderr is a terminal.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TimeRemainingColumn
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
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def reserved_stdout() -> Iterator[TextIO]:
    """Gives the real stdout for the caller's own result; whatever libraries print meanwhile goes to stderr."""
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        yield stdout


def quiet_libraries() -> None:
    """Turn off transformers' advice and, without a terminal, its progress bars, before it is imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@dataclass(frozen=True)
class ProgressBar:
    """One bar, or none: `bar(label, done, total)` counts in `unit`, "B": bytes."""

    shown: Progress | None
    unit: str

    def __call__(self, label: str, done: int, total: int) -> None:
        if self.shown is None:
            return
        (task,), label = self.shown.tasks, escape(label)
        if task.description != label:
            self.shown.reset(task.id)  # or the time left would be of both
        amount = f"{done}/{total} {self.unit}"
        if self.unit == "B":
            amount = f"{format_nbytes(done)} of {format_nbytes(total)}"
        self.shown.update(task.id, description=label, completed=done, total=total, amount=amount, visible=True)

    @property
    def in_bytes(self) -> ProgressBar:
        """The same bar, as packing, loading and preloading of a model are counted."""
        return replace(self, unit="B")

    def say(self, label: str) -> None:
        """What begins: in the bar, or as a line where there is none."""
        if self.shown is None:
            message(label)
        else:
            self(label, 0, 1)


@contextlib.contextmanager
def progress_bar(unit: str = "B") -> Iterator[ProgressBar]:
    """Shown where stderr is a terminal. `unit` of what is counted, "B": bytes."""
    if not sys.stderr.isatty():
        yield ProgressBar(None, unit)
        return
    columns = ("{task.description}", BarColumn(), "{task.fields[amount]}", TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as shown:
        shown.add_task("", visible=False, amount="")
        yield ProgressBar(shown, unit)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns that are aligned right, but for the first."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, header in enumerate(headers):
        made.add_column(Text(header), justify="right" if number else "left", no_wrap=True)
    for row in rows:
        made.add_row(*map(Text, row))
    text = io.StringIO()
    Console(file=text, width=100_000, color_system=None).print(made)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


Column = tuple[str, Callable[[Any], str]]
"""Which figure a column shows, by its key, and how that is written."""


def figures_table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Column]) -> str:
    """A row for each dictionary of figures; an unknown figure is "-", an empty dictionary leaves an empty row."""

    def cells(row: Mapping[str, Any]) -> list[str]:
        return ["-" if row[key] is None else write(row[key]) for key, write in columns.values()]

    return table(list(columns), [cells(row) if row else [""] * len(columns) for row in rows])


def budgets_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Column]) -> str:
    """A figures_table of systems under several budgets. A budget is named in its first row, with a gap before it."""
    lines: list[Mapping[str, Any]] = []
    memory = None
    for row in rows:
        is_first, memory = row["memory"] != memory, row["memory"]
        if is_first and lines and len(rows) > 3:
            lines.append({})
        lines.append(row if is_first else {**row, "memory": ""})
    return figures_table(lines, {"memory": ("memory", str), "system": ("system", str), **columns})


def in_brackets(*parts: str) -> str:
    """`[20 tokens | 8.1 tokens/s]`: facts in one line."""
    return f"[{' | '.join(parts)}]"


def show(result: Mapping[str, Any], is_json: bool, text: Callable[[], str], stream: TextIO | None = None) -> None:
    """Print a command's result: with --json as its one JSON object, else as text."""
    if is_json:
        print_json(result, stream)
    else:
        print(text(), file=stream or sys.stdout, flush=True)
