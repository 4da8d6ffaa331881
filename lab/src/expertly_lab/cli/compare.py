"""`expertly lab compare`: which system is fastest for a model, and how far it is from the best possible.

Exit code 2 where a system failed, 130 where it was interrupted; both leave a report. For a trace: `lab simulate`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from expertly.cli.output import budgets_table, message, progress_bar, reserved_stdout, show
from expertly.core.errors import ConfigError, ExpertlyError
from expertly.core.files import finite
from expertly.core.units import counted, format_nbytes
from expertly.data import demo_prompts
from expertly.model.prompts import PROMPTS_HELP, RAW_HELP, read_prompts
from expertly.options import (
    ADVANCED,
    MODEL_HELP,
    REQUIRED,
    argument,
    jobs_option,
    json_flag,
    load_option,
    names,
    option,
    path_option,
)
from expertly.scheduler.systems import BASE_SYSTEM
from expertly_lab.cli.output import printable, typed
from expertly_lab.compare.comparison import (
    REPORT,
    TRACE,
    USUAL_SYSTEMS,
    Comparison,
    ComparisonSettings,
    check_memories,
    check_systems,
    prepare,
    write_all,
)
from expertly_lab.compare.figures import failures_in_words
from expertly_lab.sim.hardware import Hardware

if TYPE_CHECKING:
    from expertly_lab.compare.report import Column


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    model: str | None = argument(None, MODEL_HELP, metavar="MODEL")
    system: str = option(
        USUAL_SYSTEMS, "as `expertly systems` lists; NAME:KEY=VALUE changes a part of one", metavar="A,B"
    )
    memory: str = option("10%,25%,50%", "for experts: shares of them or amounts", metavar="SIZE,SIZE")
    out: Path = path_option(REQUIRED, "where the report goes: a new or an empty folder", "DIR")
    force: bool = option(False, "replace an earlier comparison in DIR")
    prompts: str | None = option(None, PROMPTS_HELP, metavar="FILE")
    requests: int = option(5, "how many prompts are answered", least=1)
    tokens: int = option(24, "length of each answer", least=1)
    rounds: int = option(2, "how often the engine runs everything", least=1)
    raw: bool = option(False, RAW_HELP, panel=ADVANCED)
    hardware: str | None = option(
        None,
        "simulate another machine: a shipped profile or a TOML file (default: this one, which is measured)",
        metavar="NAME",
        panel=ADVANCED,
    )
    dtype: str | None = load_option("dtype")
    device: str | None = load_option("device")
    jobs: int | None = jobs_option("simulations")
    json: bool = json_flag()


def run(args: CompareOptions) -> int:
    same = ("tokens", "rounds", "dtype", "device", "hardware", "jobs")
    settings = ComparisonSettings(
        check_systems(names("system", args.system)),
        check_memories(names("memory", args.memory)),
        is_raw=args.raw,
        **{name: getattr(args, name) for name in same},
    )
    if args.hardware is not None:  # what reading it raises, before anything runs
        Hardware.read(args.hardware)
    prompts = read_prompts(str(demo_prompts()) if args.prompts is None else args.prompts, args.requests)
    with reserved_stdout() as stdout:
        comparison = Comparison(settings, typed(), {"name": printable(args.model or "demo")})
        output = Output(comparison, args.out)
        comparison.keep = output.keep
        prepare(args.out, comparison.command, args.force)
        is_interrupted = False
        try:
            with progress_bar("steps") as progress:
                comparison.run(args.model, prompts, args.out / TRACE, progress)
        except KeyboardInterrupt:
            is_interrupted = True
        except ExpertlyError as error:
            if not comparison.runs:
                raise
            comparison.problem = str(error)
        except BaseException as error:  # a bug, of ours or of a system that was installed: what was done is not lost
            comparison.problem = f"{type(error).__name__}: {error}"
            output.keep()
            message(f"what was done by then is in {args.out}")
            raise
        return output.end(stdout, args.json, is_interrupted)


class Output:
    """Writes one comparison to one folder. Its time counts from the moment this is made."""

    def __init__(self, comparison: Comparison, folder: Path) -> None:
        self._comparison = comparison
        self._folder = folder
        self._begin = time.monotonic()
        self._unwritten: str | None = None  # why what there is could not be written

    def keep(self) -> None:
        """Write what there is so far. Where that fails the comparison goes on, and the user is told once."""
        was_written = self._unwritten is None
        if self._comparison.runs:
            self._save(has_pictures=False)
            if was_written and self._unwritten is not None:
                message(f"expertly: not written yet: {self._unwritten}")

    def end(self, stdout: TextIO, is_json: bool, is_interrupted: bool) -> int:
        """Print the results and return the exit code. Prints them even where the folder cannot be written."""
        results = self._save()
        if self._unwritten is None:
            message(f"report written to {self._folder / REPORT}")
        show(results, is_json, lambda: summary(results), stdout)
        failed = [failure for failure in results["failures"] if not failure["is_skipped"]]
        if failed:
            named = ", ".join("{system} ({where}, {memory})".format(**failure) for failure in failed)
            message(f"expertly: error: did not come through: {named}")
        for problem in (self._comparison.problem, self._unwritten):
            if problem is not None:
                message(f"expertly: error: {problem}")
        if is_interrupted:
            place = "in the report" if self._unwritten is None else "above"
            message(f"expertly: interrupted; what was done by then is {place}")
            return 130
        return 0 if self._comparison.is_whole and self._unwritten is None and not failed else 2

    def _save(self, has_pictures: bool = True) -> dict[str, Any]:
        from expertly_lab.compare.report import page

        results: dict[str, Any] = finite(self._comparison.results() | {"seconds": time.monotonic() - self._begin})
        self._unwritten = None
        try:
            write_all(self._folder, results, page(results, has_pictures))
        except ConfigError as error:
            self._unwritten = str(error)
        return results


def summary(results: dict[str, Any]) -> str:
    """The results as text: a table of the engine's and one of the simulator's, what they say, what failed, notes."""
    from expertly_lab.compare.report import COLUMNS, GROUPS

    source, rows = results["source"], results["rows"]
    parts = [f"{source['name']}; {counted(results['settings']['rounds'], 'round')}"]
    if "layers" in source:
        parts[0] += (
            f": {source['layers']} layers of {source['experts']} experts, top-{source['top_k']}, "
            f"{format_nbytes(source['expert_bytes'])} of experts; {counted(source['requests'], 'request')}, "
            f"{counted(source['tokens'], 'token')}; simulated on {results['hardware_from']}"
        )
    parts += [_table(title, rows, group, COLUMNS) for group, title in GROUPS.items() if any(row[group] for row in rows)]
    parts.append(
        "TTFT and TPOT: medians over requests (and rounds); loaded: in decode, for each token of an answer; to "
        f"{BASE_SYSTEM}: the time of all answers against that of {BASE_SYSTEM}"
    )
    parts += ["\n".join(results["headline"]), "\n".join([*failures_in_words(results), *results["notes"]])]
    return "\n\n".join(filter(None, parts))


def _table(title: str, rows: list[dict[str, Any]], group: str, columns: dict[str, Column]) -> str:
    """A row for each budget and system that has figures."""
    lines = []
    for row in rows:
        if (figures := row[group]) is not None:
            ratio = figures["time_to_base"]
            medians = figures | {"time_to_base": None if ratio is None else ratio["median"]}
            lines.append(medians | {"memory": row["memory"], "system": row["system"]})
    return f"{title}:\n{budgets_table(lines, columns)}"
