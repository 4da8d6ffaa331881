"""The report: one HTML file without scripts or external files, made from the results alone. Its template is report.html
beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jinja2

from expertly.core.units import counted, format_nbytes, format_range, format_ratio, format_seconds, format_share
from expertly.lab.compare.figures import best_row, failures_in_words, spread_of
from expertly.lab.plots import (
    COLOUR,
    THEME,
    Mark,
    Picture,
    draw_shares,
    drawing,
    marks_of,
    memory_places,
    round_ticks,
    set_ticks,
)
from expertly.scheduler.presets import BOUNDS

# -- pictures: figures against budgets, how long requests take, one decoded token in time ----------------------------


PLACES = {"engine": "engine", "simulated": "simulator"}
"""Where a row's figures come from, and how the report calls that."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a row, and how its values and axis are written."""

    key: str
    name: str
    write: Callable[[float | None], str]
    is_share: bool = False
    base: int = 1000  # of the unit's multiples


MEASURES = (
    Measure("hit_rate", "hit rate", format_share, True),
    Measure("ttft_s", "TTFT", format_seconds),
    Measure("tpot_s", "TPOT, time a token", format_seconds),
    Measure("stall_s", "stall a token", format_seconds),
    Measure("bytes_loaded", "loaded a token", format_nbytes, base=1024),
)
"""The figures that are drawn against the budget."""

PREFETCH = (
    Measure("coverage", "coverage", format_share, True),
    Measure("accuracy", "accuracy", format_share, True),
    Measure("timeliness", "timeliness", format_share, True),
)
"""The figures of prefetching."""

KINDS = {
    "dense": ("dense", "attention, router, head"),
    "expert": ("s0", "an expert"),
    "control": ("s6", "deciding, asking for loads, taking them"),
    "wait": ("wait", "waiting for loads"),
    "demand": ("s1", "loaded when needed"),
    "ahead": ("s2", "loaded ahead"),
    "predict": ("s4", "predicting"),
}
"""The kinds of bars in a token's timeline: colour and words."""

_SHARES = [0.0, 0.25, 0.5, 0.75, 1.0]
_SIZE = (360.0, 232.0)
_FRAME = {"left": 54.0, "right": 12.0, "top": 26.0, "bottom": 42.0}
_LANES = {"device": "computing", "link": "link", "disk": "disk", "predictor": "predicting"}
_LANE, _GAP = 30.0, 8.0
_TOKEN_FRAME = {"left": 84.0, "right": 12.0, "top": 6.0, "bottom": 40.0}
_TOKEN_WIDTH = 960.0
_LEAST_WIDTH = 0.8  # of a bar in points, so that it is seen
_LEAST_WAIT_NS = 1000


def sample(mark: Mark) -> str:
    """A short piece of a system's line, for the legend."""
    picture = Picture(32, 14)
    axes = picture.axes(0, 0, 0, 0)
    axes.set_axis_off()
    axes.set_xlim(0, 32)
    axes.set_ylim(0, 14)
    axes.plot([1, 31], [7, 7], **mark.line)
    axes.plot([16], [7], **mark.point)
    return picture.svg()


def against_budget(
    measure: Measure, where: str, rows: Sequence[dict[str, Any]], memories: Sequence[str], marks: Mapping[str, Mark]
) -> str | None:
    """A plot of one figure over the budgets, with a line for each system. None where nothing is known."""
    lines: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for row in rows:
        value = None if row[where] is None else spread_of(row[where][measure.key])
        if value is not None:
            lines.setdefault(row["system"], []).append((row["memory"], value))
    if not lines:
        return None
    name = f"{measure.name}, {PLACES[where]}"
    picture, axes = _panel(name, "memory for experts")
    sizes = {row["memory"]: float(row["memory_bytes"]) for row in rows if row["memory_bytes"] and not row["is_bound"]}
    places = memory_places(memories, sizes)
    space = (max(places.values()) - min(places.values())) * 0.06 or 0.5
    axes.set_xlim(min(places.values()) - space, max(places.values()) + space)
    most = max(value["q3"] for line in lines.values() for _, value in line)
    ticks = _SHARES if measure.is_share else round_ticks(most, base=measure.base)
    set_ticks(axes, {place: label for label, place in places.items()}, ticks, measure.write)
    for system, line in lines.items():
        mark = marks[system]
        points = sorted((places[memory], value["median"]) for memory, value in line)
        axes.plot(*zip(*points, strict=True), **mark.line)
        for memory, value in line:
            place, said = places[memory], f"{system}, {memory}: {measure.write(value['median'])}"
            if value["q1"] < value["q3"]:
                axes.plot([place] * 2, [value["q1"], value["q3"]], color=mark.colour, linewidth=4, alpha=0.35)
                said += f" (quartiles {format_range(measure.write, value['q1'], value['q3'])})"
            axes.plot([place], [value["median"]], **mark.point, **picture.tip(said))
    return picture.svg(name, f"{name} against the memory for experts, a line for each of {', '.join(lines)}")


def latencies(where: str, memory: str, rows: Sequence[dict[str, Any]], marks: Mapping[str, Mark]) -> str | None:
    """A plot of the share of requests that took at most so long under one budget, with a line for each system."""
    lines = {
        row["system"]: row[where]["latencies_s"]
        for row in rows
        if row["memory"] == memory and row[where] is not None and row[where]["latencies_s"]
    }
    if not lines:
        return None
    name = f"request latency, {memory}, {PLACES[where]}"
    picture, axes = _panel(name, "seconds from a request's begin to its last token")
    ticks = round_ticks(max(values[-1] for values in lines.values()))
    axes.set_xlim(0, ticks[-1])
    set_ticks(axes, {tick: f"{tick:g}" for tick in ticks}, _SHARES, format_share)
    for system, values in lines.items():
        middle = format_seconds(values[(len(values) - 1) // 2])
        said = f"{system}, {memory}: half within {middle}, all within {format_seconds(values[-1])}"
        draw_shares(axes, values, marks[system], **picture.tip(said))
        axes.plot([values[-1]], [1.0], clip_on=False, **marks[system].point)
    return picture.svg(
        name, f"share of requests that were answered within a time, a line for each of {', '.join(lines)}"
    )


def _panel(name: str, x_label: str) -> tuple[Picture, Any]:
    picture = Picture(*_SIZE)
    axes = picture.axes(**_FRAME)
    picture.figure.text(0, 1 - 13 / _SIZE[1], name, fontsize=12.5, fontweight="bold", color=COLOUR["ink"])
    axes.set_xlabel(x_label)
    return picture, axes


def token_in_time(timeline: Mapping[str, Any], length_ns: int) -> str:
    """One decoded token's timeline under one system: computing, loads, waiting. `timeline` is TokenTimeline's;
    `length_ns` is the length of the axis, the same for all systems so that they can be compared.
    """
    bars = token_bars(timeline)
    frame = _TOKEN_FRAME
    picture = Picture(_TOKEN_WIDTH, frame["top"] + _token_height(bars) + frame["bottom"])
    _draw_token(picture, picture.axes(**frame), timeline, bars, length_ns)
    num_loads = sum(bar["kind"] in ("demand", "ahead") for bar in bars)
    name = f"{timeline['system']}, {timeline['memory']}: one token, {format_seconds(timeline['length_ns'] / 1e9)}"
    return picture.svg(name, f"computing and {num_loads} loads over time", "wide")


def tokens_in_time(timelines: Mapping[str, Mapping[str, Any]]) -> Picture:
    """Several of them, each beneath its name, on one axis; beneath all, what the colours mean."""
    from matplotlib.patches import Patch

    of_each = {name: token_bars(timeline) for name, timeline in timelines.items()}
    length_ns = max(timeline["length_ns"] for timeline in timelines.values())
    frame, title, legend = _TOKEN_FRAME, 22.0, 40.0
    above = {name: frame["top"] + title + _token_height(bars) + frame["bottom"] for name, bars in of_each.items()}
    picture = Picture(_TOKEN_WIDTH, sum(above.values()) + legend)
    top = 0.0
    for name, bars in of_each.items():
        rest = picture.height - top - above[name]
        axes = picture.axes(frame["left"], frame["right"], top + frame["top"] + title, rest + frame["bottom"])
        axes.set_title(f"{name}: {format_seconds(timelines[name]['length_ns'] / 1e9)}", loc="left")
        _draw_token(picture, axes, timelines[name], bars, length_ns)
        top += above[name]
    kinds = {bar["kind"] for bars in of_each.values() for bar in bars}
    patches = [Patch(color=COLOUR[colour], label=said) for kind, (colour, said) in KINDS.items() if kind in kinds]
    picture.figure.legend(handles=patches, loc="lower center", ncols=4)
    return picture


def _lanes(bars: Sequence[Mapping[str, Any]]) -> list[str]:
    return [lane for lane in _LANES if any(bar["lane"] == lane for bar in bars)]


def _token_height(bars: Sequence[Mapping[str, Any]]) -> float:
    """In points."""
    return len(_lanes(bars)) * (_LANE + _GAP)


def _draw_token(
    picture: Picture, axes: Any, timeline: Mapping[str, Any], bars: Sequence[Mapping[str, Any]], length_ns: int
) -> None:
    lanes = _lanes(bars)
    axes.set_xlim(0, length_ns)
    axes.set_ylim(_token_height(bars), 0)  # downwards
    for lane in lanes:
        for bar in bars:
            if bar["lane"] == lane:
                _draw_bar(picture, axes, bar, lanes.index(lane) * (_LANE + _GAP), timeline["length_ns"])
    axes.axvline(timeline["length_ns"], color=COLOUR["soft"], linewidth=1)
    ticks = [tick for tick in round_ticks(length_ns / 1e6, 8) if tick * 1e6 <= length_ns]
    axes.set_xticks([tick * 1e6 for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set_yticks([index * (_LANE + _GAP) + _LANE / 2 for index in range(len(lanes))], [_LANES[one] for one in lanes])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("ms since the token before")


def _draw_bar(picture: Picture, axes: Any, bar: Mapping[str, Any], y: float, length_ns: int) -> None:
    from matplotlib.patches import Rectangle

    begin, end = max(0, bar["begin_ns"]), min(length_ns, bar["end_ns"])
    a_point = (axes.get_xlim()[1]) / (_TOKEN_WIDTH - _TOKEN_FRAME["left"] - _TOKEN_FRAME["right"])  # in ns
    is_load = bar["kind"] in ("demand", "ahead")
    tip = picture.tip(f"{bar['said']}: {bar['begin_ns'] / 1e6:.3f} to {bar['end_ns'] / 1e6:.3f} ms")
    width = max(_LEAST_WIDTH * a_point, end - begin)
    is_apart = is_load and width > 3 * a_point  # a line between neighbours would hide thin ones
    edge = {"edgecolor": COLOUR["paper"], "linewidth": 0.5} if is_apart else {"linewidth": 0}
    axes.add_artist(Rectangle((begin, y), width, _LANE, facecolor=COLOUR[KINDS[bar["kind"]][0]], **edge, **tip))
    text = f"{bar['layer']}.{bar['expert']}" if is_load else ""
    if text and end - begin > 6 * len(text) * a_point:
        middle = (begin + end) / 2
        axes.text(middle, y + _LANE / 2, text, ha="center", va="center", fontsize=10, color=COLOUR["paper"])


def token_bars(timeline: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A timeline's events as bars, each of one of KINDS. A load is "demand" if its layer's router had run when it
    began, else "ahead"; a gap of the device during which something loads for it is "wait".
    """
    events = timeline["events"]
    spoke: dict[int, int] = {}
    done: dict[int, int] = {}
    device = [event for event in events if event["lane"] == "device"]
    bars, now = [], 0
    for event in device:
        if event["kind"] in ("dense", "expert"):
            (spoke if event["kind"] == "dense" else done)[event["layer"]] = event["end_ns"]
        if event["begin_ns"] - now > _LEAST_WAIT_NS:
            wait = {"lane": "device", "kind": "wait", "said": "waiting for loads"}
            bars.append(wait | {"begin_ns": now, "end_ns": event["begin_ns"]})
        now = max(now, event["end_ns"])
    for event in events:
        kind, layer = event["kind"], event["layer"]
        if kind == "load":
            is_needed = spoke.get(layer, event["end_ns"]) <= event["begin_ns"] <= done.get(layer, event["begin_ns"])
            kind = "demand" if is_needed else "ahead"
        elif event["lane"] == "predictor":
            kind = "predict"
        elif kind == "head":
            kind = "dense"
        elif kind not in KINDS:
            kind = "control"
        bars.append({**event, "kind": kind, "said": _said(event)})
    return bars


def _said(event: Mapping[str, Any]) -> str:
    layer = "" if event["layer"] < 0 else f", layer {event['layer']}"
    if event["kind"] == "load":
        first, last = event["segment"], event["segment"] + event["num_segments"] - 1
        parts = f"segment {first}" if first == last else f"segments {first} to {last}"
        return f"load layer {event['layer']}, expert {event['expert']}, {parts}"
    if event["kind"] == "expert":
        return f"expert {event['expert']}{layer}"
    said = {"dense": "attention and router", "ask": "asking for loads", "take": "taking what came"}
    return f"{said.get(event['kind'], event['kind'])}{layer}"


# -- the page --------------------------------------------------------------------------------------------------------


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
    """The HTML. `results` are those of Comparison.results, as JSON has them."""
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
    """For each budget, a table with a row for each system and the engine's and simulator's figures side by side."""
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
    """A table of the figures that engine or simulator have. `fidelity` is simulated relative to measured TPOT. The row
    of system `best` is marked.
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
    """Rows of systems that prefetched anything."""
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
