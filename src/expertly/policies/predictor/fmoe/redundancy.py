"""Where new maps go in a full store: each replaces the stored map most redundant to it (fMoE, section 4.4). All in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from expertly.core.observation import Floats
from expertly.policies.predictor.similarity import TIE, inverse_root

if TYPE_CHECKING:
    from expertly.policies.predictor.fmoe.store import MapStore

MAX_SCORES = 1 << 22
"""Redundancy scores that are held at a time."""


def through_float16(values: Floats) -> Floats:
    """Values rounded to float16, as float32 in C order."""
    return np.ascontiguousarray(values, np.float16).astype(np.float32)


def unit_rows(rows: Floats) -> Floats:
    """Rows scaled to length 1; zeros stay."""
    rows = np.asarray(rows, np.float32)
    unit: Floats = rows * inverse_root(np.einsum("th,th->t", rows, rows))[:, None]
    return unit


Slots = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Incoming:
    """T maps in the form in which a store keeps them."""

    scores: Floats  # [L, T, E]
    chosen: npt.NDArray[np.uint16]  # [T, L, K]
    requests: npt.NDArray[np.int64]  # [T]
    embedding: Floats | None  # [T, H]
    order: npt.NDArray[np.int64]  # [T] 0 to T-1


def place(store: MapStore, incoming: Incoming, semantic: Floats | None, trajectory: Floats | None) -> None:
    """Put all rows into the store, as if one after the other. `semantic` and `trajectory` [T, num_maps]: cosines to the
    stored maps, where they are known.
    """
    placement = _Placement(store, incoming, semantic, trajectory)
    row = 0
    while (row := placement.fill(row)) < len(incoming.requests):
        row = placement.replace(row)


class _Placement:
    """Places rows in order. The scores of many rows are computed at once, and updated where a row took a place."""

    def __init__(self, store: MapStore, incoming: Incoming, semantic: Floats | None, trajectory: Floats | None) -> None:
        self._store = store
        self._incoming = incoming
        self._semantic = semantic
        self._trajectory = trajectory
        self._is_new = np.zeros(store.num_maps, np.bool_)  # of stored maps: since `semantic` and `trajectory`
        self._requests: list[int] = incoming.requests.tolist()
        self._weight = 0.0 if incoming.embedding is None else store.semantic_weight

    @cached_property
    def _inverse(self) -> Floats:
        """[T] 1 / length of the incoming scores."""
        scores = self._incoming.scores
        return inverse_root(np.einsum("lte,lte->t", scores, scores))

    @cached_property
    def _inverse_embedding(self) -> Floats:
        """[T] 1 / length of the incoming embeddings."""
        embedding = self._incoming.embedding
        assert embedding is not None
        return inverse_root(np.einsum("th,th->t", embedding, embedding))

    def fill(self, first: int) -> int:
        """Rows from `first` on take free places as long as they may; returns the first row that may not."""
        store, count, limit = self._store, self._store.num_of_request, self._store.max_of_request
        row, num_free = first, store.capacity - store.num_maps
        while row < len(self._requests) and row - first < num_free and count[self._requests[row]] < limit:
            count[self._requests[row]] += 1
            row += 1
        if row > first:
            store.write(np.arange(store.num_maps, store.num_maps + row - first), self._incoming, slice(first, row))
            store.num_maps += row - first
            self._is_new = np.concatenate([self._is_new, np.ones(row - first, np.bool_)])
        return row

    def replace(self, first: int) -> int:
        """Place some rows from `first` on, each by redundancy; returns the first row that is left."""
        store, limit, count = self._store, self._store.max_of_request, self._store.num_of_request
        last = min(len(self._requests), first + min(256, max(16, MAX_SCORES // store.num_maps)))
        requests = self._requests[first:last]
        columns: Slots = np.arange(store.num_maps)
        num_free = min(store.capacity - store.num_maps, last - first)
        if all(count[request] >= limit for request in requests):  # then each stays among its own
            num_free = 0
            stored, own = store.requests[: store.num_maps], list(set(requests))
            columns = np.flatnonzero(stored == own[0] if len(own) == 1 else np.isin(stored, own))
        num_known = len(columns)
        columns = np.concatenate([columns, np.arange(store.num_maps, store.num_maps + num_free)])
        scores = np.full((last - first, num_known + num_free), -np.inf, np.float32)
        scores[:, :num_known] = self._scores(slice(first, last), columns[:num_known])
        among = self._among(slice(first, last))
        owners, ages = store.requests[columns], store.born[columns]
        filled_by = np.full(len(columns), -1)
        num_filled = num_known
        for row, request in enumerate(requests):
            if count[request] >= limit:
                mine = np.flatnonzero(owners[:num_filled] == request)
                column = int(mine[_oldest_of_best(scores[row, mine], ages[mine])])
            elif num_filled < len(columns):
                column = num_filled
                num_filled += 1
                count[request] += 1
            else:
                column = _oldest_of_best(scores[row], ages)
                self._forget(int(owners[column]))
                count[request] += 1
            owners[column] = request
            ages[column] = np.iinfo(np.int64).max - len(requests) + row  # newer than all that were here
            filled_by[column] = row
            scores[row + 1 :, column] = among[row + 1 :, row]
        store.num_maps += num_filled - num_known
        written = np.flatnonzero(filled_by >= 0)
        store.write(columns[written], self._incoming, first + filled_by[written])
        self._is_new = np.concatenate([self._is_new, np.ones(num_filled - num_known, np.bool_)])
        self._is_new[columns[written]] = True
        return last

    def _forget(self, request: int) -> None:
        count = self._store.num_of_request
        count[request] -= 1
        if not count[request]:
            del count[request]

    def _scores(self, rows: slice, columns: Slots) -> Floats:
        """Redundancy of incoming rows to stored maps, [rows, columns]."""
        trajectory = self._part(self._trajectory, self._trajectories, rows, columns)
        if not self._weight:
            return trajectory
        semantic = self._part(self._semantic, self._semantics, rows, columns)
        weighted: Floats = self._weight * semantic + (1 - self._weight) * trajectory
        return weighted

    def _part(
        self, known: Floats | None, compute: Callable[[slice, Slots], Floats], rows: slice, columns: Slots
    ) -> Floats:
        if known is None:
            return compute(rows, columns)
        is_new = self._is_new[columns]
        if not is_new.any():
            return known[rows] if len(columns) == known.shape[1] else known[rows][:, columns]
        part = np.empty((rows.stop - rows.start, len(columns)), np.float32)
        part[:, ~is_new] = known[rows][:, columns[~is_new]]
        part[:, is_new] = compute(rows, columns[is_new])
        return part

    def _trajectories(self, rows: slice, columns: Slots) -> Floats:
        store, scores = self._store, self._incoming.scores[:, rows]
        where = _as_slice(columns)
        cosines: Any = 0.0
        for layer in range(len(scores)):
            cosines = cosines + scores[layer] @ store.maps[layer, where].T
        product: Floats = cosines * self._inverse[rows, None] * store.inverse_norms[-1, columns]
        return product

    def _semantics(self, rows: slice, columns: Slots) -> Floats:
        store, embedding = self._store, self._incoming.embedding
        assert embedding is not None and store.embeddings is not None
        cosines = embedding[rows] @ store.embeddings[_as_slice(columns)].T
        product: Floats = cosines * self._inverse_embedding[rows, None] * store.inverse_embedding_norms[columns]
        return product

    def _among(self, rows: slice) -> Floats:
        """Redundancy of incoming rows to each other, [rows, rows]."""
        if rows.stop - rows.start == 1:
            return np.empty((1, 1), np.float32)
        scores, inverse = self._incoming.scores[:, rows], self._inverse[rows]
        trajectory: Floats = np.matmul(scores, scores.transpose(0, 2, 1)).sum(axis=0) * inverse[:, None] * inverse
        if not self._weight or self._incoming.embedding is None:
            return trajectory
        embedding, inverse = self._incoming.embedding[rows], self._inverse_embedding[rows]
        semantic = embedding @ embedding.T * inverse[:, None] * inverse
        weighted: Floats = self._weight * semantic + (1 - self._weight) * trajectory
        return weighted


def _as_slice(columns: Slots) -> slice | Slots:
    """A slice where `columns` are all rows from the first on, which needs no copy; otherwise `columns`."""
    n = len(columns)
    return slice(0, n) if n and columns[-1] == n - 1 else columns


def _oldest_of_best(scores: Floats, ages: npt.NDArray[np.int64]) -> int:
    """The lowest age among the highest scores, which are equal up to rounding."""
    best = np.flatnonzero(scores >= scores.max() - TIE)
    return int(best[0] if len(best) == 1 else best[ages[best].argmin()])
