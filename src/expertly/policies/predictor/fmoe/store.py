"""The expert map store: routing scores of past iterations, the least redundant ones (fMoE, sections 4.1 and 4.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError, StoreError
from expertly.core.observation import Floats, Ids
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.fmoe.redundancy import Incoming, inverse_root, place, through_float16, unit_rows

NONE = 0xFFFF
"""Where `chosen` names no expert."""

MAX_CAPACITY = 1 << 20
MAX_NBYTES = 1 << 36
"""Of a full store in memory, without embeddings: a spec or a file of a few bytes must not take all there is."""


class MapStore:
    """Maps of up to `capacity` iterations. Rows below `num_maps` are filled; arrays are not to be written to.

    `semantic_weight` is d/L of the redundancy score, from 0 to 1; `quota` the share of the capacity that one request
    may fill, above 0 up to 1. Raises ConfigError.
    """

    def __init__(
        self, shape: ModelShape, capacity: int = 1000, *, semantic_weight: float = 0.0, quota: float = 0.125
    ) -> None:
        if not 1 <= capacity <= MAX_CAPACITY:
            raise ConfigError(f"capacity={capacity}: must be from 1 to {MAX_CAPACITY} maps")
        nbytes = capacity * shape.num_layers * (4 * shape.max_experts + 2 * shape.max_top_k)
        if nbytes > MAX_NBYTES:
            raise ConfigError(f"capacity={capacity}: maps of {nbytes} bytes; at most {MAX_NBYTES} are accepted")
        if not 0 <= semantic_weight <= 1:
            raise ConfigError(f"semantic_weight={semantic_weight}: must be from 0 to 1")
        if not 0 < quota <= 1:
            raise ConfigError(f"quota={quota}: must be above 0, up to 1")
        self.shape = shape
        self.capacity = capacity
        self.semantic_weight = semantic_weight
        self.quota = quota
        self.num_maps = 0
        self.generation = 0
        """Counts changes."""
        num_layers, num_experts = shape.num_layers, shape.max_experts
        # Zeroed pages take no memory before they are written to.
        self.maps: Floats = np.zeros((num_layers, capacity, num_experts), np.float32)
        """[L, C, E]: scores rounded through float16, so that a file in float16 loses nothing."""
        self.embeddings: Floats | None = None
        """[C, H] of unit length, then rounded through float16; zeros for a map without. None before the first one."""
        self.chosen: npt.NDArray[np.uint16] = np.full((capacity, num_layers, shape.max_top_k), NONE, np.uint16)
        """[C, L, K]: the experts that the router chose; 0xFFFF is none."""
        self.requests: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.born: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)
        """[C]: counts insertions, so the highest is the newest."""
        self.squares: Floats = np.zeros((num_layers, capacity), np.float32)
        """[L, C]: squared length of a map's layer."""
        self.inverse_norms: Floats = np.zeros((num_layers, capacity), np.float32)
        """[L, C]: 1 / length of a map's layers up to this one; 0 where all are zero."""
        self.inverse_embedding_norms: Floats = np.zeros(capacity, np.float32)
        """[C]: 1 / length of the rounded embedding; 0 where there is none."""
        self.num_of_request: Counter[int] = Counter()
        self._num_added = 0

    @property
    def max_of_request(self) -> int:
        """Maps that one request may fill."""
        return max(1, int(self.quota * self.capacity))

    def add(
        self,
        scores: Floats,
        chosen: Ids,
        requests: npt.NDArray[np.int64],
        embedding: Floats | None = None,
        semantic: Floats | None = None,
        trajectory: Floats | None = None,
    ) -> None:
        """Add maps of T iterations, one after the other: scores [T, L, E], chosen [T, L, K], requests [T], embedding
        [T, H].

        While there is room a map takes a free row; then the place of the stored one that is most redundant to it
        (the oldest of equals); a request at its quota replaces the most redundant of its own. `semantic` and
        `trajectory` [T, num_maps] are the cosines to the stored maps where they are known already; the store must not
        have changed since. Rows that are not finite are left out. Raises ConfigError where a shape is not the model's.
        """
        self._check(scores, chosen, requests, embedding)
        is_finite = np.isfinite(scores.reshape(len(scores), scores.shape[1] * scores.shape[2])).all(axis=1)
        if embedding is not None:
            is_finite = is_finite & np.isfinite(embedding).all(axis=1)
        if not is_finite.all():
            scores, chosen, requests = scores[is_finite], chosen[is_finite], requests[is_finite]
            embedding = None if embedding is None else embedding[is_finite]
            semantic = None if semantic is None else semantic[is_finite]
            trajectory = None if trajectory is None else trajectory[is_finite]
        if not len(requests):
            return
        incoming = self._prepare(scores, chosen, requests, embedding)
        if semantic is not None and self.embeddings is None:
            semantic = None
        if incoming.embedding is not None and self.embeddings is None:
            self.embeddings = np.zeros((self.capacity, incoming.embedding.shape[1]), np.float32)
        place(self, incoming, semantic, trajectory)
        self.generation += 1

    def extend(self, other: MapStore) -> None:
        """Add all maps of another store, the oldest first: to merge stores, or to make one smaller."""
        order = np.argsort(other.born[: other.num_maps], kind="stable")
        self.add(
            other.maps[:, order].transpose(1, 0, 2),
            other.chosen[order],
            other.requests[order],
            None if other.embeddings is None else other.embeddings[order],
        )

    def request_counts(self, request: int) -> npt.NDArray[np.int64]:
        """How often each expert was chosen in this request's stored iterations, [L, E] (section 4.1)."""
        mine = np.flatnonzero(self.requests[: self.num_maps] == request)
        counts = np.zeros((self.shape.num_layers, self.shape.max_experts), np.int64)
        for layer in range(self.shape.num_layers):
            ids = self.chosen[mine, layer].ravel()
            counts[layer] = np.bincount(ids[ids != NONE], minlength=self.shape.max_experts)
        return counts

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """The filled part: maps [L, n, E], chosen [n, L, K], requests [n], born [n], and embeddings [n, H] if any."""
        n = self.num_maps
        state: dict[str, npt.NDArray[Any]] = {
            "maps": self.maps[:, :n],
            "chosen": self.chosen[:n],
            "requests": self.requests[:n],
            "born": self.born[:n],
        }
        if self.embeddings is not None:
            state["embeddings"] = self.embeddings[:n]
        return state

    @classmethod
    def from_state(
        cls,
        shape: ModelShape,
        arrays: Mapping[str, npt.NDArray[Any]],
        capacity: int = 1000,
        *,
        semantic_weight: float = 0.0,
        quota: float = 0.125,
    ) -> MapStore:
        """The inverse of `state`. Raises StoreError where arrays do not fit the shape, each other or the capacity."""
        store = cls(shape, capacity, semantic_weight=semantic_weight, quota=quota)
        for name in ("maps", "chosen", "requests", "born"):
            if name not in arrays:
                raise StoreError(f"map store: array '{name}' is missing")
        n = len(arrays["requests"])
        if n > capacity:
            raise StoreError(f"map store: {n} maps: more than the capacity of {capacity}")
        expected = {
            "maps": (shape.num_layers, n, shape.max_experts),
            "chosen": (n, shape.num_layers, shape.max_top_k),
            "requests": (n,),
            "born": (n,),
        }
        for name, wanted in expected.items():
            if arrays[name].shape != wanted:
                raise StoreError(f"map store: array '{name}' has shape {arrays[name].shape}, must be {wanted}")
        embeddings = arrays.get("embeddings")
        if embeddings is not None:
            if embeddings.ndim != 2 or len(embeddings) != n or not embeddings.shape[1]:
                raise StoreError(f"map store: array 'embeddings' has shape {embeddings.shape}, must be ({n}, H)")
            store.embeddings = np.zeros((capacity, embeddings.shape[1]), np.float32)
            store.embeddings[:n] = embeddings
        store.maps[:, :n] = arrays["maps"]
        store.chosen[:n] = arrays["chosen"]
        store.requests[:n] = arrays["requests"]
        store.born[:n] = arrays["born"]
        store.num_maps = n
        store._num_added = int(store.born[:n].max()) + 1 if n else 0
        store.num_of_request = Counter(store.requests[:n].tolist())
        store._measure(slice(0, n))
        return store

    def copy(self) -> MapStore:
        """One that changes on its own."""
        other = self.from_state(
            self.shape, self.state(), self.capacity, semantic_weight=self.semantic_weight, quota=self.quota
        )
        other._num_added, other.generation = self._num_added, self.generation
        return other

    @property
    def maps_nbytes(self) -> int:
        """Of all maps that it has room for."""
        return self.maps.nbytes

    @property
    def embeddings_nbytes(self) -> int:
        return 0 if self.embeddings is None else self.embeddings.nbytes

    @staticmethod
    def nbytes_of(shape: ModelShape, capacity: int, hidden_size: int) -> tuple[int, int]:
        """Bytes in memory of the maps and of the embeddings of a full store."""
        return 4 * shape.num_layers * capacity * shape.max_experts, 4 * capacity * hidden_size

    def write(self, slots: npt.NDArray[np.intp], incoming: Incoming, rows: slice | npt.NDArray[np.intp]) -> None:
        """Fill `slots`, distinct ones, with these rows; requests are counted by the caller."""
        self.maps[:, slots] = incoming.scores[:, rows]
        self.chosen[slots] = incoming.chosen[rows]
        self.requests[slots] = incoming.requests[rows]
        self.born[slots] = self._num_added + incoming.order[rows]
        if self.embeddings is not None:
            self.embeddings[slots] = 0.0 if incoming.embedding is None else incoming.embedding[rows]
        self._measure(slots)

    def count_added(self, num_rows: int) -> None:
        """These many rows have been added; the next ones are newer."""
        self._num_added += num_rows

    def _measure(self, slots: slice | npt.NDArray[np.intp]) -> None:
        """Bring the lengths of these rows up to date."""
        maps = self.maps[:, slots]
        squares = np.einsum("lce,lce->lc", maps, maps)
        self.squares[:, slots] = squares
        self.inverse_norms[:, slots] = inverse_root(np.cumsum(squares, axis=0))
        if self.embeddings is not None:
            rows = self.embeddings[slots]
            self.inverse_embedding_norms[slots] = inverse_root(np.einsum("ch,ch->c", rows, rows))

    def _check(self, scores: Floats, chosen: Ids, requests: npt.NDArray[np.int64], embedding: Floats | None) -> None:
        """Raise ConfigError where a shape is not the model's."""
        shape, num_rows = self.shape, len(requests)
        if scores.shape != (num_rows, shape.num_layers, shape.max_experts):
            raise ConfigError(
                f"maps: scores have shape {scores.shape}, must be {(num_rows, shape.num_layers, shape.max_experts)}"
            )
        if chosen.ndim != 3 or chosen.shape[:2] != (num_rows, shape.num_layers) or chosen.shape[2] > shape.max_top_k:
            raise ConfigError(
                f"maps: chosen has shape {chosen.shape}, must be {(num_rows, shape.num_layers, shape.max_top_k)}"
            )
        if embedding is not None:
            hidden = embedding.shape[-1] if self.embeddings is None else self.embeddings.shape[1]
            if embedding.shape != (num_rows, hidden):
                raise ConfigError(f"maps: embedding has shape {embedding.shape}, must be {(num_rows, hidden)}")

    def _prepare(
        self, scores: Floats, chosen: Ids, requests: npt.NDArray[np.int64], embedding: Floats | None
    ) -> Incoming:
        """Rows as they are stored."""
        shape = self.shape
        ids = chosen.astype(np.int64)
        limits = np.array(shape.num_experts)[:, None]
        stored = np.full((len(ids), shape.num_layers, shape.max_top_k), NONE, np.uint16)
        stored[:, :, : chosen.shape[2]] = np.where((ids >= 0) & (ids < limits), ids, NONE)
        return Incoming(
            scores=through_float16(scores.transpose(1, 0, 2)),
            chosen=stored,
            requests=requests,
            embedding=None if embedding is None else through_float16(unit_rows(embedding)),
            order=np.arange(len(ids)),
        )
