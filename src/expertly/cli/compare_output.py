"""Where results of `expertly lab compare` go: to its folder as soon as there are any, and in the end to the
terminal.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, TextIO

from expertly.cli.compare_table import summary, terminal_width
from expertly.cli.output import message, print_json
from expertly.core.errors import ConfigError
from expertly.core.files import finite
from expertly.lab.compare.comparison import Comparison
from expertly.lab.compare.folder import REPORT, write_all
from expertly.lab.compare.page import page
from expertly.lab.plots import check_plot


class Output:
    """Of one comparison, to one folder. Its time counts from here."""

    def __init__(self, comparison: Comparison, folder: Path) -> None:
        check_plot()  # before anything that takes long
        self._comparison = comparison
        self._folder = folder
        self._begin = time.monotonic()
        self._unwritten: str | None = None  # why what there is could not be written

    def keep(self) -> None:
        """What there is so far, if it is anything: who kills this process does not take it along. Where it cannot be
        written the comparison goes on, and says so once.
        """
        if not self._comparison.has_results:
            return
        was_written = self._unwritten is None
        self._save()
        if was_written and self._unwritten is not None:
            message(f"expertly: not written yet: {self._unwritten}")

    def write(self) -> None:
        """All that there is, if it is anything, and say where it is."""
        if not self._comparison.has_results:
            return
        self._save()
        if self._unwritten is None:
            message(f"report written to {self._folder / REPORT}")
        else:
            message(f"expertly: error: {self._unwritten}")

    def end(self, stdout: TextIO, is_json: bool, is_interrupted: bool) -> int:
        """Print the outcome; the exit code. What cannot be written is printed all the same."""
        results = self._save()
        if self._unwritten is None:
            message(f"report written to {self._folder / REPORT}")
        if is_json:
            print_json(results, stdout)
        else:
            stdout.write(summary(results, terminal_width(stdout)) + "\n")
            stdout.flush()
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
