"""The plots of a report: figures against budgets, and the distribution of what requests take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from expertly.lab.compare.marks import Mark
from expertly.lab.compare.svg import Panel, element, path, round_ticks, titled, x_scale
from expertly.lab.compare.units import format_nbytes, format_range, format_seconds, format_share


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a row, and how its values and the numbers of its axis are written."""

    key: str
    name: str
    write: Callable[[float], str]
    is_share: bool = False
    base: int = 1000  # of the unit's multiples


MEASURES = (
    Measure("hit_rate", "hit rate", format_share, True),
    Measure("ttft_s", "TTFT", format_seconds),
    Measure("tpot_s", "TPOT, time a token", format_seconds),
    Measure("stall_s", "stall a token", format_seconds),
    Measure("bytes_loaded", "loaded a token", format_nbytes, base=1024),
)
"""Against the budget."""

PREFETCH = (
    Measure("coverage", "coverage", format_share, True),
    Measure("accuracy", "accuracy", format_share, True),
    Measure("timeliness", "timeliness", format_share, True),
)
"""Of loading ahead."""


def against_budget(
    measure: Measure, where: str, rows: Sequence[dict[str, Any]], marks: dict[str, Mark], places: dict[str, float]
) -> str | None:
    """A line a system over the budgets at `places`; "engine" or "simulated" figures. None where nothing is known."""
    lines: dict[str, list[tuple[float, dict[str, Any], dict[str, Any]]]] = {}
    for row in rows:
        value = None if row[where] is None else spread_of(row[where][measure.key])
        if value is not None:
            lines.setdefault(row["system"], []).append((places[row["memory"]], value, row))
    if not lines:
        return None
    most = max(value["q3"] for line in lines.values() for _, value, _ in line)
    ticks = [0.0, 0.25, 0.5, 0.75, 1.0] if measure.is_share else round_ticks(most, base=measure.base)
    at = sorted(places.values())
    space = (at[-1] - at[0]) * 0.06 or 0.5
    name = f"{measure.name}, {'engine' if where == 'engine' else 'simulator'}"
    panel = Panel(
        name,
        f"{name} against the memory for experts, a line for each of {', '.join(lines)}",
        "memory for experts",
        x_scale(at[0] - space, at[-1] + space),
        sorted((place, label) for label, place in places.items()),
        ticks,
        measure.write,
    )
    for system, line in lines.items():
        _draw(panel, marks[system], sorted(line, key=lambda one: one[0]), measure)
    return panel.drawn()


def _draw(
    panel: Panel, mark: Mark, line: Sequence[tuple[float, dict[str, Any], dict[str, Any]]], measure: Measure
) -> None:
    places = [(panel.x.at(x), panel.y.at(value["median"])) for x, value, _ in line]
    panel.parts.append(mark.line(path(places)))
    for (x, y), (_, value, row) in zip(places, line, strict=True):
        said = f"{mark.name}, {row['memory']}: {measure.write(value['median'])}"
        drawn = mark.dot(x, y)
        if value["q1"] < value["q3"]:
            low, high = panel.y.at(value["q1"]), panel.y.at(value["q3"])
            drawn = element("line", x1=x, x2=x, y1=low, y2=high, class_="spread", style=mark.style) + drawn
            said += f" (quartiles {format_range(measure.write, value['q1'], value['q3'])})"
        panel.parts.append(titled(drawn, said))


def latencies(where: str, memory: str, rows: Sequence[dict[str, Any]], marks: dict[str, Mark]) -> str | None:
    """The share of requests that took at most so long, under one budget; a line a system that ends at 1."""
    lines = {
        row["system"]: row[where]["latencies_s"]
        for row in rows
        if row["memory"] == memory and row[where] is not None and row[where]["latencies_s"]
    }
    if not lines:
        return None
    ticks = round_ticks(max(values[-1] for values in lines.values()))
    name = f"request latency, {memory}, {'engine' if where == 'engine' else 'simulator'}"
    panel = Panel(
        name,
        f"share of requests that were answered within a time, a line for each of {', '.join(lines)}",
        "seconds from a request's begin to its last token",
        x_scale(0.0, ticks[-1]),
        [(tick, f"{tick:g}") for tick in ticks],
        [0.0, 0.25, 0.5, 0.75, 1.0],
        format_share,
    )
    for system, values in lines.items():
        points = [(panel.x.at(x), panel.y.at(y)) for x, y in distribution(values)]
        middle = values[(len(values) - 1) // 2]
        said = f"{system}, {memory}: half within {format_seconds(middle)}, all within {format_seconds(values[-1])}"
        panel.parts.append(titled(marks[system].line(path(points)), said))
        panel.parts.append(marks[system].dot(*points[-1]))
    return panel.drawn()


def distribution(rising: Sequence[float]) -> list[tuple[float, float]]:
    """The corners of a distribution function: from 0 at the least value, up at every value, to 1 at the last."""
    corners = [(rising[0], 0.0)]
    for index, value in enumerate(rising):
        corners += [(value, index / len(rising)), (value, (index + 1) / len(rising))]
    return corners


def spread_of(value: Any) -> dict[str, Any] | None:
    """A value that repeats itself exactly has no spread."""
    if value is None:
        return None
    return value if isinstance(value, dict) else {"median": value, "q1": value, "q3": value}
