"""What every `expertly maps` command says of a file, of maps or of activation matrices, and how one that it makes is
written.
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.output import format_nbytes, print_json, printable

if TYPE_CHECKING:
    from expertly.policies.learned import Facts, LearnedFile, LearnedStore
    from expertly.policies.predictor.eam.matrices import Collection, Matrices
    from expertly.policies.predictor.fmoe.store import MapStore


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
