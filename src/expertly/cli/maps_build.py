"""`expertly maps build`: the maps that a recorded trace shows, in a file that `generate --maps` starts from."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import positive_int, probability, seed, split
from expertly.cli.maps_summary import write_maps
from expertly.cli.output import add_json_flag, message, progress_bar
from expertly.core.errors import ConfigError

if TYPE_CHECKING:
    from expertly.core.geometry import LayerGeometry
    from expertly.sim.workload import Span
    from expertly.trace.reader import Trace

DEFAULT_CAPACITY = 1000
DEFAULT_DISTANCE = 3
DEFAULT_QUOTA = 0.125


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("build", help="make a maps file of a trace", description=__doc__)
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE", help="a folder made by `expertly trace record`, `import` or `synth`")
    add("out", type=Path, metavar="OUT", help="the maps file to write")
    add(
        "--model",
        metavar="MODEL",
        help="the model that the trace is of (a folder, a packed store, a hub id, or demo): without it the maps are of "
        "a trace, and no engine takes them",
    )
    add(
        "--split",
        type=split,
        metavar="7:3",
        help="only of the requests that `simulate --split` learns from",
    )
    add("--seed", type=seed, default=0, metavar="N", help="of the split's shuffle (default: 0)")
    add(
        "--capacity",
        type=positive_int,
        default=DEFAULT_CAPACITY,
        metavar="N",
        help=f"maps at most; the most redundant ones go (default: {DEFAULT_CAPACITY})",
    )
    add(
        "--quota",
        type=probability,
        default=DEFAULT_QUOTA,
        metavar="X",
        help=f"share of the capacity that one request may fill (default: {DEFAULT_QUOTA})",
    )
    add(
        "--distance",
        type=positive_int,
        default=DEFAULT_DISTANCE,
        metavar="D",
        help=f"layers predicted ahead: in redundancy embeddings count D/L (default: {DEFAULT_DISTANCE})",
    )
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from expertly.policies.maps.store import MapShape, MapStore
    from expertly.sim.schedule import Selection, make_schedule
    from expertly.sim.training import histories
    from expertly.trace.reader import Trace

    trace = Trace.open(args.trace)
    layers = trace.manifest.layers
    shape = MapShape(tuple(layer.num_experts for layer in layers), tuple(layer.top_k for layer in layers))
    identity = _identity(args.model, trace)
    schedule = make_schedule(trace, Selection(split=args.split, seed=args.seed))
    spans: list[Span] = schedule.test if args.split is None else schedule.training
    has_embeddings = trace.is_real("embedding")
    if trace.has("embedding") and not has_embeddings:
        message("expertly: the trace's embeddings are made up: the maps go without")
    weight = min(args.distance, max(1, shape.num_layers - 1)) / shape.num_layers
    store = MapStore(shape, args.capacity, semantic_weight=weight, quota=args.quota)
    num_rows, total = 0, sum(span.num_rows for span in spans)
    with progress_bar(unit="row") as progress:
        for rows in histories(trace, spans, {"experts", "scores", *(("embedding",) if has_embeddings else ())}):
            store.add(rows.scores, rows.experts, rows.requests, rows.embedding)
            num_rows += len(rows.requests)
            if progress is not None:
                progress("building", num_rows, total)
    about = {
        "model": trace.manifest.model,
        "source": f"{num_rows} tokens of {_requests(trace, spans)} requests of {args.trace}",
        "command": shlex.join(["expertly", *sys.argv[1:]]),
    }
    write_maps(args.out, store, identity, about, args.json)
    return 0


def _requests(trace: Trace, spans: list[Span]) -> int:
    """How many requests the spans hold."""
    if any(span.request is None for span in spans):
        return sum(request.num_rows > 0 for request in trace.requests)
    return len({span.request for span in spans})


def _identity(model: str | None, trace: Trace) -> str:
    """Of the model, or of nothing but a trace. Raises ConfigError where the model cannot have made the trace."""
    from expertly.maps.header import OF_A_TRACE

    if model is None:
        return f"{OF_A_TRACE}{trace.manifest.model}"
    from expertly.models.packing import source_folder
    from expertly.store.cache import entry_folder
    from expertly.store.checkpoint import Checkpoint
    from expertly.store.dtypes import STORE_DTYPES
    from expertly.store.manifest import Manifest
    from expertly.store.packed import is_packed_store

    folder = source_folder(model)
    if is_packed_store(folder):
        identity, packed = Manifest.read(folder).identity, [folder]
    else:
        checkpoint = Checkpoint.open(folder)
        identity = checkpoint.identity
        packed = [entry_folder(str(checkpoint.config.get("model_type")), identity, dtype) for dtype in STORE_DTYPES]
    for store in filter(is_packed_store, packed):
        _check_layers(f"model={model!r}", Manifest.read(store).layers, trace)
    return identity


def _check_layers(where: str, layers: Sequence[LayerGeometry], trace: Trace) -> None:
    """Raises ConfigError naming the number that the trace has otherwise; what it does not know is not compared."""
    recorded = trace.manifest.layers
    if len(layers) != len(recorded):
        raise ConfigError(f"{where}: {len(layers)} MoE layers, but {trace.folder} has {len(recorded)}")
    for index, (layer, other) in enumerate(zip(layers, recorded, strict=True)):
        for name in ("num_experts", "top_k", "hidden_size", "intermediate_size", "num_matrices"):
            own, found = getattr(layer, name), getattr(other, name)
            if found not in (None, own):
                raise ConfigError(f"{where}: layer {index} has {name}={own}, but {found} in {trace.folder}")
