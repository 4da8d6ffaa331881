"""`expertly lab learned`: files of what systems learn while they run. Expert maps, by which fmoe predicts, and
activation matrices, by which moe-infinity does, are looked at, merged and exported; files of reuse are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.output import message, print_json, printable
from expertly.core.errors import ConfigError, StoreError
from expertly.core.units import format_nbytes, format_share
from expertly.options import REQUIRED, argument, json_flag, option

if TYPE_CHECKING:
    from expertly.policies.eviction.reuse import ReuseModel
    from expertly.policies.learned import Facts, LearnedFile, LearnedStore
    from expertly.policies.predictor.eam.matrices import Collection, Matrices
    from expertly.policies.predictor.fmoe.store import MapStore

_NUM_SAMPLED = 512
_BOUNDS = ("2 L E", "L E ln(L E) / 2")

Lines = list[tuple[str, str]]
"""What, and what is to be said of it."""


@dataclass(frozen=True, kw_only=True)
class LearnedInfoOptions:
    file: Path = argument(REQUIRED, "a file of maps, matrices or reuse", metavar="FILE", type=Path)
    json: bool = json_flag()


def info(args: LearnedInfoOptions) -> int:
    """What a file of maps, matrices or reuse holds, and how much of what the model routes it covers."""
    from expertly.policies.eviction.reuse import ReuseModel
    from expertly.policies.learned import kind_of
    from expertly.policies.predictor.fmoe.store import MapStore, coverage_bounds

    if kind_of(args.file) == ReuseModel.kind:
        _print_reuse(args.file, args.json)
        return 0
    file = read_stores(args.file)
    is_maps = isinstance(file.learned, MapStore)
    facts = facts_of(file) | (_similarity(file) if is_maps else {})
    facts["coverage"] = [
        {"similarity": bound.similarity, "maps" if is_maps else "matrices": bound.num_maps}
        for bound in coverage_bounds(file.header.shape)
    ]
    if args.json:
        print_json(facts)
        return 0
    lines = [("identity", printable(facts["identity"]))]
    lines += [(printable(name), printable(value)) for name, value in facts["about"].items() if value not in (None, "")]
    lines += _maps_lines(facts) if is_maps else _matrices_lines(facts)
    width = max(len(name) for name, _ in lines)
    print("\n".join([headline(file), *(f"{name.ljust(width)}  {value}" for name, value in lines)]))
    return 0


def _similarity(file: LearnedFile[Any]) -> dict[str, Any]:
    from expertly.policies.predictor.fmoe.store import mean_similarities

    of_maps, of_embeddings = mean_similarities(file.learned, _NUM_SAMPLED)
    return {
        "mean_similarity": of_maps,
        "mean_embedding_similarity": of_embeddings,
        "sampled_maps": min(_NUM_SAMPLED, file.learned.num_maps),
    }


def _maps_lines(facts: dict[str, Any]) -> Lines:
    num_maps = facts["maps"]
    requests = f"{facts['requests']}, of each at most {facts['max_maps_of_request']} maps"
    lines = [("maps", f"{num_maps} of at most {facts['capacity']}"), ("requests", requests)]
    for bound, formula in zip(facts["coverage"], _BOUNDS, strict=True):
        share = format_share(num_maps / bound["maps"])
        label = f"similar to {bound['similarity']:.0%}"
        lines.append((label, f"any iteration, with {formula} = {bound['maps']} maps; here are {share} of them"))
    of_maps, of_embeddings = _number(facts["mean_similarity"]), _number(facts["mean_embedding_similarity"])
    alike = f"{of_maps} of two maps, {of_embeddings} of their embeddings; of {facts['sampled_maps']} maps"
    lines.append(("mean cosine", alike))
    for name in ("maps", "embeddings"):
        here, full = (format_nbytes(facts[key]) for key in (f"{name}_bytes", f"full_{name}_bytes"))
        lines.append((f"memory of {name}", f"{here}, {full} when it is full"))
    return lines


def _matrices_lines(facts: dict[str, Any]) -> Lines:
    lines = []
    for phase in ("prefill", "decode"):
        num = facts[f"{phase}_matrices"]
        lines.append((phase, f"{num} of at most {facts['capacity']} matrices, {facts[f'{phase}_tokens']} tokens"))
        for bound, formula in zip(facts["coverage"], _BOUNDS, strict=True):
            share = format_share(num / bound["matrices"])
            label = f"  similar to {bound['similarity']:.0%}"
            lines.append((label, f"any request, with {formula} = {bound['matrices']} of them; here are {share}"))
    here, full = format_nbytes(facts["matrices_bytes"]), format_nbytes(facts["full_matrices_bytes"])
    return [*lines, ("memory", f"{here}, {full} when both are full")]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _print_reuse(path: Path, is_json: bool) -> None:
    """Raises StoreError as read_learned."""
    from expertly.policies.eviction.reuse import ReuseModel
    from expertly.policies.learned import read_learned

    file = read_learned(path, ReuseModel)
    facts = _facts_of_reuse(file)
    if is_json:
        print_json(facts)
        return
    model = printable(file.header.about.get("model") or file.header.identity[:16])
    learned = f"learned of reuse from {facts['tokens']} tokens"
    parts = [model, str(file.header.shape), learned, format_nbytes(file.nbytes), str(path)]
    lines = [("identity", printable(file.header.identity))]
    lines += [
        (printable(name), printable(value)) for name, value in file.header.about.items() if value not in (None, "")
    ]
    each = ", ".join(f"{name} {value:.4g}" for name, value in facts["meaning"].items())
    lines.append(("weights", f"{facts['weights']} of {facts['experts']} experts: {each}"))
    width = max(len(name) for name, _ in lines)
    print("\n".join(["[" + " | ".join(parts) + "]", *(f"{name.ljust(width)}  {value}" for name, value in lines)]))


def _facts_of_reuse(file: LearnedFile[ReuseModel]) -> dict[str, Any]:
    """For --json."""
    from expertly.policies.eviction.reuse import MEANING, num_weights

    return {
        "file": str(file.path),
        "identity": file.header.identity,
        "about": dict(file.header.about),
        "num_layers": file.header.shape.num_layers,
        "num_experts": list(file.header.shape.num_experts),
        "top_k": list(file.header.shape.top_k),
        "experts": sum(file.header.shape.num_experts),
        "tokens": file.learned.num_learned,
        "weights": num_weights(file.header.shape.num_experts),
        "meaning": dict(MEANING),
        "file_bytes": file.nbytes,
    }


@dataclass(frozen=True, kw_only=True)
class LearnedMergeOptions:
    out: Path = argument(REQUIRED, "the file to write; it may be one of those merged", metavar="OUT", type=Path)
    files: list[Path] = argument(
        REQUIRED, "files of one kind and model, older ones first", metavar="FILE...", type=Path, is_several=True
    )
    capacity: int | None = option(None, "maps at most", metavar="N", type=int, least=1)
    json: bool = json_flag()


def merge(args: LearnedMergeOptions) -> int:
    """One file of the maps or activation matrices of several, of one model; redundant ones go.

    Of one file and with --capacity: fewer of them.
    """
    first = read_stores(args.files[0])
    files = [first, *(read_stores(path, first) for path in args.files[1:])]
    _check_embeddings(files)
    capacity = args.capacity or max(file.learned.capacity for file in files)
    sources = ", ".join(str(file.path) for file in files)
    about = {**first.header.about, "source": f"merged from {sources}"}
    write_file(
        args.out,
        first.learned.merged([file.learned for file in files], capacity),
        first.header.identity,
        about,
        args.json,
    )
    return 0


def _check_embeddings(files: Sequence[LearnedFile[Any]]) -> None:
    """Raises StoreError where two files have embeddings of different sizes."""
    from expertly.policies.predictor.fmoe.store import MapStore

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
    """The maps, or activation matrices, as plain NumPy arrays, for other programs."""
    import numpy as np

    from expertly.core.files import disk_errors, replacing

    if args.out.suffix != ".npz":
        raise ConfigError(f"out={str(args.out)!r}: must end in .npz")
    file = read_stores(args.file)
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


def read_stores(path: Path, like: LearnedFile[Any] | None = None) -> LearnedFile[Any]:
    """A file of maps or of activation matrices; `like`: of the same kind and model as this one. Raises StoreError."""
    from expertly.policies.learned import read_learned
    from expertly.policies.predictor.eam.matrices import Matrices
    from expertly.policies.predictor.fmoe.store import MapStore

    if like is not None:
        return read_learned(path, type(like.learned), identity=like.header.identity, shape=like.header.shape)
    return read_learned(path, MapStore, Matrices)


def write_file(out: Path, store: LearnedStore, identity: str, about: Facts, is_json: bool) -> None:
    """Write the file, read it back and print what it is."""
    from expertly.policies.learned import save_learned

    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    save_learned(out, store, identity, {**about, "created": created})
    file = read_stores(out)
    if is_json:
        print_json(facts_of(file))
    else:
        print(headline(file))


def facts_of(file: LearnedFile[Any]) -> dict[str, Any]:
    """For --json. Bytes are those of what is stored in memory, and of what is full."""
    from expertly.policies.predictor.eam.matrices import Matrices

    store, shape = file.learned, file.header.shape
    return {
        "file": str(file.path),
        "identity": file.header.identity,
        "about": dict(file.header.about),
        "num_layers": shape.num_layers,
        "num_experts": list(shape.num_experts),
        "top_k": list(shape.top_k),
        **(_of_matrices(store) if isinstance(store, Matrices) else _of_maps(store)),
        "file_bytes": file.nbytes,
    }


def headline(file: LearnedFile[Any]) -> str:
    """One line."""
    facts = facts_of(file)
    counts: tuple[str, ...]
    if "maps" in facts:
        counts = (
            f"{facts['maps']} of at most {facts['capacity']} maps",
            f"{facts['requests']} requests",
            "with embeddings" if facts["embedding_size"] else "without embeddings",
        )
    else:
        counts = (
            f"matrices of {facts['prefill_matrices']} prompts and {facts['decode_matrices']} answers",
            f"at most {facts['capacity']} each",
        )
    model = printable(facts["about"].get("model") or facts["identity"][:16])
    parts = [model, str(file.header.shape), *counts, format_nbytes(facts["file_bytes"]), facts["file"]]
    return "[" + " | ".join(parts) + "]"


def _of_maps(store: MapStore) -> dict[str, Any]:
    hidden_size = 0 if store.embeddings is None else store.embeddings.shape[1]
    maps_nbytes, embeddings_nbytes = store.nbytes_of(store.shape, store.num_maps, hidden_size)
    full_maps_nbytes, full_embeddings_nbytes = store.nbytes_of(store.shape, store.capacity, hidden_size)
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
    }


def _of_matrices(store: Matrices) -> dict[str, Any]:
    nbytes_each = 8 * store.shape.num_layers * store.shape.max_experts
    return {
        "prefill_matrices": store.prefill.num_matrices,
        "decode_matrices": store.decode.num_matrices,
        "prefill_tokens": _num_tokens(store.prefill),
        "decode_tokens": _num_tokens(store.decode),
        "capacity": store.capacity,
        "matrices_bytes": nbytes_each * store.num_matrices,
        "full_matrices_bytes": nbytes_each * 2 * store.capacity,
    }


def _num_tokens(collection: Collection) -> int:
    """That it counts: of a model of two stacks, in the layers that most of them ran."""
    choices = collection.total.sum(axis=1).tolist()
    return max(num // top_k for num, top_k in zip(choices, collection.shape.top_k, strict=True))
