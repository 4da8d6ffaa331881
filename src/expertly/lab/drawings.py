"""The pictures of `simulate --plot` and `trace info --plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from expertly.lab.plots import COLOUR, Mark, draw_shares, drawing, marks_of, memory_places, new_figure, save
from expertly.scheduler.presets import BOUNDS

if TYPE_CHECKING:
    from expertly.lab.trace_analysis import TraceAnalysis
    from expertly.trace.reader import Trace

Row = dict[str, Any]

_DOTTED = (0, (2, 3))
_FLOOR = "floor: computing, belady's bytes"
_LEGEND_WIDTH = 130
"""Letters that fit a line of the legend, about; names of systems with changed parts are long."""
_PANELS = (
    ("hit_rate", "hit rate in decode (%)", 100.0),
    ("tpot_s", "time per output token (ms)", 1000.0),
    ("ttft_s", "time to first token (s)", 1.0),
    ("stall_share", "time stalled (%)", 100.0),
)


def plot_simulation(facts: Row, results: Sequence[Row], path: Path) -> None:
    """Each system's figures, beside the best possible: over several budgets a line for each system, for one budget a
    bar. Panels without any figure are left out.
    """
    cuts = sorted({row["segments"] for row in results})
    results = [
        row | {"label": f"{row['system']}, P = {row['segments']}" if len(cuts) > 1 else row["system"]}
        for row in results
    ]
    panels = [panel for panel in _PANELS if any(row[panel[0]] is not None for row in results)]
    has_latency = any(row["latency_s"] for row in results)
    num_panels = max(1, len(panels) + has_latency)
    num_columns = num_panels if num_panels <= 4 else 3
    num_rows = -(-num_panels // num_columns)
    memories = list(dict.fromkeys(row["memory"] for row in results))
    of_bound = {row["label"]: row["system"] in BOUNDS for row in results}
    marks = marks_of(
        [label for label, is_bound in of_bound.items() if not is_bound],
        [label for label, is_bound in of_bound.items() if is_bound],
    )
    with drawing():
        figure = new_figure(max(7.0, 4.4 * num_columns), 4.0 * num_rows + 1.1)
        axes = [axis for line in figure.subplots(num_rows, num_columns, squeeze=False) for axis in line]
        for axis, (key, title, scale) in zip(axes, panels, strict=False):
            draw = _draw_lines if len(memories) > 1 else _draw_bars
            draw(axis, [row for row in results if row[key] is not None], marks, key, scale)
            axis.set_title(title)
        if has_latency:
            axis = axes[len(panels)]
            for row in results:
                if row["memory"] == memories[-1] and row["latency_s"]:
                    draw_shares(axis, row["latency_s"]["sorted"], marks[row["label"]], label=row["label"])
            axis.set(title=f"share of requests done within a time, {memories[-1]}", ylim=(0, 1.01))
            axis.set_xlabel("seconds from arrival to last token")
            axis.set_xlim(left=0)
            axis.grid()
        for axis in axes[num_panels:]:
            axis.set_visible(False)
        handles = {label: one for axis in axes for one, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        if handles:
            num_columns = min(6, len(handles), max(1, _LEGEND_WIDTH // max(map(len, handles))))
            figure.legend(
                handles.values(), handles.keys(), loc="outside lower center", ncols=num_columns, handlelength=3.5
            )
        trace = facts["trace"]
        where = "" if trace["expert_bytes"] is None else f" on {facts['hardware']['name']}"
        budget = f", memory {memories[0]}" if len(memories) == 1 else ""
        figure.suptitle(f"{trace['model']}{where}, P = {', '.join(map(str, cuts))}{budget} (simulated)")
        save(figure, path)


def _draw_lines(axis: Any, known: Sequence[Row], marks: dict[str, Mark], key: str, scale: float) -> None:
    places = memory_places(list(dict.fromkeys(row["memory"] for row in known)))
    for name, mark in marks.items():
        points = [(places[row["memory"]], scale * row[key]) for row in known if row["label"] == name]
        if points:
            style = mark.line | {"marker": mark.point["marker"], "markersize": 5}
            axis.plot(*zip(*points, strict=True), label=name, **style)
    if key == "tpot_s":
        floors = {row["memory"]: row["floor_tpot_s"] for row in known if row["system"] == "belady-global"}
        points = [(places[memory], scale * floor) for memory, floor in floors.items() if floor is not None]
        if points:
            axis.plot(*zip(*points, strict=True), label=_FLOOR, color=COLOUR["rule"], linewidth=7, zorder=1)
    axis.set_xticks(list(places.values()), list(places))
    axis.set_xlabel("memory for experts")
    axis.set_ylim(bottom=0)
    axis.margins(y=0.08)
    axis.grid()


def _draw_bars(axis: Any, known: Sequence[Row], marks: dict[str, Mark], key: str, scale: float) -> None:
    """One quantity of one budget: a bar for each system, with its value."""
    values = [scale * row[key] for row in known]
    found = [marks[row["label"]] for row in known]
    colours = [COLOUR["rule"] if mark.is_bound else mark.colour for mark in found]
    bars = axis.barh([mark.name for mark in found], values, color=colours)
    axis.bar_label(bars, [f"{value:.3g}" for value in values], padding=3)
    floor = next((row["floor_tpot_s"] for row in known if row["system"] == "belady-global"), None)
    if key == "tpot_s" and floor is not None:
        axis.axvline(scale * floor, color=COLOUR["soft"], linestyle="--", linewidth=1.5, label=_FLOOR)
    axis.invert_yaxis()
    axis.margins(x=0.25)
    axis.set_xlim(left=0)
    axis.grid(axis="x")


def plot_trace(trace: Trace, analysis: TraceAnalysis, path: Path) -> None:
    """Four panels: popularity, entropy by layer, entropy by length, reuse distances."""
    with drawing():
        figure = new_figure(13, 9)
        (popularity, layers), (growth, reuse) = figure.subplots(2, 2)
        state = "" if trace.is_complete else ", partial"
        figure.suptitle(f"{trace.manifest.model}: {len(trace.requests)} requests, {trace.num_rows:,} tokens{state}")
        _draw_popularity(figure, popularity, analysis)
        _draw_layers(layers, analysis)
        _draw_growth(growth, analysis)
        _draw_reuse(reuse, analysis)
        save(figure, path)


def _draw_popularity(figure: Any, axes: Any, analysis: TraceAnalysis) -> None:
    ranked = np.sort(analysis.reuse.num_demands, axis=1)[:, ::-1]
    total = ranked.sum(1, keepdims=True)
    shares = 100 * np.divide(ranked, total, out=np.zeros(ranked.shape), where=total > 0)
    image = axes.imshow(shares, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0)
    figure.colorbar(image, ax=axes, label="share of the layer's demands (%)")
    axes.set(title="Popularity of experts", xlabel="expert, by rank in its layer (0: most popular)", ylabel="layer")
    _whole_numbers(axes.yaxis)


def _draw_layers(axes: Any, analysis: TraceAnalysis) -> None:
    layers = np.arange(len(analysis.layers))
    for name, colour, style, values in (
        ("most there can be", "soft", _DOTTED, [layer.max_entropy_bits for layer in analysis.layers]),
        ("of a request (sum over its tokens)", "s0", "-", [layer.request_entropy_bits for layer in analysis.layers]),
        ("of one token", "s1", "--", [layer.token_entropy_bits for layer in analysis.layers]),
    ):
        known = [np.nan if value is None else value for value in values]
        axes.plot(
            layers, known, linestyle=style, color=COLOUR[colour], marker=None if style == _DOTTED else ".", label=name
        )
    of = "router probabilities" if analysis.is_full else "chosen experts' weights"
    axes.set(title=f"Entropy of the {of}", xlabel="layer", ylabel="entropy (bits, mean)")
    axes.set_ylim(bottom=0)
    _whole_numbers(axes.xaxis)
    axes.grid()
    axes.legend()


def _draw_growth(axes: Any, analysis: TraceAnalysis) -> None:
    growth = analysis.mean.entropy_growth_bits
    for index, layer in enumerate(analysis.layers):
        points = list(layer.entropy_growth_bits.items())
        if points:
            _draw_layer(axes, [x for x, _ in points], [y for _, y in points], index)
    axes.plot(list(growth), list(growth.values()), color=COLOUR["s1"], marker="o", label="mean over layers")
    axes.axhline(analysis.mean.max_entropy_bits, color=COLOUR["soft"], linestyle=_DOTTED, label="most there can be")
    axes.set_title("Entropy of a request's first tokens")
    axes.set(xlabel="tokens of the request added up", ylabel="entropy (bits, mean over requests)")
    axes.set_ylim(bottom=0)
    _by_powers(axes, max(growth, default=1))


def _draw_reuse(axes: Any, analysis: TraceAnalysis) -> None:
    total = (analysis.reuse.counts.sum(1) + analysis.reuse.num_first)[:, None]
    counts = np.cumsum(analysis.reuse.counts, axis=1)
    within = 100 * np.divide(counts, total, out=np.zeros(counts.shape), where=total > 0)
    all_layers = 100 * counts.sum(0) / max(int(total.sum()), 1)
    last = min(int(np.searchsorted(all_layers, 0.999 * all_layers[-1])) + 2, len(all_layers))  # a few come back late
    edges = analysis.reuse.edges[:last]
    for index, layer in enumerate(within):
        _draw_layer(axes, edges, layer[:last], index)
    axes.plot(edges, all_layers[:last], color=COLOUR["s1"], label="all layers")
    axes.set(title="Reuse of experts", ylim=(0, 101), ylabel="share of demands within it (%)")
    axes.set_xlabel("reuse distance: tokens since the expert was last needed in its layer")
    _by_powers(axes, int(edges[-1]))


def _draw_layer(axes: Any, x: Any, y: Any, index: int) -> None:
    axes.plot(x, y, color=COLOUR["s0"], alpha=0.25, linewidth=1, label="one layer" if index == 0 else None)


def _whole_numbers(axis: Any) -> None:
    axis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def _by_powers(axes: Any, largest: int) -> None:
    """Label the x axis with powers of two, a dozen at most."""
    axes.set_xscale("log", base=2)
    powers = range(max(largest.bit_length(), 1))
    ticks = [1 << power for power in powers][:: -(-len(powers) // 12)]
    axes.set_xticks(ticks, [f"{tick:,}" if tick < 1 << 16 else f"2^{tick.bit_length() - 1}" for tick in ticks])
    axes.minorticks_off()
    axes.grid()
    axes.legend(loc="lower right")
