"""The tables of a report, as HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from expertly.lab.compare.charts import PREFETCH, spread_of
from expertly.lab.compare.headline import best_row
from expertly.lab.compare.svg import element
from expertly.lab.compare.units import format_nbytes, format_range, format_ratio, format_seconds, format_share

Write = Callable[[float | None], str]

_COLUMNS: dict[str, tuple[str, Write]] = {
    "TPOT": ("tpot_s", format_seconds),
    "to {baseline}": ("tpot_to_baseline", format_ratio),
    "hit rate": ("hit_rate", format_share),
    "TTFT": ("ttft_s", format_seconds),
    "stall": ("stall_s", format_seconds),
    "loaded": ("bytes_loaded", format_nbytes),
}

GROUPS = {"engine": "engine, measured", "simulated": "simulator"}


def results_table(rows: Sequence[dict[str, Any]], memory: str, baseline: str) -> str:
    """A row a system under one budget, engine and simulator side by side; the best system's is bold."""
    shown = [row for row in rows if row["memory"] == memory]
    groups = [where for where in GROUPS if any(row[where] is not None for row in shown)]
    found = best_row(shown)
    best = None if found is None else found[0]["system"]
    columns = {header.format(baseline=baseline): column for header, column in _COLUMNS.items()}
    top = [element("th", " ")] + [
        element("th", GROUPS[where], colspan=len(columns), scope="colgroup") for where in groups
    ]
    heads = [element("th", "system", scope="col")]
    for _ in groups:
        heads += [element("th", escape(header), scope="col", class_=_first(i)) for i, header in enumerate(columns)]
    has_both = len(groups) == 2
    if has_both:
        top.append(element("th", " "))
        heads.append(element("th", "simulated / measured", scope="col", class_="first"))
    lines = []
    for row in shown:
        cells = [element("td", escape(_name(row)))]
        for where in groups:
            cells += [_cell(row[where], key, write, _first(i)) for i, (key, write) in enumerate(columns.values())]
        if has_both:
            cells.append(element("td", _fidelity(row), class_="first"))
        kind = "bound" if row["is_bound"] else "best" if row["system"] == best else None
        lines.append(element("tr", "".join(cells), class_=kind))
    return _table("".join(element("tr", "".join(one)) for one in (top, heads)), lines)


def prefetch_table(rows: Sequence[dict[str, Any]]) -> str | None:
    """Of the systems that loaded anything ahead; None where none did."""
    loading = [row for row in rows if any(row[where] and row[where]["accuracy"] is not None for where in GROUPS)]
    if not loading:
        return None
    groups = [where for where in GROUPS if any(row[where] is not None for row in loading)]
    top = [element("th", " "), element("th", " ")]
    top += [element("th", GROUPS[where], colspan=len(PREFETCH), scope="colgroup") for where in groups]
    heads = [element("th", "system", scope="col"), element("th", "memory", scope="col")]
    for _ in groups:
        heads += [element("th", one.name, scope="col", class_=_first(i)) for i, one in enumerate(PREFETCH)]
    lines = []
    for row in loading:
        cells = [element("td", escape(_name(row))), element("td", escape(row["memory"]))]
        for where in groups:
            cells += [_cell(row[where], one.key, format_share, _first(i)) for i, one in enumerate(PREFETCH)]
        lines.append(element("tr", "".join(cells), class_="bound" if row["is_bound"] else None))
    return _table("".join(element("tr", "".join(one)) for one in (top, heads)), lines)


def _table(head: str, lines: Sequence[str]) -> str:
    made = element("table", element("thead", head) + element("tbody", "".join(lines)))
    return element("div", made, class_="scroll", tabindex=0)


def _cell(figures: dict[str, Any] | None, key: str, write: Write, class_: str | None) -> str:
    value = None if figures is None else spread_of(figures.get(key))
    if value is None:
        return element("td", "-", class_=class_)
    text = escape(write(value["median"]))
    if value["q1"] < value["q3"]:
        text += " " + element("small", escape(format_range(write, value["q1"], value["q3"])))
    return element("td", text, class_=class_)


def _fidelity(row: dict[str, Any]) -> str:
    if row["engine"] is None or row["simulated"] is None:
        return "-"
    measured, simulated = spread_of(row["engine"]["tpot_s"]), row["simulated"]["tpot_s"]
    return "-" if measured is None or simulated is None else format_ratio(simulated / measured["median"])


def _name(row: dict[str, Any]) -> str:
    said = str(row["system"]) + (f" (P = {row['segments']})" if (row["segments"] or 1) > 1 else "")
    return said + (", failed" if row["has_failed"] else "")


def _first(index: int) -> str | None:
    return "first" if index == 0 else None
