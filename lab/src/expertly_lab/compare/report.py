"""The report: one HTML file without scripts or external files, made from the results alone. Its template is report.html
beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import jinja2

from expertly.core.units import counted, format_nbytes, format_range, format_ratio, format_seconds, format_share
from expertly.scheduler.systems import BASE_SYSTEM
from expertly_lab.baselines.systems import BOUNDS
from expertly_lab.compare.figures import by_time, failures_in_words
from expertly_lab.plots import Lines, Marks, data_address, draw_panels, marks_of

Write = Callable[[float | None], str]
Column = tuple[str, Write]

GROUPS = {"engine": "engine, measured", "simulated": "simulator"}
"""Where a row's figures come from, and how the report calls that."""

COLUMNS: dict[str, Column] = {
    "TPOT": ("tpot_s", format_seconds),
    f"to {BASE_SYSTEM}": ("time_to_base", format_ratio),
    "hit rate": ("hit_rate", format_share),
    "TTFT": ("ttft_s", format_seconds),
    "loaded": ("bytes_loaded", format_nbytes),
}

PREFETCH: dict[str, Column] = {
    "coverage": ("coverage", format_share),
    "accuracy": ("accuracy", format_share),
    "timeliness": ("timeliness", format_share),
}

_DRAWN = {
    "hit_rate": ("hit rate (%)", 100.0),
    "tpot_s": ("TPOT, time a token (ms)", 1e3),
    "ttft_s": ("TTFT (ms)", 1e3),
    "bytes_loaded": ("loaded a token (MiB)", 2**-20),
}


def page(results: Mapping[str, Any], has_pictures: bool = True) -> str:
    """The HTML. `results` are those of Comparison.results, as JSON has them. Pictures take seconds."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"nbytes": format_nbytes, "seconds": format_seconds, "counted": counted}
    source = files("expertly_lab.compare").joinpath("report.html").read_text(encoding="utf-8")
    settings, rows = results["settings"], results["rows"]
    marks = marks_of(settings["systems"], [name for name in BOUNDS if name not in settings["systems"]])
    ahead = [row for row in rows if row["simulated"] and row["simulated"]["accuracy"] is not None]
    return environment.from_string(source).render(
        results=results,
        failures=failures_in_words(results),
        tables=_tables(results),
        ahead=_table([row | {"engine": None} for row in ahead], PREFETCH),
        pictures=_pictures(rows, marks) if has_pictures else [],
    )


def _tables(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each budget, a table with a row for each system and the engine's and simulator's figures side by side."""
    rows, settings = results["rows"], results["settings"]
    made = []
    for memory in settings["memories"] if rows else ():
        shown = [row for row in rows if row["memory"] == memory]
        nbytes = next((row["memory_bytes"] for row in shown if row["memory_bytes"]), None)
        best = next((row["system"] for row in by_time(shown)), None)
        table = _table(shown, COLUMNS, best)
        made.append({"memory": memory, "nbytes": nbytes} | table)
    return made


def _table(rows: Sequence[dict[str, Any]], columns: Mapping[str, Column], best: str | None = None) -> dict[str, Any]:
    """A table of the figures that engine or simulator have. `fidelity` is simulated relative to measured TPOT. The row
    of system `best` is marked.
    """
    groups = [group for group in GROUPS if any(row[group] is not None for row in rows)]
    lines = []
    for row in rows:
        parts = f" (P = {row['segments']})" if (row["segments"] or 1) > 1 else ""
        lines.append(
            {
                "name": f"{row['system']}{parts}" + (", failed" if row["has_failed"] else ""),
                "memory": row["memory"],
                "kind": "bound" if row["is_bound"] else "best" if row["system"] == best else "",
                "groups": [[_cell(row[group], *column) for column in columns.values()] for group in groups],
                "fidelity": _fidelity(row),
            }
        )
    return {"groups": [GROUPS[group] for group in groups], "columns": list(columns), "rows": lines}


def _cell(figures: dict[str, Any] | None, key: str, write: Write) -> tuple[str, str]:
    """A figure, and from where to where it went over the rounds."""
    value = None if figures is None else figures.get(key)
    if value is None:
        return "-", ""
    if not isinstance(value, dict):
        return write(value), ""
    has_range = value["low"] < value["high"]
    return write(value["median"]), format_range(write, value["low"], value["high"]) if has_range else ""


def _fidelity(row: dict[str, Any]) -> str:
    measured, simulated = ((row[group] or {}).get("tpot_s") for group in GROUPS)
    return format_ratio(simulated / measured) if measured and simulated else "-"


def _pictures(rows: Sequence[dict[str, Any]], marks: Marks) -> list[tuple[str, str]]:
    """For each measure a picture of the figure over the budgets, side by side of engine and simulator: its address, and
    what it shows.
    """
    made = []
    for key, (title, scale) in _DRAWN.items():
        panels: dict[str, Lines] = {}
        for group, name in GROUPS.items():
            lines: dict[str, dict[str, float]] = {}
            for row in rows:
                if row[group] is not None and row[group][key] is not None:
                    lines.setdefault(row["system"], {})[row["memory"]] = scale * row[group][key]
            if lines:
                panels[f"{title}, {name}"] = lines
        if panels:
            shown = " and ".join(name.removeprefix(f"{title}, ") for name in panels)
            made.append((data_address(draw_panels(panels, marks)), f"{title}: {shown}"))
    return made
