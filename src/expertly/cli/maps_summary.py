"""What every `expertly maps` command says of a file, and how one that it makes is written."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.output import format_nbytes, print_json

if TYPE_CHECKING:
    from expertly.maps.file import MapsFile
    from expertly.maps.header import Facts
    from expertly.policies.maps.store import MapStore


def write_maps(out: Path, store: MapStore, identity: str, about: Facts, is_json: bool) -> None:
    """Write the file, read it back and print what it is."""
    from expertly.maps.file import MapsFile, save_maps

    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    save_maps(out, store, identity, {**about, "created": created})
    file = MapsFile.read(out, identity, store.shape)
    if is_json:
        print_json(maps_facts(file))
    else:
        print(headline(file))


def maps_facts(file: MapsFile) -> dict[str, Any]:
    """For --json. Bytes are those of the stored maps in memory, and of a full store."""
    store, shape = file.store, file.header.shape
    hidden_size = 0 if store.embeddings is None else store.embeddings.shape[1]
    maps_nbytes, embeddings_nbytes = store.nbytes_of(shape, store.num_maps, hidden_size)
    return {
        "file": str(file.path),
        "identity": file.header.identity,
        "about": dict(file.header.about),
        "num_layers": shape.num_layers,
        "num_experts": list(shape.num_experts),
        "top_k": list(shape.top_k),
        "embedding_size": hidden_size or None,
        "maps": store.num_maps,
        "capacity": store.capacity,
        "requests": len(store.num_of_request),
        "max_maps_of_request": store.max_of_request,
        "semantic_weight": store.semantic_weight,
        "maps_bytes": maps_nbytes,
        "embeddings_bytes": embeddings_nbytes,
        "full_maps_bytes": store.maps_nbytes,
        "full_embeddings_bytes": store.embeddings_nbytes,
        "file_bytes": file.nbytes,
    }


def headline(file: MapsFile) -> str:
    """One line."""
    from expertly.maps.header import describe

    facts = maps_facts(file)
    parts = [
        printable(facts["about"].get("model") or facts["identity"][:16]),
        describe(file.header.shape),
        f"{facts['maps']} of at most {facts['capacity']} maps",
        f"{facts['requests']} requests",
        "with embeddings" if facts["embedding_size"] else "without embeddings",
        format_nbytes(facts["file_bytes"]),
        facts["file"],
    ]
    return "[" + " | ".join(parts) + "]"


def printable(value: object) -> str:
    """What a file says, so that a terminal shows it and does not obey it."""
    text = str(value)
    return text if text.isprintable() else repr(text)
