"""The expert map store: routing scores of past iterations, the least redundant ones (fMoE, sections 4.1 and 4.4)."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError, StoreError
from expertly.core.observation import Floats, Ids
from expertly.policies.learned import (
    MAX_CAPACITY,
    MAX_EXPERTS,
    MAX_NBYTES,
    Arrays,
    Header,
    LearnedStore,
    ModelShape,
    Shape,
    check_born,
    length_of,
)
from expertly.policies.predictor.fmoe.redundancy import Incoming, inverse_root, place, through_float16, unit_rows

NONE = MAX_EXPERTS + 1
"""Where `chosen` names no expert."""

MAX_EMBEDDING = 1 << 20
_ROUNDING = 0.02
"""How far above 1 probabilities of a file may be, one or all of a layer, and how far from 1 an embedding's length."""


class MapStore(LearnedStore):
    """Maps of up to `capacity` iterations. Rows below `num_maps` are filled; arrays are not to be written to.

    `semantic_weight` is d/L of the redundancy score, from 0 to 1; `quota` the share of the capacity that one request
    may fill, above 0 up to 1. Raises ConfigError.
    """

    kind = "maps"
    holds = "expert maps, by which fmoe predicts"
    unit = "maps"
    made_by = "maps build"
    schema = {"born": "I64", "requests": "I64", "chosen": "U16", "maps": "F16", "embeddings": "F16"}  # noqa: RUF012
    """[C], [C], [C, L, K], [L, C, E], [C, H], of C maps."""
    optional = frozenset({"embeddings"})

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
        self._take(other, order, other.requests[order])

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
        arrays: Arrays,
        capacity: int = 1000,
        *,
        semantic_weight: float = 0.0,
        quota: float = 0.125,
    ) -> MapStore:
        """The inverse of `state`, for a capacity that holds it."""
        store = cls(shape, capacity, semantic_weight=semantic_weight, quota=quota)
        n = len(arrays["requests"])
        assert n <= capacity
        if "embeddings" in arrays:
            store.embeddings = np.zeros((capacity, arrays["embeddings"].shape[1]), np.float32)
            store.embeddings[:n] = arrays["embeddings"]
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

    # -- as a file keeps it ------------------------------------------------------------------------------------

    @property
    def num_learned(self) -> int:
        return self.num_maps

    @property
    def num_needed(self) -> int:
        return self.num_maps

    def settings(self) -> dict[str, str]:
        return {
            "capacity": str(self.capacity),
            "semantic_weight": repr(float(self.semantic_weight)),
            "quota": repr(float(self.quota)),
        }

    @classmethod
    def layout(cls, header: Header, sizes: Mapping[str, Shape]) -> Mapping[str, Shape]:
        shape = header.shape
        num_layers, width, top_k = shape.num_layers, shape.max_experts, shape.max_top_k
        capacity = header.capacity(num_layers * (4 * width + 2 * top_k))
        if not header.share("quota"):
            header.refuse("quota", "must be above 0")
        header.share("semantic_weight")
        num_maps = length_of(header, sizes, "born")
        if num_maps > capacity:
            raise StoreError(f"{header.path}: tensor 'born': {num_maps} maps, more than the capacity={capacity}")
        hidden_size = sizes.get("embeddings", ())[-1:]
        if hidden_size and not 1 <= hidden_size[0] <= MAX_EMBEDDING:
            raise StoreError(
                f"{header.path}: tensor 'embeddings': {hidden_size[0]} numbers each; must be 1 to {MAX_EMBEDDING}"
            )
        return {
            "born": (num_maps,),
            "requests": (num_maps,),
            "chosen": (num_maps, num_layers, top_k),
            "maps": (num_layers, num_maps, width),
            "embeddings": (num_maps, *hidden_size),
        }

    @classmethod
    def check(cls, path: Path, shape: ModelShape, arrays: Arrays) -> None:
        for layer, num_experts in enumerate(shape.num_experts):
            _check_probabilities(path, layer, num_experts, arrays["maps"][layer])
            _check_chosen(path, layer, num_experts, shape.top_k[layer], arrays["chosen"][:, layer])
        check_born(path, "born", arrays["born"])
        if "embeddings" in arrays:
            _check_embeddings(path, arrays["embeddings"])

    @classmethod
    def restored(cls, header: Header, arrays: Arrays) -> MapStore:
        """Requests are numbered down from -1, so that none of them is one that a running model counts up from 0."""
        _, ranks = np.unique(arrays["requests"], return_inverse=True)
        return cls.from_state(
            header.shape,
            {**arrays, "requests": -1 - ranks.reshape(-1).astype(np.int64)},
            int(header.texts["capacity"]),
            semantic_weight=header.share("semantic_weight"),
            quota=header.share("quota"),
        )

    def check_model(self, path: Path, embedding_size: int) -> None:
        own = embedding_size if self.embeddings is None else self.embeddings.shape[1]
        if own != embedding_size:
            raise StoreError(
                f"{path}: tensor 'embeddings': {own} numbers each; this model's input embedding has {embedding_size}"
            )

    def of_another(self, arrays: Arrays) -> MapStore:
        made = super().of_another(arrays)
        if self.embeddings is not None:
            made.check_model(Path("what another has learned"), self.embeddings.shape[1])
        return made

    def digests(self) -> set[bytes]:
        return set(self._digests())

    def absorb(self, other: MapStore, known: Container[bytes], most: int) -> int:
        """Requests of another are none of this store's: they are numbered down from its lowest."""
        most = max(most, self.capacity - self.num_maps)
        digests, order = other._digests(), np.argsort(other.born[: other.num_maps], kind="stable")
        slots = np.array([slot for slot in order.tolist() if digests[slot] not in known][-most:], np.intp)
        if len(slots):
            _, ranks = np.unique(other.requests[slots], return_inverse=True)
            lowest = int(self.requests[: self.num_maps].min(initial=0))
            self._take(other, slots, lowest - 1 - ranks.reshape(-1))
        return len(slots)

    @classmethod
    def merged(cls, stores: Sequence[MapStore], capacity: int) -> MapStore:
        """Weight and quota are the first one's. Requests of two stores are never the same."""
        first = stores[0]
        out = cls(first.shape, capacity, semantic_weight=first.semantic_weight, quota=first.quota)
        sizes = {store.embeddings.shape[1] for store in stores if store.embeddings is not None}
        if len(sizes) > 1:
            raise ConfigError(f"embeddings of {' and '.join(map(str, sorted(sizes)))} numbers: not of one model")
        num_requests = 0
        for store in stores:
            if store.shape != first.shape:
                raise ConfigError("maps of other layers, experts or top-k: not of one model")
            order = np.argsort(store.born[: store.num_maps], kind="stable")
            found, ranks = np.unique(store.requests[order], return_inverse=True)
            out._take(store, order, -1 - num_requests - ranks.reshape(-1))
            num_requests += len(found)
        return out

    def _digests(self) -> list[bytes]:
        """Of each map. Not of embeddings: a store scales what it is given, so that they differ in the last digit."""
        maps, digests = self.maps.astype(np.float16), []
        for slot in range(self.num_maps):
            made = hashlib.blake2b(np.ascontiguousarray(maps[:, slot]).tobytes(), digest_size=16)
            made.update(self.chosen[slot].tobytes())
            digests.append(made.digest())
        return digests

    def _take(self, other: MapStore, slots: npt.NDArray[np.intp], requests: npt.NDArray[np.int64]) -> None:
        """Add these maps of another store, as of these requests."""
        embeddings = None if other.embeddings is None else other.embeddings[slots]
        self.add(other.maps[:, slots].transpose(1, 0, 2), other.chosen[slots], requests, embeddings)

    # -- rows --------------------------------------------------------------------------------------------------

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


class CoverageBound(NamedTuple):
    """With so many maps, any iteration has one at least that similar to it."""

    num_maps: int
    similarity: float


def coverage_bounds(shape: ModelShape) -> tuple[CoverageBound, CoverageBound]:
    """2 L E maps and L E ln(L E) / 2 maps, rounded up; L E is the number of experts of the model."""
    num = sum(shape.num_experts)
    return CoverageBound(2 * num, 0.75), CoverageBound(math.ceil(num * math.log(num) / 2), 0.98)


def mean_similarities(store: MapStore, max_maps: int = 512, seed: int = 0) -> tuple[float | None, float | None]:
    """Mean cosine of two maps, and of two embeddings, over all pairs of at most `max_maps` maps drawn with `seed`.

    None where there are no two of them. A store of maps that are all alike has 1.
    """
    slots = np.arange(store.num_maps)
    if len(slots) > max_maps:
        slots = np.sort(np.random.default_rng(seed).choice(slots, max_maps, replace=False))
    maps = store.maps[:, slots].transpose(1, 0, 2).reshape(len(slots), -1)
    embeddings = np.zeros((0, 1), np.float32) if store.embeddings is None else store.embeddings[slots]
    return _mean_cosine(maps), _mean_cosine(embeddings)


def _mean_cosine(rows: npt.NDArray[np.float32]) -> float | None:
    """Over the pairs of rows [T, N] that are not zero: |sum of unit rows|^2 is T and twice every pair."""
    lengths = np.linalg.norm(rows, axis=1)
    unit = rows[lengths > 0] / lengths[lengths > 0, None]
    num = len(unit)
    if num < 2:
        return None
    total = unit.sum(axis=0, dtype=np.float64)
    return float((total @ total - num) / (num * (num - 1)))


def _check_probabilities(path: Path, layer: int, num_experts: int, maps: npt.NDArray[np.floating[Any]]) -> None:
    """[C, E]"""
    is_wrong = ~((maps >= 0) & (maps <= 1 + _ROUNDING))  # NaN, too
    is_wrong[:, num_experts:] |= maps[:, num_experts:] != 0
    if is_wrong.any():
        slot, expert = np.unravel_index(int(np.argmax(is_wrong)), is_wrong.shape)
        accepted = "a probability, from 0 to 1" if expert < num_experts else f"0: there are {num_experts} experts"
        where = f"map {slot}, layer {layer}, expert {expert}"
        raise StoreError(f"{path}: tensor 'maps': {where}: {maps[slot, expert]}; must be {accepted}")
    sums = maps.sum(axis=1, dtype=np.float32)
    if len(sums) and sums.max() > 1 + _ROUNDING:
        highest = int(np.argmax(sums))
        where = f"map {highest}, layer {layer}"
        raise StoreError(f"{path}: tensor 'maps': {where}: probabilities sum to {sums[highest]:.3f}; must be at most 1")


def _check_chosen(path: Path, layer: int, num_experts: int, top_k: int, chosen: npt.NDArray[np.uint16]) -> None:
    """[C, K]"""
    rising = np.sort(chosen, axis=1)
    is_twice = (rising[:, 1:] == rising[:, :-1]) & (rising[:, 1:] != NONE)
    is_wrong = ((chosen >= num_experts) & (chosen != NONE)).any(axis=1) | is_twice.any(axis=1)
    is_wrong |= (chosen != NONE).sum(axis=1) > top_k
    if is_wrong.any():
        slot = int(np.argmax(is_wrong))
        found = f"map {slot}, layer {layer}: {chosen[slot].tolist()!s:.80}"
        raise StoreError(
            f"{path}: tensor 'chosen': {found}; must be at most {top_k} of {num_experts} experts, none twice, and "
            f"{NONE} for none"
        )


def _check_embeddings(path: Path, embeddings: npt.NDArray[np.floating[Any]]) -> None:
    """[C, H]"""
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.sqrt(np.square(embeddings, dtype=np.float32).sum(axis=1))
    is_wrong = ~((lengths == 0) | (abs(lengths - 1) <= _ROUNDING))
    if is_wrong.any():
        slot = int(np.argmax(is_wrong))
        found = f"map {slot}: of length {lengths[slot]:.3f}"
        raise StoreError(f"{path}: tensor 'embeddings': {found}; must be of length 1, or 0 for none")
