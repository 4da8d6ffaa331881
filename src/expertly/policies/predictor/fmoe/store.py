"""The expert map store: routing scores of past iterations, of which it keeps the least redundant (fMoE, sections 4.1
and 4.4).
"""

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
    check_born,
    check_numbers,
)
from expertly.policies.predictor.fmoe.redundancy import Incoming, Slots, place, through_float16, unit_rows
from expertly.policies.predictor.similarity import inverse_root

NONE = MAX_EXPERTS + 1
"""Where `chosen` names no expert."""

MAX_EMBEDDING = 1 << 20
_ROUNDING = 0.02
"""How far above 1 probabilities of a file may be, one or all of a layer, and how far from 1 an embedding's length."""


class MapStore(LearnedStore):
    """Maps of up to `capacity` iterations. Rows below `num_maps` are filled; callers must not write the arrays.

    `semantic_weight` is d/L of the redundancy score, from 0 to 1; `quota` is the share of the capacity that one request
    may fill, above 0 up to 1. Raises ConfigError.
    """

    kind = "maps"
    holds = "expert maps, by which fmoe predicts"
    unit = "maps"
    made_by = "lab learned build"
    schema = {  # noqa: RUF012 - of C maps
        "born": ("I64", "C"),
        "requests": ("I64", "C"),
        "chosen": ("U16", "CLK"),
        "maps": ("F16", "LCE"),
        "embeddings": ("F16", "CH"),
    }
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
        self.generation = 0  # counts changes
        num_layers, num_experts, top_k = shape.num_layers, shape.max_experts, shape.max_top_k
        # Zeroed pages take no memory before they are written to. Scores and embeddings are rounded through float16, so
        # that a file in float16 loses nothing.
        self.maps: Floats = np.zeros((num_layers, capacity, num_experts), np.float32)  # [L, C, E]
        self.embeddings: Floats | None = None  # [C, H] of length 1; zeros for a map without. None before the first one
        self.chosen: npt.NDArray[np.uint16] = np.full((capacity, num_layers, top_k), NONE, np.uint16)  # by the router
        self.requests: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.born: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)  # [C] counts insertions: the newest is highest
        self.squares: Floats = np.zeros((num_layers, capacity), np.float32)  # [L, C] squared length of a map's layer
        # [L, C] 1 / length of a map's layers up to this one; 0 where all are zero. [C] that of the rounded embedding.
        self.inverse_norms: Floats = np.zeros((num_layers, capacity), np.float32)
        self.inverse_embedding_norms: Floats = np.zeros(capacity, np.float32)
        self.num_of_request: Counter[int] = Counter()
        self._num_added = 0

    @property
    def max_of_request(self) -> int:
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
        self._num_added += len(requests)
        self.generation += 1

    def extend(self, other: MapStore) -> None:
        """Add all maps of another store for the same requests, the oldest first: to make a smaller store."""
        order = other.by_age()
        self._take(other, order, other.requests[order])

    def by_age(self) -> Slots:
        """All filled rows, the oldest first."""
        return np.argsort(self.born[: self.num_maps], kind="stable")

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

    def fill(self, arrays: Arrays) -> None:
        """Take the `state` of another store; this one is empty. Raises ConfigError where there is no room for it."""
        n = len(arrays["requests"])
        assert not self.num_maps
        if n > self.capacity:
            raise ConfigError(f"capacity={self.capacity}: must be at least {n}, the maps that there are")
        if "embeddings" in arrays:
            self.embeddings = np.zeros((self.capacity, arrays["embeddings"].shape[1]), np.float32)
            self.embeddings[:n] = arrays["embeddings"]
        self.maps[:, :n] = arrays["maps"]
        self.chosen[:n] = arrays["chosen"]
        self.requests[:n] = arrays["requests"]
        self.born[:n] = arrays["born"]
        self.num_maps = n
        self._num_added = int(self.born[:n].max(initial=-1)) + 1
        self.num_of_request = Counter(self.requests[:n].tolist())
        self._measure(slice(0, n))

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
    def sizes(cls, header: Header, found: Mapping[str, int]) -> Mapping[str, int]:
        if not 1 <= found.get("H", 1) <= MAX_EMBEDDING:
            accepted = f"{found['H']} numbers each; must be 1 to {MAX_EMBEDDING}"
            raise StoreError(f"{header.path}: tensor 'embeddings': {accepted}")
        return {}

    @classmethod
    def check(cls, path: Path, shape: ModelShape, arrays: Arrays) -> None:
        limits = np.array(shape.num_experts)[:, None]  # [L, 1]
        maps, axes = arrays["maps"].transpose(1, 0, 2), ("map", "layer", "expert")
        is_expert = np.arange(shape.max_experts) < limits
        check_numbers(path, "maps", maps, (maps >= 0) & (maps <= 1 + _ROUNDING), axes, "a probability, from 0 to 1")
        check_numbers(path, "maps", maps, is_expert | (maps == 0), axes, "0: the layer has fewer experts")
        sums = maps.sum(axis=2, dtype=np.float32)
        check_numbers(path, "maps", sums, sums <= 1 + _ROUNDING, axes, "at most 1, the sum of a layer's probabilities")
        ids = np.sort(arrays["chosen"], axis=2)  # [C, L, K] NONE are last
        is_right = ((ids < limits) | (ids == NONE)).all(axis=2)
        is_right &= ((ids[..., 1:] != ids[..., :-1]) | (ids[..., 1:] == NONE)).all(axis=2)
        is_right &= (ids != NONE).sum(axis=2) <= np.array(shape.top_k)
        accepted = f"at most as many experts of the layer as it chooses, none twice, and {NONE} for none"
        check_numbers(path, "chosen", arrays["chosen"], is_right, axes, accepted)
        check_born(path, "born", arrays["born"])
        if "embeddings" in arrays:
            with np.errstate(over="ignore", invalid="ignore"):
                lengths = np.sqrt(np.square(arrays["embeddings"], dtype=np.float32).sum(axis=1))
            is_right = (lengths == 0) | (abs(lengths - 1) <= _ROUNDING)
            check_numbers(path, "embeddings", lengths, is_right, axes, "of length 1, or 0 for none")

    @classmethod
    def restored(cls, header: Header, arrays: Arrays) -> MapStore:
        """Requests are numbered down from -1, so that none is a number that a running model counts up from 0."""
        settings = {name: header.number(name) for name in ("semantic_weight", "quota")}
        store = cls(header.shape, header.number("capacity", int), **settings)
        _, ranks = np.unique(arrays["requests"], return_inverse=True)
        store.fill({**arrays, "requests": -1 - ranks.reshape(-1).astype(np.int64)})
        return store

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
        most = max(most, self.capacity - self.num_maps)
        digests = other._digests()
        slots = np.array([slot for slot in other.by_age().tolist() if digests[slot] not in known][-most:], np.intp)
        if len(slots):
            self._take_of_others(other, slots)
        return len(slots)

    @classmethod
    def merged(cls, stores: Sequence[MapStore], capacity: int) -> MapStore:
        """Weight and quota are those of the first store."""
        first = stores[0]
        out = cls(first.shape, capacity, semantic_weight=first.semantic_weight, quota=first.quota)
        sizes = {store.embeddings.shape[1] for store in stores if store.embeddings is not None}
        if len(sizes) > 1:
            raise ConfigError(f"embeddings of {' and '.join(map(str, sorted(sizes)))} numbers: not of one model")
        for store in stores:
            if store.shape != first.shape:
                raise ConfigError("maps of other layers, experts or top-k: not of one model")
            out._take_of_others(store, store.by_age())
        return out

    def _digests(self) -> list[bytes]:
        """A digest of each map, without its embedding: stores scale embeddings, so that they differ in the last
        digit.
        """
        maps, digests = self.maps.astype(np.float16), []
        for slot in range(self.num_maps):
            made = hashlib.blake2b(np.ascontiguousarray(maps[:, slot]).tobytes(), digest_size=16)
            made.update(self.chosen[slot].tobytes())
            digests.append(made.digest())
        return digests

    def _take_of_others(self, other: MapStore, slots: Slots) -> None:
        """Add these maps of another store, whose requests are none of this one's: they get numbers below its own."""
        _, ranks = np.unique(other.requests[slots], return_inverse=True)
        lowest = int(self.requests[: self.num_maps].min(initial=0))
        self._take(other, slots, lowest - 1 - ranks.reshape(-1))

    def _take(self, other: MapStore, slots: Slots, requests: npt.NDArray[np.int64]) -> None:
        """Add these maps of another store, under these requests."""
        embeddings = None if other.embeddings is None else other.embeddings[slots]
        self.add(other.maps[:, slots].transpose(1, 0, 2), other.chosen[slots], requests, embeddings)

    # -- rows --------------------------------------------------------------------------------------------------

    def write(self, slots: Slots, incoming: Incoming, rows: slice | Slots) -> None:
        """Fill `slots`, distinct ones, with these rows; the caller counts requests."""
        self.maps[:, slots] = incoming.scores[:, rows]
        self.chosen[slots] = incoming.chosen[rows]
        self.requests[slots] = incoming.requests[rows]
        self.born[slots] = self._num_added + incoming.order[rows]
        if self.embeddings is not None:
            self.embeddings[slots] = 0.0 if incoming.embedding is None else incoming.embedding[rows]
        self._measure(slots)

    def _measure(self, slots: slice | Slots) -> None:
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
        needed: list[tuple[str, npt.NDArray[Any], tuple[int, ...]]] = [
            ("scores", scores, (num_rows, shape.num_layers, shape.max_experts)),
            ("chosen", chosen, (num_rows, shape.num_layers, min(shape.max_top_k, chosen.shape[-1]))),
        ]
        if embedding is not None:
            hidden = embedding.shape[-1] if self.embeddings is None else self.embeddings.shape[1]
            needed.append(("embedding", embedding, (num_rows, hidden)))
        for name, array, expected in needed:
            if array.shape != expected:
                raise ConfigError(f"maps: {name} has shape {array.shape}, must be {expected}")

    def _prepare(
        self, scores: Floats, chosen: Ids, requests: npt.NDArray[np.int64], embedding: Floats | None
    ) -> Incoming:
        """Rows in the form in which they are stored."""
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
    """With so many maps, every iteration has one that is at least this similar."""

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
