"""The file of a map store: see `maps.sealed`. Its header names the model that the maps are of, so that a file of one
model is never taken for one of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from expertly.core.errors import StoreError
from expertly.core.headers import TensorInfo
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.fmoe.store import MapStore
from expertly.policies.state.checks import check_state
from expertly.policies.state.header import Facts, MapsHeader, check_model
from expertly.policies.state.sealed import Shape, num_of, read_sealed, write_sealed

DTYPES = {"born": "I64", "requests": "I64", "chosen": "U16", "maps": "F16", "embeddings": "F16"}
"""The tensors, in file order: [C], [C], [C, L, K], [L, C, E], [C, H], of C maps. `embeddings` may be missing."""

MAX_EMBEDDING = 1 << 20


@dataclass(frozen=True, slots=True)
class MapsFile:
    """A maps file that has been read whole."""

    path: Path
    header: MapsHeader
    nbytes: int  # of the file
    store: MapStore

    @classmethod
    def read(cls, path: Path, identity: str | None = None, shape: ModelShape | None = None) -> MapsFile:
        """Read and check everything. `identity` and `shape` are what the maps must be of; None: whatever they are.

        Requests are numbered down from -1, so that none of them is one that a running model counts up from 0.
        Raises StoreError naming the file and the field: a file that is missing, truncated, altered, of another format
        or version, of another model, or holds numbers that no map can.
        """
        header, arrays, nbytes = read_sealed(path, DTYPES, ("embeddings",), partial(_parse, path, identity, shape))
        check_state(path, header.shape, arrays)
        arrays["requests"] = _numbered_down(arrays["requests"])
        try:
            store = MapStore.from_state(
                header.shape,
                arrays,
                header.capacity,
                semantic_weight=header.semantic_weight,
                quota=header.quota,
            )
        except MemoryError:
            raise StoreError(f"{path}: capacity={header.capacity}: not enough memory for so many maps") from None
        return cls(path, header, nbytes, store)


def load_maps(path: str | Path, identity: str | None = None, shape: ModelShape | None = None) -> MapStore:
    """The store in a maps file; see `MapsFile.read`."""
    return MapsFile.read(Path(path), identity, shape).store


def save_maps(path: str | Path, store: MapStore, identity: str, about: Facts | None = None) -> None:
    """Replace the file at `path` by one of all maps of `store`, which must not change meanwhile.

    `identity` is the model's (the packed store's manifest has it), `about` whatever else the file shall say of itself.
    After a crash the file is what it was before. Raises StoreError where it cannot be written, or holds numbers that
    no map can.
    """
    path = Path(path)
    check_state(path, store.shape, store.state())
    header = MapsHeader(identity, store.shape, store.capacity, store.semantic_weight, store.quota, dict(about or {}))
    write_sealed(path, DTYPES, store.state(), header.metadata)


def _parse(
    path: Path, identity: str | None, shape: ModelShape | None, raw: bytes, infos: Mapping[str, TensorInfo]
) -> tuple[MapsHeader, dict[str, Shape]]:
    """The header, and the shapes of the tensors."""
    header = MapsHeader.parse(path, raw)
    check_model(path, header, identity, shape)
    num_layers, width, top_k = header.shape.num_layers, header.shape.max_experts, header.shape.max_top_k
    num_maps = num_of(path, infos, "born", "map")
    if num_maps > header.capacity:
        raise StoreError(f"{path}: tensor 'born': {num_maps} maps, more than the capacity={header.capacity}")
    hidden_size = infos["embeddings"].shape[-1:] if "embeddings" in infos else ()
    if hidden_size and not 1 <= hidden_size[0] <= MAX_EMBEDDING:
        raise StoreError(f"{path}: tensor 'embeddings': {hidden_size[0]} numbers each; must be 1 to {MAX_EMBEDDING}")
    return header, {
        "born": (num_maps,),
        "requests": (num_maps,),
        "chosen": (num_maps, num_layers, top_k),
        "maps": (num_layers, num_maps, width),
        "embeddings": (num_maps, *hidden_size),
    }


def _numbered_down(requests: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The same groups, numbered -1, -2, ..."""
    _, ranks = np.unique(requests, return_inverse=True)
    return -1 - ranks.reshape(-1).astype(np.int64)
