"""`expertly train-predictor`: small networks that learn from a recorded trace which experts later layers will need."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import distances, positive_int, seed, split
from expertly.cli.model_identity import identity_of
from expertly.cli.output import add_json_flag, print_json, progress_bar
from expertly.core.errors import ConfigError

if TYPE_CHECKING:
    from expertly.lab.study import TrainingStudy
    from expertly.lab.train import TrainOptions
    from expertly.trace.reader import Trace

DEFAULT_DISTANCES = "1,2,4,8"
DEFAULT_HIDDEN = 128
DEFAULT_SPLIT = "7:3"
DEFAULT_EPOCHS = 40


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("train-predictor", help="train a learned predictor on a trace", description=__doc__)
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE", help="a folder made by `expertly trace record --full`")
    add("--out", type=Path, metavar="FILE", help="the file to write, which `--predictor` reads")
    add(
        "--model",
        metavar="MODEL",
        help="the model that the trace is of (a folder, a packed store, a hub id, or demo): without it the weights are "
        "of a trace, and no engine takes them",
    )
    add(
        "--distances",
        type=distances,
        default=DEFAULT_DISTANCES,
        metavar="K,K",
        help=f"layers ahead that can be predicted (default: {DEFAULT_DISTANCES})",
    )
    add(
        "--hidden",
        type=positive_int,
        default=DEFAULT_HIDDEN,
        metavar="N",
        help=f"hidden numbers of each network (default: {DEFAULT_HIDDEN})",
    )
    add(
        "--split",
        type=split,
        default=DEFAULT_SPLIT,
        metavar="7:3",
        help="only of the requests that `simulate --split` learns from; the rest says how good it is (default: "
        f"{DEFAULT_SPLIT})",
    )
    add("--seed", type=seed, default=0, metavar="N", help="of the split's shuffle and of training (default: 0)")
    add(
        "--epochs",
        type=positive_int,
        default=DEFAULT_EPOCHS,
        metavar="N",
        help=f"passes over the training part at most; it ends where no more helps (default: {DEFAULT_EPOCHS})",
    )
    add("--device", default="cpu", metavar="NAME", help="where to train: cpu (default) or cuda:N")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from expertly.lab.study import study
    from expertly.lab.train import TrainOptions
    from expertly.policies.learned import read_learned, save_learned
    from expertly.policies.predictor.learned import LearnedWeights
    from expertly.trace.reader import Trace

    options = TrainOptions(args.distances, args.hidden, args.epochs, seed=args.seed, device=args.device)
    _check_out(args.out, args.model)
    trace = Trace.open(args.trace)
    identity = identity_of(args.model, trace)
    start = time.perf_counter()
    with progress_bar(unit="step") as progress:
        found = study(trace, args.split, options, progress)
    seconds = time.perf_counter() - start
    save_learned(args.out, found.trained.weights, identity, _about(args, trace, options, found))
    result = _result(args, read_learned(args.out, LearnedWeights, identity=identity), found, seconds)
    if args.json:
        print_json(result)
    else:
        from expertly.cli.train_predictor_report import report

        print(report(result))
    return 0


def _check_out(out: Path | None, model: str | None) -> None:
    """Now, not when all is trained."""
    if out is None:
        where = _auto_file(model)
        raise ConfigError(f"out: name the file to write; `--predictor auto` looks for {where}")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"out={str(out)!r}: must be a file, in a folder that exists")
    if not os.access(out.absolute().parent, os.W_OK):
        raise ConfigError(f"out={str(out)!r}: its folder is not writable; accepted: another file")


def _auto_file(model: str | None) -> str:
    from expertly.store.cache import learned_beside, stores_folder

    if model is not None:
        from expertly.model.packing import source_folder
        from expertly.store.packed import is_packed_store

        folder = source_folder(model)
        if is_packed_store(folder):
            return str(learned_beside(folder, "predictor"))
    beside = learned_beside(stores_folder() / "STORE", "predictor")
    return f"{beside}, where STORE is the model's packed store (`expertly pack --list`)"


def _about(args: argparse.Namespace, trace: Trace, options: TrainOptions, found: TrainingStudy) -> dict[str, Any]:
    """What the file says of itself."""
    facts = found.as_dict()
    return {
        "model": trace.manifest.model,
        "trace": trace.fingerprint,
        "source": f"{found.num_rows['training']} tokens of {found.num_requests['training']} requests of {args.trace}",
        "split": f"{args.split[0]}:{args.split[1]}",
        "seed": options.seed,
        "hidden": options.hidden,
        "command": shlex.join(["expertly", *sys.argv[1:]]),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "mean": facts["mean"],
        "accuracy": [
            [one.distance, one.layer, *map(_rounded, (one.learned, one.lookahead, one.token_id))]
            for one in found.accuracies
        ],
    }


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def _result(args: argparse.Namespace, file: Any, found: TrainingStudy, seconds: float) -> dict[str, Any]:
    from expertly.engine.process import peak_rss_nbytes

    weights = file.learned
    return {
        "out": str(file.path),
        "model": file.header.about["model"],
        "identity": file.header.identity,
        "distances": list(weights.distances),
        "num_layers": len(weights.num_experts),
        "networks": len(weights.mlps),
        "hidden": args.hidden,
        "parameters": max((mlp.num_parameters for mlp in weights.mlps.values()), default=0),
        "split": file.header.about["split"],
        "seed": args.seed,
        "device": args.device,
        "seconds": seconds,
        "bytes": file.nbytes,
        "scratch_bytes": found.scratch_nbytes,
        "peak_rss_bytes": peak_rss_nbytes(),
        **found.as_dict(),
    }
