"""`expertly lab trace`: traces that somebody else recorded, traces that are made up, what a trace holds, and decisions
taken again. `trace_record.py` records them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import exponent, seed, share
from expertly.cli.output import Column, figures_table, in_brackets, message, origin, progress_bar, show, table
from expertly.core.errors import ConfigError, TraceError
from expertly.core.units import format_nbytes, format_share
from expertly.options import REQUIRED, argument, json_flag, option
from expertly.trace.reader import Trace

if TYPE_CHECKING:
    from expertly.lab.synth import SynthWorkload
    from expertly.lab.trace_analysis import TraceAnalysis


# -- import ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TraceImportOptions:
    file: Path = argument(REQUIRED, "the recorded routing", metavar="FILE", type=Path)
    out: Path = argument(REQUIRED, "where the trace goes: a new or an empty folder", metavar="OUT", type=Path)
    format: str = option("npz", "of FILE", metavar="NAME")
    geometry: str | None = option(None, "what the model's experts look like: a name or a TOML file", metavar="NAME")
    num_experts: int | None = option(None, "a layer", least=1)
    model: str | None = option(None, "what to call the model", metavar="NAME")
    json: bool = json_flag()


def import_routing(args: TraceImportOptions) -> int:
    """A trace of routing that somebody else recorded."""
    from expertly.sim.hardware import read_geometry
    from expertly.trace.importers import find_importer
    from expertly.trace.importers.base import ImportOptions
    from expertly.trace.schema import TraceLayer

    importer = find_importer(args.format)
    geometry = None if args.geometry is None else read_geometry(args.geometry)
    options = ImportOptions(
        model=args.model or (geometry.name if geometry is not None else args.file.stem),
        layers=None if geometry is None else tuple(TraceLayer.of(layer) for layer in geometry.layers),
        dense=None if geometry is None else geometry.dense,
        num_experts=args.num_experts,
        **origin(),
    )
    importer(args.file, args.out, options)
    _show_written(args.out, args.json)
    return 0


def _show_written(folder: Path, is_json: bool, more: dict[str, Any] | None = None) -> None:
    facts = trace_facts(Trace.open(folder))
    show({**facts, **(more or {})}, is_json, lambda: _headline(facts))


# -- synth -------------------------------------------------------------------------------------------------------------

WORKLOADS = ("zipf", "cyclic", "stationary")

_OF_WORKLOAD = {"zipf": "zipf", "markov": "zipf", "phases": "zipf", "working_set": "stationary"}


@dataclass(frozen=True, kw_only=True)
class TraceSynthOptions:
    out: Path = argument(REQUIRED, "where the trace goes: a new or an empty folder", metavar="OUT", type=Path)
    workload: str = option(
        "zipf",
        "zipf; cyclic: a loop over all experts; stationary: random among a few; of the last two --json prints what "
        "Belady's replacement hits",
        metavar="NAME",
        choices=WORKLOADS,
    )
    layers: int = option(16, "of the model", least=1)
    experts: int = option(64, "a layer", least=1)
    top_k: int = option(4, "experts a token", least=1)
    tokens: int = option(10000, "of all requests", least=1)
    requests: int = option(1, "that share the tokens evenly", least=1)
    prefill_tokens: int = option(0, "first tokens of a request, as one iteration")
    zipf: Any | None = option(None, "popularity of rank r: r^-A (zipf; default: 1)", metavar="A", type=exponent)
    markov: Any | None = option(
        None, "chance that an expert is kept for the next token (zipf; default: 0)", metavar="P", type=share
    )
    phases: int | None = option(None, "between which popularity is dealt anew (zipf; default: 1)", least=1)
    working_set: int | None = option(None, "experts in use (stationary; default: 2 K)", least=1)
    lookahead: Any | None = option(
        None, "add scores of the next layer, modelled: so many of its K best are needed", metavar="P", type=share
    )
    seed: Any = option(0, "of what is drawn", metavar="N", type=seed)
    json: bool = json_flag()


def synth(args: TraceSynthOptions) -> int:
    """A trace of made-up routing, the same for the same flags."""
    from expertly.lab.synth import write_workload

    workload = _workload(args)
    write_workload(
        args.out,
        workload,
        model=f"synthetic {args.workload}",
        num_requests=args.requests,
        prefill_tokens=args.prefill_tokens,
        lookahead=args.lookahead,
        seed=args.seed,
        **origin(),
    )
    known = {} if args.prefill_tokens else _optimal_hits(workload)
    _show_written(args.out, args.json, {"workload": args.workload, "optimal_hits": known or None})
    return 0


def _workload(args: TraceSynthOptions) -> SynthWorkload:
    from expertly.lab import synth

    for flag, workload in _OF_WORKLOAD.items():
        if getattr(args, flag) is not None and args.workload != workload:
            raise ConfigError(f"--{flag.replace('_', '-')} has no effect on --workload {args.workload}")
    sizes = (args.layers, args.experts, args.top_k, args.tokens)
    if args.workload == "cyclic":
        return synth.cyclic(*sizes)
    if args.workload == "stationary":
        working_set = min(2 * args.top_k, args.experts) if args.working_set is None else args.working_set
        return synth.stationary_set(*sizes, working_set=working_set, seed=args.seed)
    return synth.zipf(
        *sizes,
        exponent=1.0 if args.zipf is None else args.zipf,
        keep=args.markov or 0.0,
        num_phases=args.phases or 1,
        seed=args.seed,
    )


def _optimal_hits(workload: SynthWorkload) -> dict[str, int]:
    """By capacity in experts a layer, where it is known. Holds where each token is an iteration by itself."""
    hits = {capacity: workload.optimal_hits(capacity) for capacity in range(1, workload.num_experts + 1)}
    return {str(capacity): number for capacity, number in hits.items() if number is not None}


# -- info --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TraceInfoOptions:
    trace: Path = argument(REQUIRED, "the trace", metavar="DIR", type=Path)
    plot: Path | None = option(None, "draw popularity, entropy and reuse (.png, .svg, .pdf)", metavar="FILE", type=Path)
    json: bool = json_flag()


def info(args: TraceInfoOptions) -> int:
    """What a trace holds, and how predictable, skewed and repetitive its routing is."""
    from expertly.lab.plots import check_plot
    from expertly.lab.trace_analysis import analyse

    if args.plot is not None:
        check_plot(args.plot)
    trace = Trace.open(args.trace)
    with progress_bar("tokens") as progress:
        analysis = analyse(trace, None if progress is None else lambda done, total: progress("reading", done, total))
    if args.plot is not None:
        from expertly.lab.drawings import plot_trace

        plot_trace(trace, analysis, args.plot)
    facts = {**trace_facts(trace), **_analysed(analysis), "plot": None if args.plot is None else str(args.plot)}
    show(facts, args.json, lambda: _report(facts))
    if args.plot is not None and not args.json:
        message(f"plot written to {args.plot}")
    return 0


def trace_facts(trace: Trace) -> dict[str, Any]:
    """What the manifest and the requests say."""
    manifest = trace.manifest
    geometries = [layer.geometry() for layer in manifest.layers]
    categories = Counter(request.category for request in trace.requests if request.category is not None)
    return {
        "trace": str(trace.folder),
        "model": manifest.model,
        "created": manifest.created,
        "command": manifest.command,
        "complete": trace.is_complete,
        "scoring": manifest.scoring,
        "num_layers": len(manifest.layers),
        "num_experts": [layer.num_experts for layer in manifest.layers],
        "top_k": [layer.top_k for layer in manifest.layers],
        "expert_bytes": [None if one is None else one.expert_nbytes for one in geometries],
        "requests": len(trace.requests),
        "categories": dict(sorted(categories.items())),
        "rows": trace.num_rows,
        "iterations": trace.num_iterations,
        "bytes": sum(path.stat().st_size for path in trace.folder.iterdir() if path.is_file()),
        "fields": {
            name: {
                "dtype": field.dtype,
                "shape": list(field.shape),
                "real": field.is_real,
                "stored": field.is_stored,
                "note": field.note,
            }
            for name, field in manifest.fields.items()
        },
    }


def _analysed(analysis: TraceAnalysis) -> dict[str, Any]:
    return {
        "prefill_tokens": analysis.num_prefill_rows,
        "decode_tokens": analysis.num_decode_rows,
        "prefill_iterations": analysis.num_prefill_iterations,
        "entropy_of": "probs" if analysis.is_full else "weights",
        "mean": asdict(analysis.mean),
        "layers": [asdict(layer) for layer in analysis.layers],
    }


def _headline(facts: dict[str, Any]) -> str:
    return in_brackets(
        facts["model"],
        f"{facts['num_layers']} layers of {_span(facts['num_experts'])} experts, top-{_span(facts['top_k'])}",
        f"{facts['requests']} requests",
        f"{facts['iterations']} iterations",
        f"{facts['rows']} tokens",
        format_nbytes(facts["bytes"]),
        "complete" if facts["complete"] else "partial: the recording did not end",
        facts["trace"],
    )


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _report(facts: dict[str, Any]) -> str:
    made = " ".join(part for part in (facts["created"], facts["command"]) if part)
    of = "all experts' probabilities" if facts["entropy_of"] == "probs" else "the chosen experts' weights"
    layers = [{**layer, "layer": index} for index, layer in enumerate(facts["layers"])]
    growth = facts["mean"]["entropy_growth_bits"]
    lines = [
        _headline(facts),
        *[f"made {made}"] * bool(made),
        f"{facts['prefill_tokens']} tokens of prefill in {facts['prefill_iterations']} iterations, "
        f"{facts['decode_tokens']} of decode",
        "",
        _fields_table(facts["fields"]),
        "",
        f"entropy in bits, of {of}: of a token's routing, of a request's; share of demands that the most popular",
        "experts serve; share of demands whose expert was needed at most so many tokens before:",
        _layers_table([*layers, {**facts["mean"], "layer": "mean"}]),
        "",
        "entropy of a request's first tokens, mean over layers and requests that are that long:",
        table(("tokens", *map(str, growth)), [("bits", *map("{:.2f}".format, growth.values()))]),
    ]
    return "\n".join(lines)


def _fields_table(fields: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, field in fields.items():
        shape = " x ".join(map(str, field["shape"])) or "-"
        rows.append((name, field["dtype"], shape, "yes" if field["real"] else "no", field["note"]))
    return table(("field", "dtype", "a row", "real", "note"), rows, folded="note")


_REUSE_SHOWN = (1, 4, 16, 64)
"""Reuse distances that the table shows; --json has more."""


def _layers_table(layers: Sequence[dict[str, Any]]) -> str:
    bits, tops = "{:.2f}".format, layers[-1]["top_shares"]
    columns: dict[str, Column] = {
        "layer": ("layer", str),
        "token": ("token_entropy_bits", bits),
        "request": ("request_entropy_bits", bits),
        "most": ("max_entropy_bits", bits),
        **{f"top {percent}%": (f"top {percent}", format_share) for percent in tops},
        "top expert": ("top expert", str),
        **{f"reuse <= {distance}": (f"reuse {distance}", format_share) for distance in _REUSE_SHOWN},
        "median": ("p50", _distance),
        "p99": ("p99", _distance),
    }
    return figures_table([layer | _spread(layer) for layer in layers], columns)


def _distance(tokens: float) -> str:
    return f"{tokens:.1f}".removesuffix(".0")


def _spread(layer: dict[str, Any]) -> dict[str, Any]:
    """What the table shows of its inner dictionaries."""
    expert = "" if layer["most_popular_expert"] is None else f"{layer['most_popular_expert']}: "
    return {
        **{f"top {percent}": share for percent, share in layer["top_shares"].items()},
        "top expert": expert + format_share(layer["most_popular_share"]),
        **{f"reuse {distance}": layer["reuse_within"][distance] for distance in _REUSE_SHOWN},
        **{f"p{percent}": value for percent, value in layer["reuse_percentiles"].items()},
    }


# -- replay ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TraceReplayOptions:
    file: Path = argument(
        REQUIRED, "written by `expertly lab trace record --decisions FILE`", metavar="FILE", type=Path
    )
    allow_imports: bool = option(
        False, "import the modules that the file names parts of its system by (MODULE.NAME), which runs their code"
    )
    json: bool = json_flag()


def replay(args: TraceReplayOptions) -> int:
    """Feed an engine's recorded observations to a new control plane, compare its decisions.

    Exit code 2 where a decision comes out otherwise.
    """
    from expertly.scheduler.decisions import replay_file

    header, replayed = replay_file(args.file, may_import=args.allow_imports)
    if replayed.difference is not None:
        line, recorded, now = replayed.difference
        raise TraceError(f"{args.file}, line {line}: recorded {recorded:.200}, replayed {now:.200}")
    result = {
        "path": str(args.file),
        "system": header["system"],
        "segments": header["segments"],
        "iterations": replayed.num_layers // len(header["layers"]),
        "layers": replayed.num_layers,
        "calls": replayed.num_calls,
        "bytes": replayed.nbytes,
        "identical": True,
    }
    counts = ", ".join(f"{result[name]} {name}" for name in ("iterations", "layers", "calls"))
    said = f"system {result['system']}, P = {result['segments']}: {counts}: all decisions identical"
    show(result, args.json, lambda: said)
    return 0
