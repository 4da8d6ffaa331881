"""`expertly lab learned build`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import probability, seed, split
from expertly.cli.learned import write_file
from expertly.cli.model_identity import identity_of
from expertly.cli.output import message, progress_bar
from expertly.core.errors import ConfigError
from expertly.options import REQUIRED, argument, json_flag, option

if TYPE_CHECKING:
    from expertly.core.observation import History, Want
    from expertly.policies.learned import LearnedStore
    from expertly.policies.predictor.eam.matrices import Matrices
    from expertly.policies.predictor.fmoe.store import MapStore
    from expertly.sim.workload import RowRange
    from expertly.trace.reader import Trace

KINDS = ("maps", "matrices")
DEFAULT_CAPACITY = {"maps": 1000, "matrices": 120}
DEFAULT_DISTANCE = 3
DEFAULT_QUOTA = 0.125


@dataclass(frozen=True, kw_only=True)
class LearnedBuildOptions:
    trace: Path = argument(
        REQUIRED, "a folder made by `expertly lab trace record`, `import` or `synth`", metavar="TRACE", type=Path
    )
    out: Path = argument(REQUIRED, "the file to write", metavar="OUT", type=Path)
    kind: str = option(
        "maps",
        "maps (default: expert maps, for fmoe) or matrices (activation matrices, for moe-infinity)",
        metavar="KIND",
        choices=KINDS,
    )
    model: str | None = option(
        None,
        "the model that the trace is of (a folder, a packed store, a hub id, or demo): without it the maps are of"
        " a trace, and no engine takes them",
        metavar="MODEL",
    )
    split: Any | None = option(
        None, "only of the requests that `simulate --split` learns from", metavar="7:3", type=split
    )
    seed: Any = option(0, "of the split's shuffle", metavar="N", type=seed)
    capacity: int | None = option(
        None,
        "maps, or matrices of prompts and of decoding each, at most; the most redundant ones go",
        metavar="N",
        type=int,
        least=1,
    )
    quota: Any | None = option(None, "share of the maps that one request may fill", metavar="X", type=probability)
    distance: int | None = option(
        None, "layers that maps predict ahead: in redundancy embeddings count D/L", metavar="D", type=int, least=1
    )
    json: bool = json_flag()


def build(args: LearnedBuildOptions) -> int:
    """What a recorded trace teaches fmoe or moe-infinity, in a file that --learned of a command reads."""
    from expertly.sim.schedule import Selection, make_schedule
    from expertly.trace.reader import Trace

    for name in ("quota", "distance"):
        if args.kind != "maps" and getattr(args, name) is not None:
            raise ConfigError(f"{name}={getattr(args, name)}: of no use with kind={args.kind!r}; accepted: kind=maps")
    trace = Trace.open(args.trace)
    identity = identity_of(args.model, trace)
    schedule = make_schedule(trace, Selection(split=args.split, seed=args.seed))
    spans: list[RowRange] = schedule.test if args.split is None else schedule.training
    num_rows = sum(span.num_rows for span in spans)
    about = {
        "model": trace.manifest.model,
        "source": f"{num_rows} tokens of {_requests(trace, spans)} requests of {args.trace}",
        "command": shlex.join(["expertly", *sys.argv[1:]]),
    }
    store: LearnedStore = _maps(args, trace, spans) if args.kind == "maps" else _matrices(args, trace, spans)
    write_file(args.out, store, identity, about, args.json)
    return 0


def _maps(args: LearnedBuildOptions, trace: Trace, spans: list[RowRange]) -> MapStore:
    from expertly.policies.learned import ModelShape
    from expertly.policies.predictor.fmoe.store import MapStore

    layers = trace.manifest.layers
    shape = ModelShape(tuple(layer.num_experts for layer in layers), tuple(layer.top_k for layer in layers))
    has_embeddings = trace.is_real("embedding")
    if trace.has("embedding") and not has_embeddings:
        message("expertly: the trace's embeddings are made up: the maps go without")
    distance = DEFAULT_DISTANCE if args.distance is None else args.distance
    store = MapStore(
        shape,
        args.capacity or DEFAULT_CAPACITY["maps"],
        semantic_weight=min(distance, max(1, shape.num_layers - 1)) / shape.num_layers,
        quota=DEFAULT_QUOTA if args.quota is None else args.quota,
    )
    for rows in _histories(trace, spans, {"experts", "scores", *(("embedding",) if has_embeddings else ())}):
        store.add(rows.scores, rows.experts, rows.requests, rows.embedding)
    return store


def _matrices(args: LearnedBuildOptions, trace: Trace, spans: list[RowRange]) -> Matrices:
    from expertly.policies.learned import ModelShape
    from expertly.policies.predictor.eam import EAM, EAMOptions

    layers = trace.manifest.layers
    shape = ModelShape(tuple(layer.num_experts for layer in layers), tuple(layer.top_k for layer in layers))
    options = EAMOptions(capacity=args.capacity or DEFAULT_CAPACITY["matrices"])
    predictor = EAM(shape.geometry(), options=options)
    for rows in _histories(trace, spans, predictor.wants):
        predictor.learn(rows)
    predictor.finish()
    return predictor.learned


def _histories(trace: Trace, spans: list[RowRange], wants: Collection[Want]) -> Iterator[History]:
    from expertly.sim.training import histories

    num_rows, total = 0, sum(span.num_rows for span in spans)
    with progress_bar(unit="row") as progress:
        for rows in histories(trace, spans, wants):
            yield rows
            num_rows += len(rows.requests)
            if progress is not None:
                progress("building", num_rows, total)


def _requests(trace: Trace, spans: list[RowRange]) -> int:
    """How many requests the spans hold."""
    if any(span.request is None for span in spans):
        return sum(request.num_rows > 0 for request in trace.requests)
    return len({span.request for span in spans})
