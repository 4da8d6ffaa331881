"""`expertly lab train`: train ProMoE's predictor: which experts later layers need."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertly.cli.output import in_brackets, progress_bar, show, table
from expertly.core.units import format_nbytes, format_seconds, format_share
from expertly.options import REQUIRED, argument, json_flag, option, path_option, seed
from expertly.policies.learned import read_learned, save_learned
from expertly.policies.promoe import LearnedWeights
from expertly_lab.cli.arguments import split, split_text, whole_numbers
from expertly_lab.cli.inputs import check_writable, identity_of
from expertly_lab.cli.output import origin, printable
from expertly_lab.trace.reader import Trace


@dataclass(frozen=True, kw_only=True)
class TrainPredictorOptions:
    trace: Path = argument(REQUIRED, "a folder made by `expertly lab trace record --full`", metavar="TRACE", type=Path)
    out: Path = path_option(
        REQUIRED, "the file to write, for --predictor; `auto` finds it as STORE.predictor beside a packed store"
    )
    model: str | None = option(
        None,
        "the model that the trace is of (a folder, a packed store, a hub id, or demo); without it"
        " no engine accepts the weights",
        metavar="MODEL",
    )
    distances: Any = option("1,2,4,8", "how many layers ahead to predict", metavar="K,K", type=whole_numbers)
    hidden: int = option(128, "hidden units of each network", least=1)
    split: Any = option(
        "7:3",
        "learn from the first part of the requests, as `simulate --split` divides them; the rest measures accuracy",
        metavar="7:3",
        type=split,
    )
    seed: Any = option(0, "of the shuffle and of training", metavar="N", type=seed)
    epochs: int = option(
        40, "passes over the training part at most; training stops when accuracy does not rise", least=1
    )
    plain: bool = option(False, "networks of two layers only, as ProMoE's are")
    device: str = option("cpu", "where to train: cpu or cuda:N", metavar="NAME")
    json: bool = json_flag()


def run(args: TrainPredictorOptions) -> int:
    from expertly_lab.train import TrainOptions, study

    options = TrainOptions(
        args.distances, args.hidden, args.epochs, seed=args.seed, device=args.device, plain=args.plain
    )
    check_writable(args.out)
    trace = Trace.open(args.trace)
    identity = identity_of(args.model, trace)
    start = time.perf_counter()
    with progress_bar("steps") as progress:
        ran = study(trace, args.split, options, progress)
    seconds = time.perf_counter() - start
    facts = ran.as_dict()
    about = {
        "model": trace.manifest.model,
        "trace": trace.fingerprint,
        "source": f"{ran.num_rows['training']} tokens of {ran.num_requests['training']} requests of {args.trace}",
        "split": split_text(args.split),
        "seed": args.seed,
        "hidden": args.hidden,
        **origin(),
        "mean": facts["mean"],
    }
    save_learned(args.out, ran.trained.weights, identity, about)
    file = read_learned(args.out, LearnedWeights, identity=identity)
    weights = file.learned
    result = {
        "out": str(args.out),
        "model": about["model"],
        "identity": file.identity,
        "distances": list(weights.distances),
        "num_layers": weights.shape.num_layers,
        "networks": len(weights.mlps),
        "hidden": args.hidden,
        "parameters": max((mlp.num_parameters for mlp in weights.mlps.values()), default=0),
        "split": about["split"],
        "seed": args.seed,
        "device": args.device,
        "seconds": seconds,
        "bytes": args.out.stat().st_size,
        **facts,
    }
    show(result, args.json, lambda: report(result))
    return 0


def report(result: dict[str, Any]) -> str:
    rows = []
    for distance in result["distances"]:
        mean = result["mean"][str(distance)]
        shares = (format_share(mean[name]) for name in ("learned", "lookahead", "token_id"))
        rows.append((str(distance), *shares))
    headers = ("layers ahead", "learned", "lookahead", "token id")
    requests, tokens = result["requests"], result["tokens"]
    head = in_brackets(
        printable(result["model"]),
        f"{result['networks']} networks of {result['parameters']} numbers at most",
        f"distances {', '.join(map(str, result['distances']))}",
        format_nbytes(result["bytes"]),
        result["out"],
    )
    learned = f"learned from {tokens['training']} tokens of {requests['training']} requests"
    return (
        f"{head}\nsplit {result['split']} with seed {result['seed']}: {learned}, stopped by {requests['stopping']} "
        f"others; {format_seconds(result['seconds'])} on {result['device']}\n\nshare of the experts named that "
        f"{tokens['test']} tokens of the {requests['test']} requests kept back needed, mean over the layers\n"
        f"{table(headers, rows)}"
    )
