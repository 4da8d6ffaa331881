"""What every command prints with: the --json rule, tables, units, progress.

With --json a command prints exactly one JSON object on stdout and everything else on stderr. Progress is shown only
where stderr is a terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from expertly.core.files import finite
from expertly.core.units import format_nbytes as format_nbytes
from expertly.core.units import format_seconds as format_seconds
from expertly.core.units import format_share as format_share


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
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:  # with NumPy alone a command works as well
        yield None
        return
    is_bytes = unit == "B"
    suffix = unit if is_bytes else f" {unit}"
    delay = 0.5 if is_bytes else 0.0  # bytes may be done before anyone looks
    bar = tqdm(unit=suffix, unit_scale=is_bytes, unit_divisor=1024, leave=False, file=sys.stderr, delay=delay)

    def progress(what: str, done: int, total: int) -> None:
        if what != bar.desc.removesuffix(": "):
            bar.set_description(what, refresh=False)
            bar.reset(total)
        bar.update(done - bar.n)

    with bar:
        yield progress


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip()

    return "\n".join([line(headers), "  ".join("-" * width for width in widths), *map(line, rows)])


def printable(value: object) -> str:
    """What a file says, so that a terminal shows it and does not obey it."""
    text = str(value)
    return text if text.isprintable() else repr(text)
