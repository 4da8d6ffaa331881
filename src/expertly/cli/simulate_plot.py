"""The picture of `expertly lab simulate --plot`: what each budget gives, and how far that is from the best possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from expertly.cli.figures import new_figure

Row = dict[str, Any]

_BOUNDS = {"belady": "--", "belady-global": "-.", "oracle": ":", "resident": (0, (6, 2, 1, 2, 1, 2))}
_MARKERS = {"belady": "^", "belady-global": "v", "oracle": "D", "resident": "s"}
_FLOOR = "floor: computing, belady's bytes"
_LEGEND_WIDTH = 130
"""Letters of a line of the legend, about: names of systems made of parts are long."""
_PANELS = (
    ("hit_rate", "hit rate in decode (%)", 100.0),
    ("tpot_s", "time per output token (ms)", 1000.0),
    ("ttft_s", "time to first token (s)", 1.0),
    ("stall_share", "time stalled (%)", 100.0),
)


def draw(facts: dict[str, Any], results: Sequence[Row]) -> Any:
    """A figure; panels of which nothing is known are left out."""
    results, cuts = _with_cuts(results)
    panels = [panel for panel in _PANELS if any(row[panel[0]] is not None for row in results)]
    has_latency = any(row["latency_s"] for row in results)
    num_panels = max(1, len(panels) + has_latency)
    num_columns = num_panels if num_panels <= 4 else 3
    num_rows = -(-num_panels // num_columns)
    figure = new_figure(max(7.0, 4.4 * num_columns), 4.0 * num_rows + 1.1)
    axes = [axis for line in figure.subplots(num_rows, num_columns, squeeze=False) for axis in line]
    memories = list(dict.fromkeys(row["memory"] for row in results))
    styles = _styles({row["label"]: row["system"] for row in results})
    for axis, (key, title, scale) in zip(axes, panels, strict=False):
        if len(memories) > 1:
            _draw_lines(axis, results, styles, key, scale)
        else:
            _draw_bars(axis, results, styles, key, scale)
        axis.set_title(title)
    if has_latency:
        _draw_latencies(axes[len(panels)], results, memories[-1], styles)
    for axis in axes[num_panels:]:
        axis.set_visible(False)
    handles = {label: one for axis in axes for one, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if handles:
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=min(6, len(handles), max(1, _LEGEND_WIDTH // max(map(len, handles)))),
            frameon=False,
            handlelength=3.5,
        )
    trace = facts["trace"]
    where = "" if trace["expert_bytes"] is None else f" on {facts['hardware']['name']}"
    budget = f", memory {memories[0]}" if len(memories) == 1 else ""
    figure.suptitle(f"{trace['model']}{where}, P = {', '.join(map(str, cuts))}{budget} (simulated)")
    return figure


def _draw_lines(axis: Any, results: Sequence[Row], styles: dict[str, Row], key: str, scale: float) -> None:
    """One quantity against memory."""
    places = _places(list(dict.fromkeys(row["memory"] for row in results)))
    for name, style in styles.items():
        known = [row for row in results if row["label"] == name and row[key] is not None]
        if known:
            points = [places[row["memory"]] for row in known], [scale * row[key] for row in known]
            axis.plot(*points, label=name, **style)
    if key == "tpot_s":
        floors = {row["memory"]: row["floor_tpot_s"] for row in results if row["system"] == "belady-global"}
        known_floors = [(places[memory], scale * floor) for memory, floor in floors.items() if floor is not None]
        if known_floors:
            axis.plot(*zip(*known_floors, strict=True), label=_FLOOR, color="0.8", linewidth=7, zorder=1)
    axis.set_xticks(list(places.values()), list(places))
    axis.set_xlabel("memory for experts")
    axis.set_ylim(bottom=0)
    axis.margins(y=0.08)
    axis.grid(alpha=0.3)


def _places(memories: Sequence[str]) -> dict[str, float]:
    """Where budgets lie on the axis: at their size where all are said in one way, else side by side."""
    for unit in ("%", "/layer"):
        if all(memory.endswith(unit) for memory in memories):
            return {memory: float(memory.removesuffix(unit)) for memory in memories}
    return {memory: float(place) for place, memory in enumerate(memories)}


def _draw_bars(axis: Any, results: Sequence[Row], styles: dict[str, Row], key: str, scale: float) -> None:
    """One quantity of one budget: a bar for each system, with its value."""
    known = [row for row in results if row[key] is not None]
    names = [row["label"] for row in known]
    bounds = [row["system"] in _BOUNDS for row in known]
    values = [scale * row[key] for row in known]
    colors = ["0.75" if is_bound else styles[name]["color"] for name, is_bound in zip(names, bounds, strict=True)]
    bars = axis.barh(names, values, color=colors)
    axis.bar_label(bars, [f"{value:.3g}" for value in values], padding=3)
    floor = next((row["floor_tpot_s"] for row in known if row["system"] == "belady-global"), None)
    if key == "tpot_s" and floor is not None:
        axis.axvline(scale * floor, color="0.4", linestyle="--", linewidth=1.5, label=_FLOOR)
    axis.invert_yaxis()
    axis.margins(x=0.25)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3, axis="x")
    axis.set_axisbelow(True)


def _draw_latencies(axis: Any, results: Sequence[Row], memory: str, styles: dict[str, Row]) -> None:
    """The share of requests done within a time, with the last memory."""
    for row in results:
        if row["memory"] == memory and row["latency_s"]:
            times = row["latency_s"]["sorted"]
            shares = [100 * (i + 1) / len(times) for i in range(len(times))]
            style = styles[row["label"]] | {"marker": ""}
            axis.step([0, *times], [0, *shares], where="post", label=row["label"], **style)
    axis.set(title=f"requests done within a time (%), {memory}", xlabel="seconds from arrival to last token")
    axis.set_ylim(0, 101)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)


def _with_cuts(results: Sequence[Row]) -> tuple[list[Row], list[int]]:
    """Each row with the label of its line, and every P there is."""
    cuts = sorted({row["segments"] for row in results})
    several = len(cuts) > 1
    return [
        row | {"label": f"{row['system']}, P = {row['segments']}" if several else row["system"]} for row in results
    ], cuts


def _styles(systems: Mapping[str, str]) -> dict[str, Row]:
    """Of lines by their label: the systems asked for in colour, the bounds thin and grey behind them."""
    styles: dict[str, Row] = {}
    number = -1
    for name, system in systems.items():
        if system in _BOUNDS:
            line = {"linestyle": _BOUNDS[system], "marker": _MARKERS[system], "linewidth": 1.2, "markersize": 4}
            styles[name] = line | {"color": "0.35", "zorder": 1.5}
        else:
            number += 1
            styles[name] = {"color": f"C{number % 10}", "linewidth": 2, "marker": "o", "markersize": 5}
            if number >= 10:
                styles[name]["linestyle"] = "--"
    return styles
