"""What `expertly compare` prints: the outcome in words, and a table with engine and simulator side by side."""

from __future__ import annotations

from typing import Any

from expertly.cli.output import table
from expertly.compare.headline import tpot_of
from expertly.compare.units import counted, format_nbytes, format_ratio, format_seconds, format_share

_COLUMNS = {
    "hit rate": ("hit_rate", format_share),
    "TTFT": ("ttft_s", format_seconds),
    "stall": ("stall_s", format_seconds),
    "loaded": ("bytes_loaded", format_nbytes),
}


def summary(results: dict[str, Any]) -> str:
    """For people."""
    rows = results["rows"]
    has_engine = any(row["engine"] is not None for row in rows)
    parts = [_head(results)]
    if rows:
        parts.append(_table(rows, has_engine, results["settings"]["baseline"]))
        where = "engine's medians" if has_engine else "medians"
        parts.append(
            f"TTFT and TPOT: {where} over requests{' and rounds' if has_engine else ''}; stall and loaded: for each "
            "token of an answer, loaded with what the prompts load"
        )
    parts.append("\n".join(results["headline"]))
    failed = [f"{one['where']}, {one['memory']}, {one['system']}: {one['cause']}" for one in results["failures"]]
    parts.append("\n".join([*failed, *results["notes"]]))
    return "\n\n".join(part for part in parts if part)


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


def _table(rows: list[dict[str, Any]], has_engine: bool, baseline: str) -> str:
    """A row for each system and budget, a gap between budgets."""
    cells: list[list[str]] = []
    memory = None
    headers = ["memory", "system", *_COLUMNS, "TPOT", f"to {baseline}"]
    if has_engine:
        headers += ["simulated: hit rate", "TPOT", f"to {baseline}", "loaded"]
    for row in rows:
        is_first = row["memory"] != memory
        memory = row["memory"]
        if is_first and cells:
            cells.append([""] * len(headers))
        engine, simulated = row["engine"], row["simulated"]
        shown = engine if has_engine else simulated
        line = [memory if is_first else "", row["system"]]
        line += [_cell(shown, key, write) for key, write in _COLUMNS.values()]
        line += [_tpot(shown), _ratio(shown)]
        if has_engine:
            line += [_cell(simulated, "hit_rate", format_share), _tpot(simulated), _ratio(simulated)]
            line.append(_cell(simulated, "bytes_loaded", format_nbytes))
        cells.append(line)
    return table(headers, cells)


def _cell(figures: dict[str, Any] | None, key: str, write: Any) -> str:
    if figures is None:
        return "-"
    value = figures[key]
    return str(write(value["median"] if isinstance(value, dict) else value))


def _tpot(figures: dict[str, Any] | None) -> str:
    if figures is None or figures["tpot_s"] is None:
        return "-"
    return format_seconds(tpot_of(figures))


def _ratio(figures: dict[str, Any] | None) -> str:
    ratio = None if figures is None else figures.get("tpot_to_baseline")
    return format_ratio(ratio["median"] if isinstance(ratio, dict) else ratio)
