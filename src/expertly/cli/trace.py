"""`expertly lab trace`: record, import, synthesise and describe routing traces; replay recorded decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.arguments import exponent, seed, share, temperature
from expertly.cli.inputs import load_model
from expertly.cli.output import (
    Column,
    figures_table,
    in_brackets,
    message,
    origin,
    progress_bar,
    reserved_stdout,
    show,
    table,
)
from expertly.core.errors import ConfigError, ExpertlyError, TraceError
from expertly.core.units import format_nbytes, format_number, format_seconds, format_share
from expertly.lab.prompts import PROMPTS_HELP, RAW_HELP, AskedPrompt, Prompt, asked, read_prompts
from expertly.options import (
    ADVANCED,
    MODEL_HELP,
    REQUIRED,
    RESEARCH,
    LoadOptions,
    argument,
    json_flag,
    load_option,
    option,
    path_option,
)
from expertly.trace.reader import Trace

if TYPE_CHECKING:
    from expertly.lab.recording import Recording
    from expertly.lab.trace_analysis import TraceAnalysis


# -- record ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TraceRecordOptions(LoadOptions):
    model: str | None = argument(None, MODEL_HELP, metavar="MODEL")
    prompts: str = option(REQUIRED, PROMPTS_HELP + ', each a request, run alone; "category" is kept', metavar="FILE")
    raw: bool = option(False, RAW_HELP)
    out: Path = path_option(REQUIRED, "where the trace goes: a new or an empty folder", "DIR")
    max_new_tokens: int = option(100, "length of an answer in tokens", least=1)
    temperature: float = option(0.0, "0 is greedy", metavar="X", type=temperature, panel=ADVANCED)
    seed: int = option(0, "of sampling", metavar="N", type=seed, panel=ADVANCED)
    requests: int | None = option(None, "only the first N prompts", least=1)
    full: bool = option(False, "add routing scores, lookahead, router inputs and embeddings")
    learned: str | Path | None = load_option(
        "learned",
        default="off",
        help="where the system keeps what it learns, as of `run`; off: the trace shows this run alone",
        panel=RESEARCH,
    )
    json: bool = json_flag()


def record(args: TraceRecordOptions) -> int:
    """Record what a model routes while it answers prompts, as a trace."""
    prompts = read_prompts(args.prompts, args.requests)
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise TraceError(f"{args.out}: not empty; a trace is written to a new or an empty folder")
    with reserved_stdout() as stdout:
        from expertly import api

        model, tokenizer = load_model(args.model, args)
        try:
            requests = _tokenised(prompts, model, tokenizer, args.raw)
            result = _recorded(model, requests, args)
            result["skipped"] = len(prompts) - len(requests)
        finally:
            api.unload(model)
        show(result, args.json, lambda: _summary(result), stdout)
    return 0


def _tokenised(prompts: Sequence[Prompt], model: Any, tokenizer: Any, is_raw: bool) -> list[AskedPrompt]:
    """The prompts that fit the model, as tokens. Names each of the others in a message."""
    from expertly.model.generation import max_positions

    found, left_out = asked(prompts, tokenizer, is_raw=is_raw, most=max_positions(model))
    for why in left_out:
        message(f"expertly: skipped: {why}")
    if not found:
        raise ConfigError(f"prompts: none of the {len(prompts)} can be given to this model, see above")
    return found


def _recorded(model: Any, requests: Sequence[AskedPrompt], args: TraceRecordOptions) -> dict[str, Any]:
    import torch

    from expertly import api
    from expertly.lab import recording as recordings

    torch.manual_seed(args.seed)
    name, steps_ns = args.model or "demo", []
    num_requests = num_tokens = 0
    recording: Recording | None = None
    try:
        with (
            progress_bar("requests") as progress,
            recordings.record(model, args.out, full=args.full, name=name, **origin()) as recording,
        ):
            for absent, reason in recording.absent.items():
                message(f"expertly: the trace will have no {absent}: {reason}")
            for request in requests:
                progress("recording", num_requests, len(requests))
                recording.begin_request(request.prompt.category, request.prompt.text, len(request.tokens))
                times_ns = _generate(model, request.tokens, args)
                steps_ns += [after - before for before, after in pairwise(times_ns)]
                num_requests, num_tokens = num_requests + 1, num_tokens + len(times_ns)
    except (KeyboardInterrupt, ExpertlyError):
        if recording is not None:
            message(
                f"expertly: {args.out}: kept what was recorded, {num_requests} of {len(requests)} requests and "
                f"{recording.writer.num_iterations} iterations"
            )
        raise
    stats = api.stats(model).as_dict()
    return {
        "model": name,
        "out": str(args.out),
        "requests": num_requests,
        "iterations": recording.writer.num_iterations,
        "rows": recording.writer.num_rows,
        "new_tokens": num_tokens,
        "bytes": sum(path.stat().st_size for path in args.out.iterdir()),
        "tpot_s": sum(steps_ns) / len(steps_ns) / 1e9 if steps_ns else None,
        "full": args.full,
        "absent": recording.absent,
        **{key: stats[key] for key in ("system", "segments", "memory_bytes", "expert_bytes")},
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _generate(model: Any, tokens: Sequence[int], args: TraceRecordOptions) -> list[int]:
    """Answer a prompt, no further than the model has positions. Returns when each token came."""
    from expertly.model.generation import generate, generation_config, max_positions
    from expertly.model.text import TextStreamer

    most, limit = args.max_new_tokens, max_positions(model)
    if limit is not None and not model.config.is_encoder_decoder:
        most = min(most, limit - len(tokens) + 1)  # the last token is not fed
    streamer = TextStreamer()
    generate(model, tokens, generation_config(model, most, args.temperature), streamer=streamer)
    return streamer.times_ns


def _summary(result: dict[str, Any]) -> str:
    return in_brackets(
        f"{result['requests']} requests" + (f" ({result['skipped']} skipped)" if result["skipped"] else ""),
        f"{result['iterations']} iterations",
        f"{result['rows']} rows",
        format_nbytes(result["bytes"]),
        f"TPOT {format_seconds(result['tpot_s'])}",
        result["out"],
    )


# -- import ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TraceImportOptions:
    file: Path = argument(REQUIRED, "the recorded routing, an .npz file", metavar="FILE", type=Path)
    out: Path = argument(REQUIRED, "where the trace goes: a new or an empty folder", metavar="OUT", type=Path)
    geometry: str | None = option(None, "the sizes of experts: a shipped description or a TOML file", metavar="NAME")
    num_experts: int | None = option(None, "experts of a layer", least=1)
    model: str | None = option(None, "a name for the model", metavar="NAME")
    json: bool = json_flag()


def import_routing(args: TraceImportOptions) -> int:
    """Make a trace of routing that another program recorded."""
    from expertly.sim.hardware import read_geometry
    from expertly.trace.importing import import_npz
    from expertly.trace.schema import TraceLayer

    geometry = None if args.geometry is None else read_geometry(args.geometry)
    import_npz(
        args.file,
        args.out,
        model=args.model or (geometry.name if geometry is not None else args.file.stem),
        layers=None if geometry is None else tuple(TraceLayer.of(layer) for layer in geometry.layers),
        dense=None if geometry is None else geometry.dense,
        num_experts=args.num_experts,
        **origin(),
    )
    _show_written(args.out, args.json)
    return 0


def _show_written(folder: Path, is_json: bool) -> None:
    facts = trace_facts(Trace.open(folder))
    show(facts, is_json, lambda: _headline(facts))


# -- synth -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TraceSynthOptions:
    out: Path = argument(REQUIRED, "where the trace goes: a new or an empty folder", metavar="OUT", type=Path)
    layers: int = option(16, "layers of the model", least=1)
    experts: int = option(64, "experts of a layer", least=1)
    top_k: int = option(4, "experts that a token needs", least=1)
    tokens: int = option(10000, "tokens of all requests together", least=1)
    requests: int = option(1, "how many requests share the tokens evenly", least=1)
    prefill_tokens: int = option(0, "the first tokens of a request that are one iteration", panel=ADVANCED)
    zipf: Any = option(1.0, "popularity of the expert of rank r is r^-A", metavar="A", type=exponent)
    markov: Any = option(0.0, "probability that an expert stays for the next token", metavar="P", type=share)
    phases: int = option(1, "how often ranks are drawn; popularity changes between phases", least=1, panel=ADVANCED)
    lookahead: Any | None = option(
        None,
        "add made-up scores of the next layer: a needed expert is among its K best with this probability",
        metavar="P",
        type=share,
        panel=ADVANCED,
    )
    seed: Any = option(0, "of the random draws", metavar="N", type=seed)
    json: bool = json_flag()


def synth(args: TraceSynthOptions) -> int:
    """Make up a trace of random routing; the same options give the same trace."""
    from expertly.lab.synth import write_workload, zipf

    workload = zipf(
        args.layers,
        args.experts,
        args.top_k,
        args.tokens,
        exponent=args.zipf,
        keep=args.markov,
        num_phases=args.phases,
        seed=args.seed,
    )
    write_workload(
        args.out,
        workload,
        model="synthetic zipf",
        num_requests=args.requests,
        prefill_tokens=args.prefill_tokens,
        lookahead=args.lookahead,
        seed=args.seed,
        **origin(),
    )
    _show_written(args.out, args.json)
    return 0


# -- info --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TraceInfoOptions:
    trace: Path = argument(REQUIRED, "the trace", metavar="DIR", type=Path)
    plot: Path | None = path_option(None, "draw popularity, entropy and reuse (.png, .svg, .pdf)")
    json: bool = json_flag()


def info(args: TraceInfoOptions) -> int:
    """What a trace holds, and how predictable, skewed and repetitive its routing is."""
    from expertly.lab.plots import check_plot
    from expertly.lab.trace_analysis import analyse

    if args.plot is not None:
        check_plot(args.plot)
    trace = Trace.open(args.trace)
    with progress_bar("tokens") as progress:
        analysis = analyse(trace, partial(progress, "reading"))
    if args.plot is not None:
        from expertly.lab.drawings import plot_trace

        plot_trace(trace, analysis, args.plot)
    facts = {**trace_facts(trace), **_analysed(analysis), "plot": None if args.plot is None else str(args.plot)}
    show(facts, args.json, lambda: _report(facts))
    if args.plot is not None and not args.json:
        message(f"plot written to {args.plot}")
    return 0


def trace_facts(trace: Trace) -> dict[str, Any]:
    """What the manifest and the requests say, for --json."""
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
            name: {"dtype": one.dtype, "shape": list(one.shape), "real": one.is_real, "stored": one.is_stored}
            | {"note": one.note}
            for name, one in manifest.fields.items()
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
    layers.append({**facts["mean"], "layer": "mean"})
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
        "experts serve:",
        _layers_table(
            layers, _CHOSEN | {f"top {one}%": (f"top {one}", format_share) for one in layers[-1]["top_shares"]}
        ),
        "",
        "share of demands whose expert was needed at most so many tokens before:",
        _layers_table(layers, {str(one): (f"reuse {one}", format_share) for one in _REUSE_SHOWN} | _REUSE),
        "",
        "entropy of a request's first tokens, mean over layers and requests that are that long:",
        table(("tokens", *map(str, growth)), [("bits", *map(format_number, growth.values()))]),
    ]
    return "\n".join(lines)


def _fields_table(fields: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, one in fields.items():
        shape = " x ".join(map(str, one["shape"])) or "-"
        rows.append((name, one["dtype"], shape, "yes" if one["real"] else "no", one["note"]))
    return table(("field", "dtype", "a row", "real", "note"), rows, folded="note")


_REUSE_SHOWN = (1, 4, 16, 64)
"""Reuse distances of which the table has columns; --json has more."""


def _layers_table(layers: Sequence[dict[str, Any]], columns: dict[str, Column]) -> str:
    return figures_table([layer | _spread(layer) for layer in layers], {"layer": ("layer", str), **columns})


def _distance(tokens: float) -> str:
    return f"{tokens:.1f}".removesuffix(".0")


_CHOSEN: dict[str, Column] = {
    "token": ("token_entropy_bits", format_number),
    "request": ("request_entropy_bits", format_number),
    "most": ("max_entropy_bits", format_number),
    "top expert": ("top expert", str),
}
_REUSE: dict[str, Column] = {"median": ("p50", _distance), "p99": ("p99", _distance)}


def _spread(layer: dict[str, Any]) -> dict[str, Any]:
    """A layer's inner dictionaries as the columns of the table."""
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
    file: Path = argument(REQUIRED, "a file that `--decisions FILE` wrote", metavar="FILE", type=Path)
    allow_imports: bool = option(
        False, "import the modules by which the file names parts of its system (MODULE.NAME), which runs their code"
    )
    json: bool = json_flag()


def replay(args: TraceReplayOptions) -> int:
    """Feed an engine's recorded observations to a new scheduler, and compare its decisions.

    Exit code 2 where a decision differs.
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
