"""`expertly lab train`: train ProMoE's predictor: which experts later layers need."""

from __future__ import annotations

import os
import shlex
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import distances, seed, split
from expertly.cli.model_identity import identity_of
from expertly.cli.output import print_json, progress_bar
from expertly.core.errors import ConfigError
from expertly.options import REQUIRED, argument, json_flag, option

if TYPE_CHECKING:
    from expertly.lab.train import TrainingStudy, TrainOptions
    from expertly.trace.reader import Trace

DEFAULT_DISTANCES = "1,2,4,8"
DEFAULT_HIDDEN = 128
DEFAULT_SPLIT = "7:3"
DEFAULT_EPOCHS = 40


@dataclass(frozen=True, kw_only=True)
class TrainPredictorOptions:
    trace: Path = argument(REQUIRED, "a folder made by `expertly lab trace record --full`", metavar="TRACE", type=Path)
    out: Path | None = option(None, "the file to write, which `--predictor` reads", metavar="FILE", type=Path)
    model: str | None = option(
        None,
        "the model that the trace is of (a folder, a packed store, a hub id, or demo): without it the weights are"
        " of a trace, and no engine takes them",
        metavar="MODEL",
    )
    distances: Any = option("1,2,4,8", "layers ahead that can be predicted", metavar="K,K", type=distances)
    hidden: int = option(128, "hidden numbers of each network", metavar="N", least=1)
    split: Any = option(
        "7:3",
        "only of the requests that `simulate --split` learns from; the rest says how good it is",
        metavar="7:3",
        type=split,
    )
    seed: Any = option(0, "of the split's shuffle and of training", metavar="N", type=seed)
    epochs: int = option(40, "passes over the training part at most; it ends where no more helps", metavar="N", least=1)
    device: str = option("cpu", "where to train: cpu (default) or cuda:N", metavar="NAME")
    json: bool = json_flag()


def run(args: TrainPredictorOptions) -> int:
    from expertly.lab.train import TrainOptions, study
    from expertly.policies.learned import read_learned, save_learned
    from expertly.policies.predictor.learned import LearnedWeights
    from expertly.trace.reader import Trace

    options = TrainOptions(args.distances, args.hidden, args.epochs, seed=args.seed, device=args.device)
    out = _checked_out(args.out, args.model)
    trace = Trace.open(args.trace)
    identity = identity_of(args.model, trace)
    start = time.perf_counter()
    with progress_bar(unit="step") as progress:
        found = study(trace, args.split, options, progress)
    seconds = time.perf_counter() - start
    save_learned(out, found.trained.weights, identity, _about(args, trace, options, found))
    result = _result(args, read_learned(out, LearnedWeights, identity=identity), found, seconds)
    if args.json:
        print_json(result)
    else:
        from expertly.cli.train_predictor_report import report

        print(report(result))
    return 0


def _checked_out(out: Path | None, model: str | None) -> Path:
    """Now, not when all is trained."""
    if out is None:
        where = _auto_file(model)
        raise ConfigError(f"out: name the file to write; `--predictor auto` looks for {where}")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"out={str(out)!r}: must be a file, in a folder that exists")
    if not os.access(out.absolute().parent, os.W_OK):
        raise ConfigError(f"out={str(out)!r}: its folder is not writable; accepted: another file")
    return out


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


def _about(args: TrainPredictorOptions, trace: Trace, options: TrainOptions, found: TrainingStudy) -> dict[str, Any]:
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


def _result(args: TrainPredictorOptions, file: Any, found: TrainingStudy, seconds: float) -> dict[str, Any]:
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
