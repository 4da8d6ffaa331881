"""`expertly lab trace`: record, import, synthesise and describe routing traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.output import in_brackets, message, progress_bar, reserved_stdout, show, table
from expertly.cli.run import load_model
from expertly.core.errors import ConfigError, ExpertlyError, TraceError
from expertly.core.units import format_nbytes, format_seconds
from expertly.model.prompts import PROMPTS_HELP, RAW_HELP, AskedPrompt, Prompt, asked, read_prompts
from expertly.options import (
    ADVANCED,
    MODEL_HELP,
    REQUIRED,
    LoadOptions,
    argument,
    json_flag,
    option,
    path_option,
    seed,
    temperature,
)
from expertly_lab.cli.arguments import exponent, share
from expertly_lab.cli.output import origin
from expertly_lab.trace.reader import Trace

if TYPE_CHECKING:
    from expertly_lab.recording import Recording


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

    prompted, left_out = asked(prompts, tokenizer, is_raw=is_raw, most=max_positions(model))
    for reason in left_out:
        message(f"expertly: skipped: {reason}")
    if not prompted:
        raise ConfigError(f"prompts: none of the {len(prompts)} can be given to this model, see above")
    return prompted


def _recorded(model: Any, requests: Sequence[AskedPrompt], args: TraceRecordOptions) -> dict[str, Any]:
    import torch

    from expertly import api
    from expertly_lab import recording as recordings

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
    if limit is not None:
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
    model: str | None = option(None, "a name for the model", metavar="NAME")
    json: bool = json_flag()


def import_routing(args: TraceImportOptions) -> int:
    """Make a trace of routing that another program recorded."""
    from expertly_lab.sim.geometries import read_geometry
    from expertly_lab.trace.importing import import_npz
    from expertly_lab.trace.schema import TraceLayer

    geometry = None if args.geometry is None else read_geometry(args.geometry)
    import_npz(
        args.file,
        args.out,
        model=args.model or (geometry.name if geometry is not None else args.file.stem),
        layers=None if geometry is None else tuple(TraceLayer.of(layer) for layer in geometry.layers),
        dense=None if geometry is None else geometry.dense,
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
    seed: Any = option(0, "of the random draws", metavar="N", type=seed)
    json: bool = json_flag()


def synth(args: TraceSynthOptions) -> int:
    """Make up a trace of random routing; the same options give the same trace."""
    from expertly_lab.synth import write_workload, zipf

    workload = zipf(
        args.layers, args.experts, args.top_k, args.tokens, exponent=args.zipf, keep=args.markov, seed=args.seed
    )
    write_workload(
        args.out,
        workload,
        model="synthetic zipf",
        num_requests=args.requests,
        prefill_tokens=args.prefill_tokens,
        seed=args.seed,
        **origin(),
    )
    _show_written(args.out, args.json)
    return 0


# -- info --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TraceInfoOptions:
    trace: Path = argument(REQUIRED, "the trace", metavar="DIR", type=Path)
    json: bool = json_flag()


def info(args: TraceInfoOptions) -> int:
    """What a trace holds."""
    facts = trace_facts(Trace.open(args.trace))
    show(facts, args.json, lambda: _report(facts))
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
        "num_layers": len(manifest.layers),
        "num_experts": [layer.num_experts for layer in manifest.layers],
        "top_k": [layer.top_k for layer in manifest.layers],
        "expert_bytes": [None if shape is None else shape.expert_nbytes for shape in geometries],
        "requests": len(trace.requests),
        "categories": dict(sorted(categories.items())),
        "rows": trace.num_rows,
        "prefill_rows": int(trace.rows("is_prefill", 0, trace.num_rows).sum()),
        "iterations": trace.num_iterations,
        "bytes": sum(path.stat().st_size for path in trace.folder.iterdir() if path.is_file()),
        "fields": {
            name: {"dtype": info.dtype, "shape": list(info.shape), "real": info.is_real, "stored": info.is_stored}
            | {"note": info.note}
            for name, info in manifest.fields.items()
        },
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
    rows = []
    for name, info in facts["fields"].items():
        shape = " x ".join(map(str, info["shape"])) or "-"
        rows.append((name, info["dtype"], shape, "yes" if info["real"] else "no", info["note"]))
    fields = table(("field", "dtype", "a row", "real", "note"), rows)
    counts = f"{facts['prefill_rows']} tokens of prefill, {facts['rows'] - facts['prefill_rows']} of decode"
    return "\n".join([_headline(facts), *[f"made {made}"] * bool(made), counts, "", fields])
