"""The plot of `expertly lab trace info`."""

from __future__ import annotations

from typing import Any

import numpy as np

from expertly.cli.figures import new_figure
from expertly.lab.trace_analysis import TraceAnalysis
from expertly.trace.reader import Trace


def draw(trace: Trace, analysis: TraceAnalysis) -> Any:
    """A figure of four panels: popularity, entropy by layer, entropy by length, reuse distances."""
    figure = new_figure(13, 9)
    (popularity, layers), (growth, reuse) = figure.subplots(2, 2)
    state = "" if trace.is_complete else ", partial"
    figure.suptitle(f"{trace.manifest.model}: {len(trace.requests)} requests, {trace.num_rows:,} tokens{state}")
    _draw_popularity(figure, popularity, analysis)
    _draw_layers(layers, analysis)
    _draw_growth(growth, analysis)
    _draw_reuse(reuse, analysis)
    return figure


def _draw_popularity(figure: Any, axes: Any, analysis: TraceAnalysis) -> None:
    ranked = np.sort(analysis.demands, axis=1)[:, ::-1]
    total = ranked.sum(1, keepdims=True)
    shares = 100 * np.divide(ranked, total, out=np.zeros(ranked.shape), where=total > 0)
    image = axes.imshow(shares, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0)
    figure.colorbar(image, ax=axes, label="share of the layer's demands (%)")
    axes.set(title="Popularity of experts", xlabel="expert, by rank in its layer (0: most popular)", ylabel="layer")
    _whole_numbers(axes.yaxis)


def _draw_layers(axes: Any, analysis: TraceAnalysis) -> None:
    layers = np.arange(len(analysis.layers))
    for name, style, values in (
        ("most there can be", ":", [layer.max_entropy_bits for layer in analysis.layers]),
        ("of a request (sum over its tokens)", "-", [layer.request_entropy_bits for layer in analysis.layers]),
        ("of one token", "--", [layer.token_entropy_bits for layer in analysis.layers]),
    ):
        known = [np.nan if value is None else value for value in values]
        axes.plot(layers, known, style, marker="." if style != ":" else None, label=name)
    of = "router probabilities" if analysis.is_full else "chosen experts' weights"
    axes.set(title=f"Entropy of the {of}", xlabel="layer", ylabel="entropy (bits, mean)")
    axes.set_ylim(bottom=0)
    _whole_numbers(axes.xaxis)
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_growth(axes: Any, analysis: TraceAnalysis) -> None:
    growth = analysis.mean.entropy_growth_bits
    each = [list(layer.entropy_growth_bits.items()) for layer in analysis.layers]
    for index, points in enumerate(each):
        label = "one layer" if index == 0 else None
        axes.plot(
            *zip(*points, strict=True), color="tab:blue", alpha=0.25, linewidth=1, label=label
        ) if points else None
    axes.plot(list(growth), list(growth.values()), color="tab:orange", marker="o", label="mean over layers")
    axes.axhline(analysis.mean.max_entropy_bits, color="gray", linestyle=":", label="most there can be")
    axes.set_xscale("log", base=2)
    axes.set(
        title="Entropy of a request's first tokens",
        xlabel="tokens of the request added up",
        ylabel="entropy (bits, mean over requests)",
    )
    axes.set_ylim(bottom=0)
    _plain_powers(axes, max(growth, default=1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _draw_reuse(axes: Any, analysis: TraceAnalysis) -> None:
    total = (analysis.reuse_counts.sum(1) + analysis.num_first)[:, None]
    counts = np.cumsum(analysis.reuse_counts, axis=1)
    within = 100 * np.divide(counts, total, out=np.zeros(counts.shape), where=total > 0)
    all_layers = 100 * counts.sum(0) / max(int(total.sum()), 1)
    last = min(int(np.searchsorted(all_layers, 0.999 * all_layers[-1])) + 2, len(all_layers))  # a few come back late
    edges = analysis.reuse_edges[:last]
    for index, layer in enumerate(within):
        label = "one layer" if index == 0 else None
        axes.plot(edges, layer[:last], color="tab:blue", alpha=0.25, linewidth=1, label=label)
    axes.plot(edges, all_layers[:last], color="tab:orange", label="all layers")
    axes.set_xscale("log", base=2)
    axes.set(
        title="Reuse of experts",
        xlabel="reuse distance: tokens since the expert was last needed in its layer",
        ylabel="share of demands within it (%)",
        ylim=(0, 101),
    )
    _plain_powers(axes, int(edges[-1]))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _whole_numbers(axis: Any) -> None:
    axis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def _plain_powers(axes: Any, largest: int) -> None:
    """Ticks at powers of two, written as numbers, no more than a dozen."""
    powers = range(max(largest.bit_length(), 1))
    ticks = [1 << power for power in powers][:: -(-len(powers) // 12)]
    axes.set_xticks(ticks, [f"{tick:,}" if tick < 1 << 16 else f"$2^{{{tick.bit_length() - 1}}}$" for tick in ticks])
    axes.minorticks_off()
