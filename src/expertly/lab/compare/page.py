"""The report: one HTML file that holds everything it shows, without a script, made from the results alone. Its words,
tables and style sheet are in report.html beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import jinja2

from expertly.core.units import (
    counted,
    format_nbytes,
    format_range,
    format_ratio,
    format_seconds,
    format_share,
)
from expertly.lab.compare.figures import best_row, failures_in_words
from expertly.lab.compare.pictures import (
    KINDS,
    MEASURES,
    PLACES,
    PREFETCH,
    against_budget,
    latencies,
    sample,
    spread_of,
    token_bars,
    token_in_time,
)
from expertly.lab.compare.settings import BOUNDS
from expertly.lab.plots import THEME, check_plot, drawing, marks_of

Write = Callable[[float | None], str]

GROUPS = {"engine": "engine, measured", "simulated": "simulator"}

COLUMNS: dict[str, tuple[str, Write]] = {
    "TPOT": ("tpot_s", format_seconds),
    "to {baseline}": ("tpot_to_baseline", format_ratio),
    "hit rate": ("hit_rate", format_share),
    "TTFT": ("ttft_s", format_seconds),
    "stall": ("stall_s", format_seconds),
    "loaded": ("bytes_loaded", format_nbytes),
}


def page(results: Mapping[str, Any]) -> str:
    """All of it. `results` are those of Comparison.results, as JSON has them. Raises ConfigError where there is no
    matplotlib to draw with.
    """
    check_plot()
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"nbytes": format_nbytes, "seconds": format_seconds, "counted": counted}
    source = files("expertly.lab.compare").joinpath("report.html").read_text(encoding="utf-8")
    with drawing():
        return environment.from_string(source).render(
            results=results,
            theme=THEME,
            failures=failures_in_words(results),
            tables=_tables(results),
            **_pictures(results),
            ahead=_table(_loading(results["rows"]), {one.name: (one.key, one.write) for one in PREFETCH}),
        )


def _tables(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of each budget: a row a system, engine and simulator side by side."""
    rows, settings = results["rows"], results["settings"]
    columns = {header.format(baseline=settings["baseline"]): column for header, column in COLUMNS.items()}
    made = []
    for memory in settings["memories"] if rows else ():
        shown = [row for row in rows if row["memory"] == memory]
        nbytes = next((row["memory_bytes"] for row in shown if row["memory_bytes"]), None)
        found = best_row(shown)
        best = None if found is None else found[0]["system"]
        made.append({"memory": memory, "nbytes": nbytes} | _table(shown, columns, best))
    return made


def _table(
    rows: Sequence[dict[str, Any]], columns: Mapping[str, tuple[str, Write]], best: str | None = None
) -> dict[str, Any]:
    """Of what there is of both; `fidelity` is how far the simulated times are from the measured ones. The row of system
    `best` is marked.
    """
    groups = [where for where in PLACES if any(row[where] is not None for row in rows)]
    lines = []
    for row in rows:
        cells = [[_cell(row[where], *column) for column in columns.values()] for where in groups]
        kind = "bound" if row["is_bound"] else "best" if row["system"] == best else ""
        parts = f" (P = {row['segments']})" if (row["segments"] or 1) > 1 else ""
        name = f"{row['system']}{parts}" + (", failed" if row["has_failed"] else "")
        line = {"name": name, "memory": row["memory"], "kind": kind, "groups": cells, "fidelity": _fidelity(row)}
        lines.append(line)
    return {"groups": [GROUPS[where] for where in groups], "columns": list(columns), "rows": lines}


def _cell(figures: dict[str, Any] | None, key: str, write: Write) -> tuple[str, str]:
    """A median, and its quartiles where they differ."""
    value = None if figures is None else spread_of(figures.get(key))
    if value is None:
        return "-", ""
    has_spread = value["q1"] < value["q3"]
    return write(value["median"]), format_range(write, value["q1"], value["q3"]) if has_spread else ""


def _fidelity(row: dict[str, Any]) -> str:
    measured = spread_of((row["engine"] or {}).get("tpot_s"))
    simulated = (row["simulated"] or {}).get("tpot_s")
    return "-" if measured is None or simulated is None else format_ratio(simulated / measured["median"])


def _loading(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of systems that loaded anything ahead."""
    return [row for row in rows if any(row[where] and row[where]["accuracy"] is not None for where in PLACES)]


def _pictures(results: Mapping[str, Any]) -> dict[str, Any]:
    rows, settings, timelines = results["rows"], results["settings"], results["timelines"]
    systems, memories = settings["systems"], settings["memories"]
    marks = marks_of(systems, [name for name in BOUNDS if name not in systems])
    loading = _loading(rows)
    shown = {row["system"] for row in rows}
    length_ns = max((one["length_ns"] for one in timelines), default=0)
    budgets = [against_budget(one, where, rows, memories, marks) for one in MEASURES for where in PLACES]
    requests = [latencies(where, memory, rows, marks) for memory in memories for where in PLACES]
    prefetches = [against_budget(one, where, loading, memories, marks) for one in PREFETCH for where in PLACES]
    kinds = {bar["kind"] for one in timelines for bar in token_bars(one)}
    return {
        "samples": {name: sample(mark) for name, mark in marks.items() if name in shown},
        "loading": {row["system"] for row in loading},
        "against_budgets": [one for one in budgets if one is not None],
        "latencies": [one for one in requests if one is not None],
        "prefetches": [one for one in prefetches if one is not None],
        "tokens": [(one, token_in_time(one, length_ns)) for one in timelines],
        "kinds": [(colour, said) for kind, (colour, said) in KINDS.items() if kind in kinds],
    }
