"""`expertly generate`: text from a model whose experts live in the memory stated."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import positive_int, probability, seed, temperature
from expertly.cli.device_table import device_table
from expertly.cli.generation import generation_config
from expertly.cli.loading import add_loading_arguments, load_model
from expertly.cli.output import (
    add_json_flag,
    format_nbytes,
    format_seconds,
    format_share,
    message,
    print_json,
    reserved_stdout,
    table,
)
from expertly.core.errors import ConfigError
from expertly.options import LOAD_OPTIONS

RARE = ("ring", "order", "context", "host_memory")
"""Options of `expertly.load` that only this command has."""

if TYPE_CHECKING:
    from expertly.model.text import TextStreamer


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("generate", help="generate text", description=__doc__)
    add = parser.add_argument
    add_loading_arguments(parser)
    add("--prompt", required=True, metavar="TEXT", help='what to continue; "-" reads it from stdin')
    add("--max-new-tokens", type=positive_int, default=100, metavar="N", help="default: 100")
    for name in RARE:
        is_number = name in ("ring", "context")
        option = LOAD_OPTIONS[name]
        add(
            f"--{name.replace('_', '-')}",
            type=positive_int if is_number else str,
            default=option.default,
            metavar="N" if is_number else "NAME",
            help=option.metadata["help"].replace("%", "%%"),
        )
    add("--temperature", type=temperature, default=0.0, metavar="X", help="default: 0, greedy")
    add("--top-p", type=probability, default=1.0, metavar="X", help="with a temperature (default: 1)")
    add("--seed", type=seed, default=0, metavar="N", help="with a temperature (default: 0)")
    add("--stats", action="store_true", help="add a table of counters per layer and phase")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    prompt = _read_prompt(args.prompt)
    with reserved_stdout() as stdout:
        from expertly import api

        model, tokenizer = load_model(args, **{name: getattr(args, name) for name in RARE})
        try:
            if tokenizer is None:
                raise ConfigError(f"model={args.model!r}: has no tokenizer, so there is no text to generate from")
            if args.memory == "auto":
                message(f"expertly: {api.stats(model).memory_reason}")

            def write(text: str) -> None:
                if not args.json:
                    stdout.write(text)
                    stdout.flush()

            result = _generate(model, tokenizer, prompt, args, write)
            result |= {"model": args.model or "demo", "prompt": prompt}
            stats = api.stats(model).as_dict()
        finally:
            api.unload(model)
        _add_stats(result, stats, with_layers=args.stats)
        if args.json:
            print_json(result, stdout)
            return 0
        stdout.write(f"\n\n{_summary(result)}\n")
        if args.stats:
            stdout.write(f"\n{_stats_table(result)}\n")
            stdout.write(f"\n{_storage_line(result)}\n")
            stdout.write(f"\n{_kernels_line(result['kernels'])}\n")
            if len(result["devices"]) > 1:
                stdout.write(f"\n{device_table(result['devices'])}\n")
            if result["prediction"] is not None:
                stdout.write(f"\n{_prediction_table(result)}\n")
            if result["reuse"] is not None:
                stdout.write(f"\n{_reuse_line(result['reuse'])}\n")
            if result["allocation"] is not None:
                stdout.write(f"\n{_allocation_line(result['allocation'])}\n")
    return 0


def _read_prompt(prompt: str) -> str:
    try:
        prompt = sys.stdin.read() if prompt == "-" else prompt
        prompt.encode()  # bytes of the command line that are no UTF-8 came through as lone surrogates
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ConfigError(f"prompt: must be UTF-8 ({error.reason})") from None
    return prompt


def _generate(model: Any, tokenizer: Any, prompt: str, args: argparse.Namespace, write: Any) -> dict[str, Any]:
    """Run `generate` and time it."""
    import torch

    from expertly.model.text import TextStreamer

    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    num_prompt_tokens = inputs["input_ids"].shape[1]
    if num_prompt_tokens == 0:
        raise ConfigError(f"prompt={prompt!r}: gives no token; write at least one word")

    def decode(tokens: list[int]) -> str:
        text: str = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    streamer = TextStreamer(decode, write)
    config = generation_config(model, args.max_new_tokens, args.temperature, args.top_p)
    torch.manual_seed(args.seed)
    start_ns = time.perf_counter_ns()
    model.generate(**inputs, streamer=streamer, generation_config=config)
    seconds = (time.perf_counter_ns() - start_ns) / 1e9
    return {
        "text": decode(streamer.tokens),
        "tokens": len(streamer.tokens),
        "prompt_tokens": num_prompt_tokens,
        "token_ids": streamer.tokens,
        **_latencies(streamer, start_ns),
        "generate_s": seconds,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _latencies(streamer: TextStreamer, start_ns: int) -> dict[str, float | None]:
    """TTFT from the call to the first token; TPOT the mean of the steps after it, None where there is no second."""
    times = streamer.times_ns
    ttft = (times[0] - start_ns) / 1e9 if times else None
    return {"ttft_s": ttft, "tpot_s": (times[-1] - times[0]) / 1e9 / (len(times) - 1) if len(times) > 1 else None}


def _add_stats(result: dict[str, Any], stats: dict[str, Any], with_layers: bool) -> None:
    from expertly.engine.process import peak_rss_nbytes

    result |= {key: value for key, value in stats.items() if key != "layers" or with_layers}
    result["hit_rate"] = stats["phases"]["decode"]["hit_rate"]
    result["stall_share"] = stats["stall_s"] / result["generate_s"]
    result["peak_rss_bytes"] = peak_rss_nbytes()


def _summary(result: dict[str, Any]) -> str:
    """The one line after the text."""
    share = format_share(result["memory_bytes"] / result["expert_bytes"])
    budget = f"{format_nbytes(result['memory_bytes'])} = {share} of {format_nbytes(result['expert_bytes'])} of experts"
    parts = [
        f"{result['tokens']} tokens",
        f"TTFT {format_seconds(result['ttft_s'])}",
        f"TPOT {format_seconds(result['tpot_s'])}",
        f"decode hit rate {format_share(result['hit_rate'])}",
        f"stall {format_share(result['stall_share'])}",
        *_of_prediction(result),
        f"loaded {format_nbytes(result['bytes_loaded'])}",
        f"budget {budget}",
        f"system {result['system']}",
    ]
    return "[" + " | ".join(parts) + "]"


def _of_prediction(result: dict[str, Any]) -> list[str]:
    """What came of loading ahead, for a system that predicts."""
    prediction, decode = result["prediction"], result["phases"]["decode"]
    if prediction is None:
        return []
    failed = [] if prediction["failed"] is None else [f"prediction failed: {prediction['failed']}"]
    return [
        f"prefetch accuracy {format_share(decode['accuracy'])}, coverage {format_share(decode['coverage'])}",
        f"{prediction['predictions_late']} predictions late",
        *failed,
    ]


_OF_PHASE = {
    "predicted": "experts predicted",
    "prediction_accuracy": "of these, needed",
    "fetch_rate": "of these, there in time",
    "goodpred": "the product of both (GOODPRED)",
    "recall": "needed experts that it named",
    "prefetched": "experts loaded ahead",
    "accuracy": "of these, needed",
    "timeliness": "of these, in time",
    "coverage": "misses that it spared",
}


_OF_DISTANCE = {
    "accuracy_by_distance": "needed",
    "fetch_rate_by_distance": "there in time",
    "goodpred_by_distance": "GOODPRED",
}


def _prediction_table(result: dict[str, Any]) -> str:
    """The same by phase, and what the predictor says of itself."""
    prediction, phases = result["prediction"], [result["phases"][name] for name in ("prefill", "decode")]
    rows = []
    for key, label in _OF_PHASE.items():
        shown = [str(one[key]) if isinstance(one[key], int) else format_share(one[key]) for one in phases]
        rows.append((label, *shown))
    for key, label in _OF_DISTANCE.items():
        of_distance = [one[key] or {} for one in phases]
        for distance in sorted({distance for one in of_distance for distance in one}, key=int):
            shares = [format_share(one.get(distance)) for one in of_distance]
            rows.append((f"{label}, predicted {distance} ahead", *shares))
    facts = {
        "matcher": prediction["matcher"],
        "late": prediction["predictions_late"],
        "contexts dropped": prediction["contexts_dropped"],
        "collecting": format_seconds(prediction["collect_s"]),
        **{name.replace("_", " "): _fact(value) for name, value in prediction["predictor"].items()},
    }
    if prediction["gate"] is not None:
        facts["gate"] = prediction["gate"]["says"]
    if prediction["maps_file"] is not None:
        facts["maps file"] = f"{prediction['maps_file']} ({prediction['maps_read']} maps at the start)"
    line = " | ".join(f"{name} {value}" for name, value in facts.items())
    return f"{table(('prediction', 'prefill', 'decode'), rows)}\n[{line}]"


def _reuse_line(reuse: dict[str, Any]) -> str:
    """What the eviction began with, and from how much it has learned by now."""
    problem = [] if reuse["problem"] is None else [reuse["problem"]]
    return "[" + " | ".join([f"reuse: {reuse['says']}", f"{reuse['tokens']} tokens by now", *problem]) + "]"


def _fact(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _storage_line(result: dict[str, Any]) -> str:
    """How experts are stored, why, and what reading and decoding took."""
    codec = result["codec"]
    parts = [f"codec {codec['name']}: {codec['why']}"]
    if codec["name"] != "none":
        decoded = format_nbytes(result["bytes_decoded"])
        parts += [
            f"stored in {format_share(codec['ratio'])} of the bytes",
            f"decoded {decoded} in {format_seconds(result['decode_s'])} of processor time",
        ]
    if result["compute_threads"] is not None:
        threads = result["compute_threads"]
        number, passes = threads["beside_decoders"], threads["passes_with_fewer"]
        parts.append(f"threads that compute beside decoders: {number}, in {passes} passes")
    return "[" + " | ".join([*parts, f"read {format_nbytes(result['bytes_disk'])}"]) + "]"


def _kernels_line(kernels: dict[str, Any]) -> str:
    """What multiplied the experts, why, and how often."""
    counts = f"{kernels['native']} experts or parts by them, {kernels['torch']} by torch"
    return f"[kernels {kernels['name']}: {kernels['why']} | {counts}]"


def _allocation_line(allocation: dict[str, Any]) -> str:
    """The experts that each layer keeps, and what the allocation says of itself."""
    experts = " ".join(f"{num:g}" for num in allocation["experts"])
    told = [f"{name} {value}" for name, value in allocation.items() if name not in ("experts", "recall")]
    return f"[experts kept by layer {experts} | allocation {' | '.join(told).removeprefix('name ')}]"


def _stats_table(result: dict[str, Any]) -> str:
    headers = ("layer", "phase", "hits", "partial", "misses", "hit rate", "loaded", "stall", "compute")
    sources = [(str(layer["layer"]), layer) for layer in result["layers"]] + [("all", result["phases"])]
    rows = []
    for name, phases in sources:
        for phase in ("prefill", "decode"):
            one = phases[phase]
            counts = [str(one[key]) for key in ("hits", "partial_hits", "misses")]
            times = [format_seconds(one[key]) for key in ("stall_s", "compute_s")]
            rows.append(
                (name, phase, *counts, format_share(one["hit_rate"]), format_nbytes(one["bytes_loaded"]), *times)
            )
    return table(headers, rows)
