"""`expertly lab trace info`: what a trace holds, and how predictable, skewed and repetitive its routing is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.output import message, print_json, progress_bar, table
from expertly.cli.trace_summary import fields_table, headline, trace_facts
from expertly.core.units import format_share
from expertly.options import REQUIRED, argument, json_flag, option

if TYPE_CHECKING:
    from expertly.lab.trace_analysis import RoutingStatistics, TraceAnalysis
    from expertly.trace.reader import Trace


@dataclass(frozen=True, kw_only=True)
class TraceInfoOptions:
    trace: Path = argument(REQUIRED, "the trace", metavar="DIR", type=Path)
    plot: Path | None = option(None, "draw popularity, entropy and reuse (.png, .svg, .pdf)", metavar="FILE", type=Path)
    json: bool = json_flag()


def run(args: TraceInfoOptions) -> int:
    from expertly.lab.plots import check_plot
    from expertly.lab.trace_analysis import analyse
    from expertly.trace.reader import Trace

    if args.plot is not None:
        check_plot(args.plot)
    trace = Trace.open(args.trace)
    with progress_bar("tokens") as progress:
        analysis = analyse(trace, None if progress is None else lambda done, total: progress("reading", done, total))
    if args.plot is not None:
        from expertly.lab.drawings import plot_trace

        plot_trace(trace, analysis, args.plot)
    if args.json:
        print_json({**trace_facts(trace), **_facts(analysis), "plot": None if args.plot is None else str(args.plot)})
        return 0
    print(_report(trace, analysis))
    if args.plot is not None:
        message(f"plot written to {args.plot}")
    return 0


def _facts(analysis: TraceAnalysis) -> dict[str, Any]:
    return {
        "prefill_tokens": analysis.num_prefill_rows,
        "decode_tokens": analysis.num_decode_rows,
        "prefill_iterations": analysis.num_prefill_iterations,
        "entropy_of": "probs" if analysis.is_full else "weights",
        "mean": asdict(analysis.mean),
        "layers": [asdict(layer) for layer in analysis.layers],
    }


def _report(trace: Trace, analysis: TraceAnalysis) -> str:
    manifest = trace.manifest
    made = " ".join(part for part in (manifest.created, manifest.command) if part)
    phases = (
        f"{analysis.num_prefill_rows} tokens of prefill in {analysis.num_prefill_iterations} iterations, "
        f"{analysis.num_decode_rows} of decode"
    )
    of = "all experts' probabilities" if analysis.is_full else "the chosen experts' weights"
    return "\n".join(
        [
            headline(trace),
            *[f"made {made}"] * bool(made),
            phases,
            "",
            fields_table(trace),
            "",
            f"entropy in bits, of {of}: of a token's routing, of a request's; share of demands that the most popular",
            "experts serve; share of demands whose expert was needed at most so many tokens before:",
            _layer_table(analysis),
            "",
            "entropy of a request's first tokens, mean over layers and requests that are that long:",
            _growth_table(analysis.mean),
        ]
    )


def _layer_table(analysis: TraceAnalysis) -> str:
    mean = analysis.mean
    headers = (
        "layer",
        "token",
        "request",
        "most",
        *(f"top {percent}%" for percent in mean.top_shares),
        "top expert",
        *(f"reuse <= {distance}" for distance in _SHOWN),
        "median",
        "p99",
    )
    named = [(str(index), layer) for index, layer in enumerate(analysis.layers)]
    return table(headers, [_layer_row(name, layer) for name, layer in (*named, ("mean", mean))])


_SHOWN = (1, 4, 16, 64)
"""Reuse distances that the table shows; --json has more."""


def _layer_row(name: str, layer: RoutingStatistics) -> tuple[str, ...]:
    expert = "" if layer.most_popular_expert is None else f"{layer.most_popular_expert}: "
    return (
        name,
        _number(layer.token_entropy_bits, 2),
        _number(layer.request_entropy_bits, 2),
        _number(layer.max_entropy_bits, 2),
        *(format_share(share) for share in layer.top_shares.values()),
        expert + format_share(layer.most_popular_share),
        *(format_share(layer.reuse_within[distance]) for distance in _SHOWN),
        _number(layer.reuse_percentiles[50], 0 if name != "mean" else 1),
        _number(layer.reuse_percentiles[99], 0 if name != "mean" else 1),
    )


def _growth_table(mean: RoutingStatistics) -> str:
    growth = mean.entropy_growth_bits
    return table(("tokens", *map(str, growth)), [("bits", *(_number(bits, 2) for bits in growth.values()))])


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
