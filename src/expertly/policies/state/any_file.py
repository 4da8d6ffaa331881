"""Files of maps or of activation matrices, whichever they are."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

from expertly.core.errors import StoreError
from expertly.core.headers import header_bytes_of, header_metadata
from expertly.policies.predictor.eam.matrices import Matrices
from expertly.policies.predictor.fmoe.store import MapStore
from expertly.policies.state.file import MapsFile, save_maps
from expertly.policies.state.header import Facts, MapsHeader, MatricesHeader
from expertly.policies.state.matrices_file import MatricesFile, save_matrices
from expertly.policies.state.merge import merged, merged_matrices
from expertly.policies.state.metadata import KINDS

AnyFile = MapsFile | MatricesFile
AnyStore = MapStore | Matrices
_KINDS = (MapsHeader.kind, MatricesHeader.kind)


def read_any(path: Path, like: AnyFile | None = None) -> AnyFile:
    """A file of either kind; `like`: of the same kind and model as this one. Raises StoreError as they do, and for a
    file of another kind.
    """
    if like is not None:
        return type(like).read(path, like.header.identity, like.header.shape)
    found = format_of(path)
    if found in KINDS and found not in _KINDS:
        accepted = " or ".join(KINDS[name].holds for name in _KINDS)
        raise StoreError(f"{path}: format={found!r}: holds {KINDS[found].holds}; accepted: a file of {accepted}")
    kind: type[AnyFile] = MatricesFile if found == MatricesHeader.kind else MapsFile
    return kind.read(path)


def save_any(path: Path, store: AnyStore, identity: str, about: Facts | None = None) -> None:
    """See `save_maps` and `save_matrices`."""
    if isinstance(store, Matrices):
        save_matrices(path, store, identity, about)
    else:
        save_maps(path, store, identity, about)


def merged_any(stores: Sequence[AnyStore], capacity: int) -> AnyStore:
    """See `merged` and `merged_matrices`: stores of one kind."""
    matrices = [store for store in stores if isinstance(store, Matrices)]
    if matrices:
        assert len(matrices) == len(stores)
        return merged_matrices(matrices, capacity)
    return merged([store for store in stores if isinstance(store, MapStore)], capacity)


def format_of(path: Path) -> str | None:
    """What a file says that it is; None where it says nothing that can be understood."""
    with contextlib.suppress(OSError, StoreError):
        if stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for who writes it
            with FileIO(path) as file:
                return header_metadata(path, header_bytes_of(file, path, StoreError), StoreError).get("format")
    return None
