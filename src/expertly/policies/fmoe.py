"""fMoE: maps of what earlier iterations' routers scored, found by similarity, say which experts later layers will need,
in which order they are prefetched and which are evicted. In the order of the paper, whose sections are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry, ModelShape
from expertly.core.messages import Prediction
from expertly.core.observation import Began, Floats, History, Routed, Want
from expertly.policies.base import PolicyOptions, option
from expertly.policies.eviction import DenseScoredPolicy
from expertly.policies.known import NOTHING, Known
from expertly.policies.learned import MAX_CAPACITY, MAX_NBYTES
from expertly.policies.prediction import Predictor, distance_in
from expertly.policies.similarity import TIE, RunningCosines, inverse_root

Slots = npt.NDArray[np.intp]
Requests = npt.NDArray[np.int64]

# -- 4.1, 4.4: expert maps and their store ----------------------------------------------------------------------------

MAX_REDUNDANCIES = 1 << 22  # redundancy scores that are held at a time


class MapStore:
    """Maps of up to `capacity` iterations. Rows below `num_maps` are filled; callers must not write the arrays.

    `semantic_weight` is d/L of the redundancy score, from 0 to 1; `quota` is the share of the capacity that one request
    may fill, above 0 up to 1. Raises ConfigError where it would not fit into memory.
    """

    def __init__(
        self, shape: ModelShape, capacity: int = 1000, *, semantic_weight: float = 0.0, quota: float = 0.125
    ) -> None:
        nbytes = 4 * capacity * shape.num_layers * shape.max_experts
        if nbytes > MAX_NBYTES:
            raise ConfigError(f"capacity={capacity}: maps of {nbytes} bytes; at most {MAX_NBYTES} are accepted")
        self.shape, self.capacity, self.semantic_weight = shape, capacity, semantic_weight
        self.max_of_request = max(1, int(quota * capacity))
        self.num_maps = 0
        # Zeroed pages take no memory before they are written to.
        self.maps: Floats = np.zeros((shape.num_layers, capacity, shape.max_experts), np.float32)  # [L, C, E]
        self.squares: Floats = np.zeros((shape.num_layers, capacity), np.float32)  # [L, C] squared length of a layer
        self.embeddings: Floats | None = None  # [C, H] of length 1; zeros for a map without. None before the first one
        self.requests: Requests = np.zeros(capacity, np.int64)
        self.born: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)  # [C] counts insertions: the newest is highest
        self._num_added = 0

    def add(
        self, scores: Floats, requests: Requests, embedding: Floats | None = None, search: Search | None = None
    ) -> None:
        """Add maps of T iterations, one after the other: scores [T, L, E], requests [T], embedding [T, H].
        `search` has observed all of them, and the store has not changed since. Rows that are not finite are left out.
        """
        is_finite = np.isfinite(scores.sum(axis=(1, 2)))
        if embedding is not None:
            is_finite &= np.isfinite(embedding.sum(axis=1))
            if self.embeddings is None:
                self.embeddings = np.zeros((self.capacity, embedding.shape[1]), np.float32)
        rows, size = np.flatnonzero(is_finite), min(256, max(16, MAX_REDUNDANCIES // self.capacity))
        for first in range(0, len(rows), size):
            block = rows[first : first + size]
            unit = None
            if embedding is not None:
                unit = embedding[block]
                unit = unit * inverse_root(np.einsum("th,th->t", unit, unit))[:, None]
            redundancy = self._redundancy(scores[block], unit, search if len(block) == len(requests) else None)
            slots, places = self._place(requests[block], redundancy)
            self._write(slots, scores[block[places]], None if unit is None else unit[places])

    def _redundancy(self, scores: Floats, embedding: Floats | None, search: Search | None) -> Floats:
        """RDY: d/L of the semantic and (L - d)/L of the trajectory similarity of new maps to the stored ones, then to
        each other, [T, n + T].
        """
        if search is None:
            search = Search(self, len(scores))
            for layer in range(self.shape.num_layers):
                search.observe(layer, scores[:, layer])
            if embedding is not None:
                search.semantic(embedding)
        nothing = np.zeros((len(scores), self.num_maps), np.float32)

        def with_each_other(known: Floats | None, rows: Floats) -> Floats:
            dots = rows @ rows.T
            inverse = inverse_root(np.diagonal(dots).copy())
            return np.concatenate([nothing if known is None else known, dots * inverse[:, None] * inverse], axis=1)

        of_all_layers = search.cosines(self.squares[:, : self.num_maps].sum(axis=0))  # not seen: zero in the rows
        redundancy = with_each_other(of_all_layers, scores.reshape(len(scores), -1))
        if self.semantic_weight and embedding is not None:
            redundancy *= 1 - self.semantic_weight
            redundancy += self.semantic_weight * with_each_other(search.semantics, embedding)
        return redundancy

    def _place(self, requests: Requests, redundancy: Floats) -> tuple[Slots, Slots]:
        """While there is room a map takes a free slot; then the slot of the one that is most redundant to it, the
        oldest of equals; a request at its quota replaces the most redundant of its own. Returns the slots that change,
        and which of the new maps each of them has in the end.
        """
        n, owners, ages = self.num_maps, self.requests, self.born
        columns = np.arange(min(self.capacity, n + len(requests)))  # of `redundancy`: the map that is in a slot
        for row, request in enumerate(requests.tolist()):
            slots = np.flatnonzero(owners[: self.num_maps] == request)
            if len(slots) < self.max_of_request and self.num_maps < self.capacity:
                slot = self.num_maps
                self.num_maps += 1
            else:
                if len(slots) < self.max_of_request:
                    slots = np.arange(self.num_maps)
                similar = redundancy[row, columns[slots]]
                best = slots[similar >= similar.max() - TIE]
                slot = int(best[ages[best].argmin()])
            columns[slot], owners[slot], ages[slot] = n + row, request, self._num_added
            self._num_added += 1
        changed = np.flatnonzero(ages[: self.num_maps] >= self._num_added - len(requests))
        return changed, columns[changed] - n

    def _write(self, slots: Slots, scores: Floats, embedding: Floats | None) -> None:
        self.maps[:, slots] = scores.transpose(1, 0, 2)
        self.squares[:, slots] = np.einsum("tle,tle->lt", scores, scores)
        if self.embeddings is not None:
            self.embeddings[slots] = 0.0 if embedding is None else embedding


# -- 4.2: expert map search, equations 4 and 5 ------------------------------------------------------------------------


class Search(RunningCosines):
    """The similarity of one iteration's T rows to every map of a store: `cosines` are over the layers observed so far
    (trajectory, equation 5).
    """

    def __init__(self, store: MapStore, num_rows: int) -> None:
        super().__init__(num_rows, store.num_maps)
        self.store = store
        self.semantics: Floats | None = None  # what `semantic` returned

    def semantic(self, embedding: Floats) -> Floats | None:
        """Cosines [T, n] of embeddings [T, H] to the stored ones (equation 4). None where none is stored, or a row is
        not finite.
        """
        squares = np.einsum("th,th->t", embedding, embedding)
        if self.store.embeddings is None or not self.num_stored or not np.isfinite(squares).all():
            return None
        cosines: Floats = np.dot(embedding, self.store.embeddings[: self.num_stored].T)
        cosines *= inverse_root(squares)[:, None]
        self.semantics = cosines
        return cosines

    def observe(self, layer: int, scores: Floats) -> None:
        """The routing scores of a layer, [T, E of the layer]."""
        stored = self.store.maps[layer, : self.num_stored, : scores.shape[1]]
        squares = np.einsum("te,te->t", scores, scores)
        self.add(np.dot(scores, stored.T), squares, self.store.squares[layer, : self.num_stored])

    def nearest(self, cosines: Floats) -> tuple[Slots, Floats]:
        """The most similar map of each row, [T], of equal ones, up to rounding, the newest; and its cosine, [T]."""
        scores = cosines.max(axis=1)
        is_nearest = cosines >= (scores - TIE)[:, None]
        slots = np.where(is_nearest, self.store.born[: self.num_stored], -1).argmax(axis=1)
        return slots, np.minimum(scores, np.float32(1.0))


# -- 4.3: the predictor; similarity-aware selection, equations 6 to 8 -------------------------------------------------

MAX_SCORES = 1 << 22  # similarities a pass may hold: of more than 2^22 / capacity rows so many are matched, evenly
Select = Literal["delta", "top-k"]


@dataclass(frozen=True)
class FMoEOptions(PolicyOptions):
    """Without `semantic`, nothing is predicted of an iteration's first layers."""

    semantic: bool = option(True, "match an iteration by its embedding, for its first layers")
    select: Select = option("delta", "how many experts of a match: fewer the surer it is, or always K")
    reach: Literal["all", "one"] = option("all", "layers that a match names: all from `distance` on, or that alone")
    capacity: int = option(1000, "maps", least=1, most=MAX_CAPACITY)


class _MatchedPass:
    """What an iteration has shown of the rows that are matched."""

    def __init__(self, began: Began, shape: ModelShape, max_rows: int, *, has_embedding: bool) -> None:
        self.num_rows = num_rows = len(began.requests)  # as they come
        self.rows = slice(None) if num_rows <= max_rows else np.linspace(0, num_rows - 1, max_rows).astype(np.intp)
        self.is_prompt = bool(began.is_prefill.any())
        self.requests = began.requests[self.rows]
        self.embedding = began.embedding[self.rows] if has_embedding and began.embedding is not None else None
        self.scores: Floats = np.zeros((len(self.requests), shape.num_layers, shape.max_experts), np.float32)
        self.num_seen = 0  # layers
        self.last = -1
        self.named: dict[int, Prediction] = {}  # the newest prediction of each layer


class FMoE(Predictor):
    """Predicts the first d layers when an iteration begins, by its embedding, and all layers from l+d on (`reach=one`:
    that alone) when the router of layer l ran, by the layers so far. Each row is matched by itself. The prediction is
    the union of what the rows select, by the highest probability. Of a layer beyond l+d only a prediction that differs
    from its newest is made. Of a prompt, whose rows together name most experts, layer l+d alone is predicted.

    The maps of a pass are added if it ends well and no layer was left out.
    """

    name = "fmoe"
    options = FMoEOptions

    def __init__(
        self, geometry: Geometry, distance: int = 1, options: FMoEOptions = FMoEOptions(), known: Known = NOTHING
    ) -> None:
        self.wants: frozenset[Want] = frozenset({"scores", "embedding"} if options.semantic else {"scores"})
        self._options = options
        self._shape = ModelShape.of(geometry)
        self._top_k = np.array(self._shape.top_k)
        self._distance, self._layers = distance_in(geometry, distance), range(geometry.num_layers)
        self._max_rows = max(1, MAX_SCORES // options.capacity)
        self._pass: _MatchedPass | None = None
        self._matched = {"semantic": (0, 0.0), "trajectory": (0, 0.0)}  # rows matched, sum of their scores
        weight = self._distance / self._shape.num_layers
        self.store = MapStore(self._shape, options.capacity, semantic_weight=weight)
        self._search = Search(self.store, 0)

    def begin_iteration(self, began: Began) -> Iterator[Prediction]:
        """Semantic search."""
        now = self._pass = _MatchedPass(began, self._shape, self._max_rows, has_embedding=self._options.semantic)
        self._search = Search(self.store, len(now.requests))
        if now.embedding is None or not len(now.requests):
            return iter(())
        return self._predict(now, "semantic", self._search.semantic(now.embedding), self._layers[: self._distance], -1)

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        """Trajectory search over the layers seen."""
        now, scores, layer = self._pass, routed.scores, routed.router.layer
        if now is None or scores is None or not len(scores) == now.num_rows > 0:
            return iter(())
        if layer <= now.last:
            return iter(())
        scores = scores[now.rows]
        now.last = layer
        now.num_seen += 1
        now.scores[:, layer, : scores.shape[1]] = scores
        self._search.observe(layer, scores)
        ahead = self._layers[layer + self._distance :]
        if self._options.reach == "one" or now.is_prompt:
            ahead = ahead[:1]
        return self._predict(now, "trajectory", self._search.cosines() if ahead else None, ahead, layer)

    def end_iteration(self, ok: bool) -> None:
        """Add the pass's maps, if it ended well and every layer was seen."""
        now, self._pass = self._pass, None
        if now is not None and ok and now.num_seen == self._shape.num_layers:
            self.store.add(now.scores, now.requests, now.embedding, self._search)

    def learn(self, history: History) -> None:
        """Add the maps of these rows, as if their passes had run here, one by one."""
        embedding = history.embedding if self._options.semantic else None
        self.store.add(history.scores, history.requests, embedding)

    def facts(self) -> dict[str, int | float | None]:
        """`maps` of `capacity`; rows matched (`semantic_searches`, `trajectory_searches`) and the mean similarity of
        their matches.
        """
        facts: dict[str, int | float | None] = {"maps": self.store.num_maps, "capacity": self.store.capacity}
        for kind, (count, total) in self._matched.items():
            facts |= {f"{kind}_searches": count, f"{kind}_score": total / count if count else None}
        return facts

    def _predict(
        self, now: _MatchedPass, kind: str, cosines: Floats | None, layers: range, layer: int
    ) -> Iterator[Prediction]:
        """Predict these layers from the nearest maps; `layer` ran last. What they have nothing of is left out."""
        if cosines is None or not layers or not self._search.num_stored:
            return
        slots, similar = self._search.nearest(cosines)
        count, total = self._matched[kind]
        self._matched[kind] = count + len(similar), total + float(np.sum(similar))
        rows = self.store.maps[layers.start : layers.stop, slots]  # [layers, T, E]
        top_k = self._top_k[layers.start : layers.stop, None]
        selected = select(rows, similar, top_k, self._options.select)
        named, probabilities = np.where(selected, rows, 0.0).max(axis=1), rows.max(axis=1)
        for ahead, (experts, scores) in zip(layers, by_falling(named), strict=True):
            likely: list[float] = probabilities[ahead - layers.start, : self._shape.num_experts[ahead]].tolist()
            before = now.named.get(ahead)
            is_nearest = kind == "semantic" or ahead == layers.start
            is_same = before is not None and (before.experts, before.probabilities) == (experts, likely)
            if experts and (is_nearest or not is_same):
                now.named[ahead] = Prediction(ahead, experts, scores, ahead - layer, likely)
                yield now.named[ahead]


def select(
    probabilities: Floats, scores: Floats, top_k: int | npt.NDArray[np.intp], mode: Select = "delta"
) -> npt.NDArray[np.bool_]:
    """Which experts each row selects, [..., E], by falling probability [..., E] (ties: the lowest id), given scores
    [...] and `top_k` [...].

    "delta": the fewest whose sum reaches clip(1 - score, 0, 1), at least `top_k` (equations 6 to 8). "top-k": `top_k`.
    Either leaves out those of probability 0, however few remain.
    """
    num_experts = probabilities.shape[-1]
    order = np.argsort(-probabilities, axis=-1, kind="stable")
    falling = np.take_along_axis(probabilities, order, axis=-1)
    counts = np.minimum(np.broadcast_to(top_k, falling.shape[:-1]), (falling > 0).sum(axis=-1))
    if mode == "delta":
        threshold = np.clip(1.0 - scores.astype(np.float64), 0.0, 1.0)
        num_below = (np.cumsum(falling, axis=-1, dtype=np.float64) < threshold[..., None]).sum(axis=-1)
        counts = np.maximum(counts, np.minimum(num_below + 1, (falling > 0).sum(axis=-1)))
    selected = np.zeros(probabilities.shape, np.bool_)
    np.put_along_axis(selected, order, np.arange(num_experts) < counts[..., None], axis=-1)
    return selected


def by_falling(named: Floats) -> list[tuple[list[int], list[float]]]:
    """Of each row [N, E] the experts above 0 and their numbers, by falling number (ties: the lowest id)."""
    order = np.argsort(-named, axis=-1, kind="stable")
    falling, counts = np.take_along_axis(named, order, axis=-1).tolist(), (named > 0).sum(axis=-1).tolist()
    return [(ids[:num], row[:num]) for ids, row, num in zip(order.tolist(), falling, counts, strict=True)]


# -- 4.5: eviction (prefetch priorities are in scheduler/prefetch.py) --------------------------------------------------

LEAST = 1e-6  # the least p, and the p of layers without a map, where frequency alone decides


class FMoEEviction(DenseScoredPolicy):
    """Evicts the highest 1 / (p x freq). p is the expert's probability in the newest map found for its layer. `freq`
    starts at 1, counts passes in which a layer asked the cache for the expert, and persists after eviction.
    """

    name = "fmoe"
    needs_probabilities = True

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self._frequency = np.ones(geometry.num_experts)
        self._probability = np.full(geometry.num_experts, LEAST)

    def predicted(self, first_expert: int, probabilities: Sequence[float]) -> None:
        of_layer = self._probability[first_expert : first_expert + len(probabilities)]
        np.maximum(probabilities, LEAST, out=of_layer)

    def used(self, experts: Sequence[int], num_tokens: Sequence[int], batch_tokens: int) -> None:
        self._frequency[list(experts)] += np.minimum(num_tokens, 1)

    def all_scores(self) -> npt.NDArray[np.float64]:
        return self._probability * self._frequency
