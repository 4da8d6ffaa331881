"""Writes the results of `expertly lab compare`: into its folder after every step, and to the terminal at the end."""

from __future__ import annotations

import os
import shutil
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from expertly.cli.output import budgets_table, message, show
from expertly.core.errors import ConfigError
from expertly.core.files import finite
from expertly.core.units import counted, format_nbytes
from expertly.lab.compare.comparison import REPORT, Comparison, write_all
from expertly.lab.compare.figures import failures_in_words, spread_of
from expertly.lab.compare.report import COLUMNS, GROUPS, page
from expertly.lab.plots import check_plot

USUAL_WIDTH = 80
"""Columns of a terminal of unknown width."""

BASELINE = "to baseline"
"""The header of the column of ratios where the baseline's name is too long for one."""


def terminal_width(stream: TextIO) -> int | None:
    """Columns of the terminal, or what COLUMNS says; None where there is neither."""
    if stream.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size((USUAL_WIDTH, 24)).columns
    return None


def summary(results: dict[str, Any], width: int | None = None) -> str:
    """The results as text. With a `width`, lines are no longer than that as far as names and numbers let them; without,
    sentences stay whole, so that they can be searched, and tables fit a usual terminal.
    """
    rows, baseline = results["rows"], results["settings"]["baseline"]
    has_engine = any(row["engine"] is not None for row in rows)
    sentences = [[_head(results)], [], results["headline"], [*failures_in_words(results), *results["notes"]]]
    if rows:
        where = "engine's medians" if has_engine else "medians"
        sentences[1] = [
            f"TTFT and TPOT: {where} over requests{' and rounds' if has_engine else ''}; stall and loaded: for each "
            "token of an answer, loaded with what the prompts load"
            + (f"; {_to(baseline)}: TPOT against that of {baseline}" if _to(baseline) == BASELINE else "")
        ]
    parts = ["\n".join(_wrapped(sentence, width) for sentence in some) for some in sentences]
    if rows:
        groups = [where for where in GROUPS if any(row[where] is not None for row in rows)]
        tables = [_table(rows, where, baseline, width or USUAL_WIDTH) for where in groups]
        titles = [f"{GROUPS[where]}:\n" if len(groups) == 2 else "" for where in groups]
        parts[1:1] = [title + one for title, one in zip(titles, tables, strict=True)]
    return "\n\n".join(part for part in parts if part)


def _wrapped(sentence: str, width: int | None) -> str:
    return sentence if width is None else textwrap.fill(sentence, width, break_long_words=False, break_on_hyphens=False)


def _head(results: dict[str, Any]) -> str:
    source, settings = results["source"], results["settings"]
    shape = ""
    if "layers" in source:
        size = "" if source["expert_bytes"] is None else f", {format_nbytes(source['expert_bytes'])} of experts"
        shape = f": {source['layers']} layers of {source['experts']} experts, top-{source['top_k']}{size}"
        shape += f"; {counted(source['requests'], 'request')}, {counted(source['tokens'], 'token')}"
    where = f"; simulated on {results['hardware_from']}" if results["hardware_from"] else ""
    rounds = f"; {counted(settings['rounds'], 'round')}" if results["engine"] is not None else ""
    return f"{source['name']}{shape}{rounds}{where}"


def _table(rows: Sequence[dict[str, Any]], where: str, baseline: str, width: int) -> str:
    """A row for each budget and system that has figures."""
    lines = []
    for row in rows:
        if (figures := row[where]) is not None:
            spreads = {key: spread_of(figures.get(key)) for key, _ in COLUMNS.values()}
            medians = {key: None if one is None else one["median"] for key, one in spreads.items()}
            name = row["system"] + (", failed" if row["has_failed"] and where == "engine" else "")
            lines.append(medians | {"memory": row["memory"], "system": name})
    columns = {_to(baseline) if key == "tpot_to_baseline" else header: (key, w) for header, (key, w) in COLUMNS.items()}
    return budgets_table(lines, columns, width)


def _to(baseline: str) -> str:
    """The header of the column of ratios: short, so that the column is no wider than its numbers."""
    return f"to {baseline}" if len(baseline) <= len("baseline") else BASELINE


class Output:
    """Writes one comparison to one folder. Its time counts from the moment this is made."""

    def __init__(self, comparison: Comparison, folder: Path) -> None:
        check_plot()  # before anything that takes long
        self._comparison = comparison
        self._folder = folder
        self._begin = time.monotonic()
        self._unwritten: str | None = None  # why what there is could not be written

    def keep(self) -> None:
        """Write what there is so far, so that killing this process loses nothing. Where writing fails the comparison
        goes on, and the user is told once.
        """
        if not self._comparison.has_results:
            return
        was_written = self._unwritten is None
        self._save()
        if was_written and self._unwritten is not None:
            message(f"expertly: not written yet: {self._unwritten}")

    def write(self) -> None:
        """Write what there is, if anything, and say where."""
        if not self._comparison.has_results:
            return
        self._save()
        if self._unwritten is None:
            message(f"report written to {self._folder / REPORT}")
        else:
            message(f"expertly: error: {self._unwritten}")

    def end(self, stdout: TextIO, is_json: bool, is_interrupted: bool) -> int:
        """Print the results and return the exit code. Prints them even where the folder cannot be written."""
        results = self._save()
        if self._unwritten is None:
            message(f"report written to {self._folder / REPORT}")
        show(results, is_json, lambda: summary(results, terminal_width(stdout)), stdout)
        failed = [one for one in results["failures"] if not one["is_skipped"]]
        if failed:
            named = ", ".join(f"{one['system']} ({one['where']}, {one['memory']})" for one in failed)
            message(f"expertly: error: did not come through: {named}")
        for problem in (self._comparison.problem, self._unwritten):
            if problem is not None:
                message(f"expertly: error: {problem}")
        if is_interrupted:
            where = "in the report" if self._unwritten is None else "above"
            message(f"expertly: interrupted; what was done by then is {where}")
            return 130
        is_done = self._comparison.is_whole and self._unwritten is None
        has_any = any(not row["is_bound"] for row in results["rows"])
        return 0 if is_done and has_any and not failed else 2

    def _save(self) -> dict[str, Any]:
        results: dict[str, Any] = finite(self._comparison.results() | {"seconds": time.monotonic() - self._begin})
        try:
            write_all(self._folder, results, page(results))
        except ConfigError as error:
            self._unwritten = str(error)
        else:
            self._unwritten = None
        return results
