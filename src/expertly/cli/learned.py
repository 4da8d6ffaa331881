"""`expertly lab learned`: look at, build, merge and export files of what systems learn while they run: expert maps
(fmoe predicts by them), activation matrices (moe-infinity does), and reuse weights. The first two can be built from
traces, merged and exported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from expertly.arguments import probability, seed, split
from expertly.cli.inputs import identity_of
from expertly.cli.output import in_brackets, message, origin, print_json, printable, progress_bar, show
from expertly.core.errors import ConfigError, StoreError
from expertly.core.files import disk_errors, replacing
from expertly.core.observation import History, Want
from expertly.core.units import format_nbytes, format_share
from expertly.options import REQUIRED, argument, json_flag, option
from expertly.policies.eviction.reuse import MEANING, ReuseModel, num_weights
from expertly.policies.learned import LearnedFile, LearnedStore, ModelShape, read_learned, save_learned
from expertly.policies.predictor.eam import EAM, EAMOptions
from expertly.policies.predictor.eam.matrices import Collection as MatricesOfPhase
from expertly.policies.predictor.eam.matrices import Matrices
from expertly.policies.predictor.fmoe.store import MapStore, coverage_bounds, mean_similarities
from expertly.sim.schedule import Selection, make_schedule
from expertly.sim.training import histories
from expertly.sim.workload import RowRange
from expertly.trace.reader import Trace

NUM_SAMPLED = 512
BOUNDS = ("2 L E", "L E ln(L E) / 2")

KINDS = ("maps", "matrices")
DEFAULT_CAPACITY = {"maps": 1000, "matrices": 120}
DEFAULT_DISTANCE = 3
DEFAULT_QUOTA = 0.125

# -- info --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LearnedInfoOptions:
    file: Path = argument(REQUIRED, "a file of maps, matrices or reuse", metavar="FILE", type=Path)
    json: bool = json_flag()


def info(args: LearnedInfoOptions) -> int:
    """What a file of maps, matrices or reuse weights holds, and how much of the model's routing it covers."""
    file = read_learned(args.file, MapStore, Matrices, ReuseModel)
    facts = facts_of(file)
    show(facts, args.json, lambda: _report(file, facts))
    return 0


def facts_of(file: LearnedFile[Any]) -> dict[str, Any]:
    """What `info --json` prints. `*_bytes` are the memory of what is stored now, `full_*_bytes` of a full store."""
    learned, shape = file.learned, file.header.shape
    of_kind = (
        _of_matrices if isinstance(learned, Matrices) else _of_maps if isinstance(learned, MapStore) else _of_reuse
    )
    return {
        "file": str(file.path),
        "identity": file.header.identity,
        "about": dict(file.header.about),
        "num_layers": shape.num_layers,
        "num_experts": list(shape.num_experts),
        "top_k": list(shape.top_k),
        **of_kind(learned, shape),
        "file_bytes": file.nbytes,
    }


def _of_maps(store: MapStore, shape: ModelShape) -> dict[str, Any]:
    hidden_size = 0 if store.embeddings is None else store.embeddings.shape[1]
    maps_nbytes, embeddings_nbytes = store.nbytes_of(shape, store.num_maps, hidden_size)
    full_maps_nbytes, full_embeddings_nbytes = store.nbytes_of(shape, store.capacity, hidden_size)
    of_maps, of_embeddings = mean_similarities(store, NUM_SAMPLED)
    return {
        "embedding_size": hidden_size or None,
        "maps": store.num_maps,
        "capacity": store.capacity,
        "requests": len(store.num_of_request),
        "max_maps_of_request": store.max_of_request,
        "semantic_weight": store.semantic_weight,
        "maps_bytes": maps_nbytes,
        "embeddings_bytes": embeddings_nbytes,
        "full_maps_bytes": full_maps_nbytes,
        "full_embeddings_bytes": full_embeddings_nbytes,
        "mean_similarity": of_maps,
        "mean_embedding_similarity": of_embeddings,
        "sampled_maps": min(NUM_SAMPLED, store.num_maps),
        "coverage": [{"similarity": one.similarity, "maps": one.num_maps} for one in coverage_bounds(shape)],
    }


def _of_matrices(store: Matrices, shape: ModelShape) -> dict[str, Any]:
    nbytes_each = 8 * shape.num_layers * shape.max_experts
    return {
        "prefill_matrices": store.prefill.num_matrices,
        "decode_matrices": store.decode.num_matrices,
        "prefill_tokens": _num_tokens(store.prefill),
        "decode_tokens": _num_tokens(store.decode),
        "capacity": store.capacity,
        "matrices_bytes": nbytes_each * store.num_learned,
        "full_matrices_bytes": nbytes_each * 2 * store.capacity,
        "coverage": [{"similarity": one.similarity, "matrices": one.num_maps} for one in coverage_bounds(shape)],
    }


def _num_tokens(collection: MatricesOfPhase) -> int:
    """Tokens that a collection has counted. In a model of two stacks most tokens run only one: the layers that ran most
    of them decide.
    """
    choices = collection.total.sum(axis=1).tolist()
    return max(num // top_k for num, top_k in zip(choices, collection.shape.top_k, strict=True))


def _of_reuse(model: ReuseModel, shape: ModelShape) -> dict[str, Any]:
    return {
        "experts": sum(shape.num_experts),
        "tokens": model.num_learned,
        "weights": num_weights(shape.num_experts),
        "meaning": dict(MEANING),
    }


def _headline(file: LearnedFile[Any], facts: dict[str, Any]) -> str:
    if "maps" in facts:
        counts = [
            f"{facts['maps']} of at most {facts['capacity']} maps",
            f"{facts['requests']} requests",
            "with embeddings" if facts["embedding_size"] else "without embeddings",
        ]
    elif "decode_matrices" in facts:
        counts = [
            f"matrices of {facts['prefill_matrices']} prompts and {facts['decode_matrices']} answers",
            f"at most {facts['capacity']} each",
        ]
    else:
        counts = [f"learned of reuse from {facts['tokens']} tokens"]
    model = printable(facts["about"].get("model") or facts["identity"][:16])
    return in_brackets(model, str(file.header.shape), *counts, format_nbytes(facts["file_bytes"]), facts["file"])


def _report(file: LearnedFile[Any], facts: dict[str, Any]) -> str:
    """The facts of `info --json` under the same names, a line each."""
    told = {"identity": facts["identity"], **facts["about"]}
    lines = [(printable(name), printable(value)) for name, value in told.items() if value not in (None, "")]
    shown = {name: value for name, value in facts.items() if name not in ("identity", *_IN_HEADLINE)}
    for name, value in shown.items():
        if name == "coverage":
            lines += [_bound(bound, formula, facts) for bound, formula in zip(value, BOUNDS, strict=True)]
        elif value is not None:
            lines.append((name.replace("_", " "), _written(name, value)))
    width = max(len(name) for name, _ in lines)
    return "\n".join([_headline(file, facts), *(f"{name.ljust(width)}  {value}" for name, value in lines)])


_IN_HEADLINE = ("file", "about", "num_layers", "num_experts", "top_k", "file_bytes")


def _bound(bound: dict[str, Any], formula: str, facts: dict[str, Any]) -> tuple[str, str]:
    """How many maps or matrices suffice for whatever the model routes, and what share of them is here."""
    (kind,) = bound.keys() - {"similarity"}
    here = facts["maps"] if kind == "maps" else min(facts["prefill_matrices"], facts["decode_matrices"])
    share = format_share(here / bound[kind])
    what = f"whatever is routed, with {formula} = {bound[kind]} {kind}; here are {share} of them"
    return f"similar to {bound['similarity']:.0%}", what


def _written(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return format_nbytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{one} {_written(one, number)}" for one, number in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# -- build -------------------------------------------------------------------------------------------------------------


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
        "the model that the trace is of (a folder, a packed store, a hub id, or demo); without it"
        " no engine accepts the file",
        metavar="MODEL",
    )
    split: Any | None = option(
        None, "only the first part of the requests, as `simulate --split` divides them", metavar="7:3", type=split
    )
    seed: Any = option(0, "of the split's shuffle", metavar="N", type=seed)
    capacity: int | None = option(
        None, "most maps, or most matrices of prompts and of answers each; the most redundant are dropped", least=1
    )
    quota: Any | None = option(None, "the share of the maps that one request may fill", metavar="X", type=probability)
    distance: int | None = option(
        None,
        "layers ahead that maps predict; weighs embeddings by D/L where redundancy is measured",
        metavar="D",
        least=1,
    )
    json: bool = json_flag()


def build(args: LearnedBuildOptions) -> int:
    """Build from a recorded trace what fmoe or moe-infinity would have learned, as a file for --learned."""
    for name in ("quota", "distance"):
        if args.kind != "maps" and getattr(args, name) is not None:
            raise ConfigError(f"{name}={getattr(args, name)}: of no use with kind={args.kind!r}; accepted: kind=maps")
    trace = Trace.open(args.trace)
    identity = identity_of(args.model, trace)
    schedule = make_schedule(trace, Selection(split=args.split, seed=args.seed))
    spans: list[RowRange] = schedule.test if args.split is None else schedule.training
    num_rows = sum(span.num_rows for span in spans)
    source = f"{num_rows} tokens of {_num_requests(trace, spans)} requests of {args.trace}"
    learned: LearnedStore = _maps(args, trace, spans) if args.kind == "maps" else _matrices(args, trace, spans)
    _write(args.out, learned, identity, {"model": trace.manifest.model, "source": source, **origin()}, args.json)
    return 0


def _write(out: Path, learned: LearnedStore, identity: str, about: dict[str, Any], is_json: bool) -> None:
    """Write the file, read it back and print what it is."""
    save_learned(out, learned, identity, about)
    file = read_learned(out, type(learned))
    facts = facts_of(file)
    show(facts, is_json, lambda: _headline(file, facts))


def _shape(trace: Trace) -> ModelShape:
    layers = trace.manifest.layers
    return ModelShape(tuple(layer.num_experts for layer in layers), tuple(layer.top_k for layer in layers))


def _maps(args: LearnedBuildOptions, trace: Trace, spans: list[RowRange]) -> MapStore:
    shape, has_embeddings = _shape(trace), trace.is_real("embedding")
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
    options = EAMOptions(capacity=args.capacity or DEFAULT_CAPACITY["matrices"])
    predictor = EAM(_shape(trace).geometry(), options=options)
    for rows in _histories(trace, spans, predictor.wants):
        predictor.learn(rows)
    predictor.finish()
    return predictor.learned


def _histories(trace: Trace, spans: list[RowRange], wants: Collection[Want]) -> Iterator[History]:
    num_rows, total = 0, sum(span.num_rows for span in spans)
    with progress_bar("rows") as progress:
        for rows in histories(trace, spans, wants):
            yield rows
            num_rows += len(rows.requests)
            progress("building", num_rows, total)


def _num_requests(trace: Trace, spans: list[RowRange]) -> int:
    """Requests that the spans hold rows of."""
    if any(span.request is None for span in spans):
        return sum(request.num_rows > 0 for request in trace.requests)
    return len({span.request for span in spans})


# -- merge, export -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LearnedMergeOptions:
    out: Path = argument(REQUIRED, "the file to write; it may be one of those merged", metavar="OUT", type=Path)
    files: list[Path] = argument(
        REQUIRED, "files of one kind and model, older ones first", metavar="FILE...", type=Path, is_several=True
    )
    capacity: int | None = option(None, "most maps or matrices", least=1)
    json: bool = json_flag()


def merge(args: LearnedMergeOptions) -> int:
    """Merge files of maps, or of activation matrices, of one model into one file; the most redundant entries go.

    Of a single file, with --capacity: keep fewer of its entries.
    """
    first = read_learned(args.files[0], MapStore, Matrices)
    kind, identity, shape = type(first.learned), first.header.identity, first.header.shape
    files = [first, *(read_learned(path, kind, identity=identity, shape=shape) for path in args.files[1:])]
    _check_embeddings(files)
    capacity = args.capacity or max(file.learned.capacity for file in files)
    about = {**first.header.about, "source": f"merged from {', '.join(str(file.path) for file in files)}"}
    merged = first.learned.merged([file.learned for file in files], capacity)
    _write(args.out, merged, identity, about | {"created": origin()["created"]}, args.json)
    return 0


def _check_embeddings(files: Sequence[LearnedFile[Any]]) -> None:
    """Raises StoreError where two files have embeddings of different sizes."""
    known = None
    for file in files:
        if isinstance(file.learned, MapStore) and file.learned.embeddings is not None:
            size = file.learned.embeddings.shape[1]
            if known not in (None, size):
                raise StoreError(
                    f"{file.path}: tensor 'embeddings': {size} numbers each; those merged before have {known}"
                )
            known = size


@dataclass(frozen=True, kw_only=True)
class LearnedExportOptions:
    file: Path = argument(REQUIRED, "a file of maps or matrices", metavar="FILE", type=Path)
    out: Path = argument(
        REQUIRED,
        "an .npz: maps [L, C, E], chosen [C, L, K], requests, born, embeddings; or prefill, decode [C, L, E], "
        "prefill_born, decode_born",
        metavar="OUT",
        type=Path,
    )
    json: bool = json_flag()


def export(args: LearnedExportOptions) -> int:
    """Write maps or activation matrices as plain NumPy arrays, for other programs."""
    if args.out.suffix != ".npz":
        raise ConfigError(f"out={str(args.out)!r}: must end in .npz")
    file = read_learned(args.file, MapStore, Matrices)
    shape = file.header.shape
    arrays: dict[str, Any] = {
        **(file.learned.state() or {}),
        "num_experts": np.array(shape.num_experts),
        "top_k": np.array(shape.top_k),
        "identity": np.array(file.header.identity),
    }
    with disk_errors(args.out.parent, f"writing {args.out.name}", StoreError, ""), replacing(args.out) as out:
        np.savez(out, **arrays)
    nbytes = args.out.stat().st_size
    if args.json:
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        print_json({"file": str(args.file), "out": str(args.out), "bytes": nbytes, "arrays": shapes})
    else:
        what = f"{file.learned.num_learned} {file.learned.kind}"
        message(f"expertly: {args.out}: {what}, {format_nbytes(nbytes)}")
    return 0
