"""What others of the same model have learned, added to a store: the newest of what it does not know."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import StoreError
from expertly.policies.predictor.eam.matrices import Collection, Matrices
from expertly.policies.predictor.fmoe.store import MapStore
from expertly.policies.state.any_file import AnyStore
from expertly.policies.state.checks import check_state
from expertly.policies.state.matrices_file import check_phase

Arrays = Mapping[str, npt.NDArray[Any]]
"""What a store's `state` gives."""

_THEIRS = Path("what another has learned")
_PHASES = ("prefill", "decode")


def like(store: AnyStore, arrays: Arrays) -> AnyStore:
    """A store of what the arrays hold. Raises StoreError where they are not of this kind, of another model, or hold
    numbers that nobody can have learned.
    """
    missing = {*store.state()} - {"embeddings"} - {*arrays}
    if missing:
        raise StoreError(f"{_THEIRS}: array {min(missing)!r}: missing")
    if isinstance(store, Matrices):
        capacity = max(1, *(len(arrays[f"{phase}_born"]) for phase in _PHASES))
        prefill, decode = (
            Collection.from_state(store.shape, {"matrices": arrays[phase], "born": arrays[f"{phase}_born"]}, capacity)
            for phase in _PHASES
        )
        for phase in _PHASES:
            check_phase(_THEIRS, store.shape, phase, arrays[phase], arrays[f"{phase}_born"])
        return Matrices.of(prefill, decode)
    made = MapStore.from_state(store.shape, arrays, max(1, len(arrays["requests"])))
    check_state(_THEIRS, store.shape, arrays)
    own, given = store.embeddings, made.embeddings
    if own is not None and given is not None and own.shape[1] != given.shape[1]:
        raise StoreError(f"{_THEIRS}: embeddings of {given.shape[1]} numbers; must be {own.shape[1]}")
    return made


def digests_of(store: AnyStore) -> set[bytes]:
    """One of each map or matrix; equal ones have equal digests."""
    if isinstance(store, Matrices):
        return {digest for phase in (store.prefill, store.decode) for digest in _of_matrices(phase)}
    return set(_of_maps(store))


def absorb(store: AnyStore, other: AnyStore, known: Container[bytes], most: int) -> int:
    """Add what of `other` has a digest that is not in `known`, of all of it `most` at most, or as much as there is room
    for; the newest ones, the oldest of them first. How many these are.

    Requests of another are none of this store's: they are numbered down from its lowest.
    """
    if isinstance(store, Matrices):
        assert isinstance(other, Matrices)
        pairs = ((store.prefill, other.prefill), (store.decode, other.decode))
        return sum(_absorb_matrices(mine, theirs, known, most) for mine, theirs in pairs)
    assert isinstance(other, MapStore)
    most = max(most, store.capacity - store.num_maps)
    slots = _unknown(_of_maps(other), other.born[: other.num_maps], known, most)
    if len(slots):
        _, ranks = np.unique(other.requests[slots], return_inverse=True)
        lowest = int(store.requests[: store.num_maps].min(initial=0))
        store.add(
            other.maps[:, slots].transpose(1, 0, 2),
            other.chosen[slots],
            lowest - 1 - ranks.reshape(-1),
            None if other.embeddings is None else other.embeddings[slots],
        )
    return len(slots)


def _absorb_matrices(mine: Collection, theirs: Collection, known: Container[bytes], most: int) -> int:
    most = max(most, mine.capacity - mine.num_matrices)
    slots = _unknown(_of_matrices(theirs), theirs.born[: theirs.num_matrices], known, most)
    for slot in slots:
        mine.add(theirs.matrices[slot])
    return len(slots)


def _unknown(
    digests: list[bytes], born: npt.NDArray[np.int64], known: Container[bytes], most: int
) -> npt.NDArray[np.intp]:
    """Their slots, by age."""
    order = np.argsort(born, kind="stable")
    return np.array([slot for slot in order.tolist() if digests[slot] not in known][-most:], np.intp)


def _of_maps(store: MapStore) -> list[bytes]:
    """Not of embeddings: a store scales what it is given, so that they differ in the last digit."""
    maps = store.maps.astype(np.float16)
    return [_digest(maps[:, slot], store.chosen[slot]) for slot in range(store.num_maps)]


def _of_matrices(collection: Collection) -> list[bytes]:
    return [_digest(collection.matrices[slot]) for slot in range(collection.num_matrices)]


def _digest(*arrays: npt.NDArray[Any]) -> bytes:
    made = hashlib.blake2b(digest_size=16)
    for array in arrays:
        made.update(np.ascontiguousarray(array).tobytes())
    return made.digest()
