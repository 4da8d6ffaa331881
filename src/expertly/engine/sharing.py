"""Between a predictor that learns and others of the same model: what it has learned goes out, theirs comes in.

Whoever carries it between machines is not known here, and never waited for.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy.typing as npt

from expertly.policies.predictor.eam import EAM
from expertly.policies.predictor.fmoe import FMoE
from expertly.policies.state.any_file import AnyStore
from expertly.policies.state.sharing import Arrays, absorb, digests_of, like

MAX_TAKEN = 256
"""Of one other at a time, where the store is full: each is compared with all that is there, and predictions wait."""

_REMEMBERED = 16
"""Times the capacity of the store: so many maps or matrices are not taken again when they have gone from it."""


class Sharing:
    """`exchange` is called where the predictor runs, the rest by any thread."""

    def __init__(self, predictor: FMoE | EAM) -> None:
        self.num_taken = 0
        """Maps or matrices of others."""
        self._predictor = predictor
        self._lock = threading.Lock()
        self._given: dict[str, AnyStore] = {}
        self._told: dict[str, npt.NDArray[Any]] | None = None
        self._told_generation: int | None = None
        self._seen: dict[bytes, None] = {}  # ever here, or told by others; the newest are last

    def give(self, other: str, arrays: Arrays) -> None:
        """What another has learned, `state` of its store, to be taken by the next `exchange`. Raises StoreError where
        it is of another model, or kind.
        """
        made = like(self._predictor.store, arrays)
        with self._lock:
            self._given[other] = made

    def take(self) -> dict[str, npt.NDArray[Any]] | None:
        """What this one has learned, where that has changed since it was taken last."""
        with self._lock:
            told, self._told = self._told, None
        return told

    def exchange(self) -> None:
        """Take what was given, tell what is known. What others have had from here does not come back.

        A pass that runs is not learned from: what was found for it is of the store as it was.
        """
        store = self._predictor.store
        with self._lock:
            given, self._given = self._given, {}
        if given and (num_taken := self._absorb(store, given)):
            self.num_taken += num_taken
            self._predictor.store = store
        if store.generation != self._told_generation and (known := digests_of(store)):
            self._told_generation = store.generation
            self._remember(known, store.capacity)
            told = {name: array.copy() for name, array in store.state().items()}
            with self._lock:
                self._told = told

    def _absorb(self, store: AnyStore, given: dict[str, AnyStore]) -> int:
        self._remember(digests_of(store), store.capacity)
        num_taken = 0
        for theirs in given.values():
            num_taken += absorb(store, theirs, self._seen, MAX_TAKEN)
            self._remember(digests_of(theirs), store.capacity)
        return num_taken

    def _remember(self, digests: set[bytes], capacity: int) -> None:
        for digest in digests:
            self._seen.pop(digest, None)
        self._seen.update(dict.fromkeys(sorted(digests)))
        for digest in list(self._seen)[: -_REMEMBERED * capacity]:
            del self._seen[digest]
