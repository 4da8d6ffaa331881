"""fMoE: predicts later layers from the most similar past iteration (fMoE, sections 4.1 to 4.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Began, Floats, History, Ids, Routed, Want
from expertly.policies.base import PolicyOptions, option
from expertly.policies.known import NOTHING, Known
from expertly.policies.learned import MAX_CAPACITY, ModelShape
from expertly.policies.predictor.base import Predictor, distance_in
from expertly.policies.predictor.fmoe.search import NearestMaps, Search
from expertly.policies.predictor.fmoe.store import MapStore

MAX_SCORES = 1 << 24
"""Similarities that one pass may hold. Of more than 2^24 / capacity rows so many are matched, evenly spread."""
BLOCK = 4096
"""Rows of a history that are learned at a time."""

Number = TypeVar("Number", bound=np.generic)


Select = Literal["delta", "top-k"]


@dataclass(frozen=True)
class FMoEOptions(PolicyOptions):
    """Which parts of fMoE are on. Without `trajectory`, the semantic match of an iteration serves all of its layers;
    without `semantic`, nothing is predicted of its first layers.
    """

    semantic: bool = option(True, "match an iteration by its embedding, for its first layers")
    trajectory: bool = option(True, "match it by the layers so far, for later ones")
    select: Select = option("delta", "how many experts of a match: fewer the surer it is, or always K")
    capacity: int = option(1000, "maps", least=1, most=MAX_CAPACITY)
    quota: float = option(0.125, "share of the capacity that one request may fill", above=0, most=1)
    update: bool = option(True, "learn from what runs")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.semantic or self.trajectory):
            raise ConfigError("semantic=no, trajectory=no: at least one of them must be on")
        if self.select not in get_args(Select):
            raise ConfigError(f"select={self.select!r}: accepted: {', '.join(get_args(Select))}")


class _MatchedPass:
    """What an iteration has shown of the rows that are matched."""

    def __init__(self, began: Began, shape: ModelShape, max_rows: int) -> None:
        num_rows = len(began.requests)
        self.num_rows = num_rows  # as they come
        self.rows = None if num_rows <= max_rows else np.linspace(0, num_rows - 1, max_rows).astype(np.intp)
        self.requests = self.of_rows(began.requests)
        self.embedding = None if began.embedding is None else self.of_rows(began.embedding)
        self.semantic: Floats | None = None  # [T, n]
        count = len(self.requests)
        self.scores: Floats = np.zeros((count, shape.num_layers, shape.max_experts), np.float32)
        self.chosen = np.full((count, shape.num_layers, shape.max_top_k), -1, np.int32)
        self.layers = range(shape.num_layers) if began.layers is None else began.layers
        self.num_seen = 0  # of these layers
        self.last = -1

    def of_rows(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        return values if self.rows is None else values[self.rows]


class FMoE(Predictor):
    """Predicts the first d layers when an iteration begins, by its embedding, and layer l+d when the router of layer l
    ran, by the layers so far. Each row is matched by itself, with the maps that have scores for the predicted layer.
    The prediction is the union of what the rows select, by the highest probability; its confidence is the mean
    similarity of their matches.

    The maps of a pass are added if it ends well and no layer was left out. In a model of two stacks each stack is a
    pass of its own; its maps are 0 in the other stack's layers. `distance` d is at most L - 1. Raises ConfigError where
    it is below 1.
    """

    name = "fmoe"
    options = FMoEOptions
    learns = MapStore

    def __init__(
        self, geometry: Geometry, distance: int = 1, options: FMoEOptions = FMoEOptions(), known: Known = NOTHING
    ) -> None:
        super().__init__()
        self.wants: frozenset[Want] = frozenset(
            ("experts", "scores", "embedding") if options.semantic else ("experts", "scores")
        )
        self._options = options
        self._shape = ModelShape.of(geometry)
        num_layers = self._shape.num_layers
        self._distance = distance_in(geometry, distance)
        self._weight = self._distance / num_layers
        self._max_rows = max(1, MAX_SCORES // options.capacity)
        self._pass: _MatchedPass | None = None
        self._found = {"semantic": (0, 0.0), "trajectory": (0, 0.0)}  # rows matched, sum of their scores
        self._num_left_out = 0
        self.adopt(self._empty())

    @property
    def learned(self) -> MapStore:
        return self._store

    def adopt(self, learned: MapStore) -> None:
        """A store with the same settings is taken as it is, otherwise copied into one that has them."""
        if learned.shape != self._shape:
            raise ConfigError(f"map store: is of another model: {learned.shape}, must be {self._shape}")
        store = self._empty()
        if (learned.capacity, learned.semantic_weight, learned.quota) == (store.capacity, self._weight, store.quota):
            store = learned
        elif learned.num_maps <= store.capacity:
            store.fill(learned.state())
        else:
            store.extend(learned)
        self._store = store
        self._search = Search(store)
        self._pass = None

    def begin_iteration(self, began: Began) -> list[Prediction]:
        """Semantic search. Without stored maps or embeddings nothing is predicted."""
        self.work.num_calls += 1
        now = self._pass = _MatchedPass(began, self._shape, self._max_rows)
        if not self._options.semantic:
            now.embedding = None  # it may be told
        count = len(now.requests)
        self._search.begin(count)
        if now.embedding is None or not count:
            return []
        now.semantic = self._search.semantic(now.embedding)
        if now.semantic is None:
            return []
        self._count_work(count, now.embedding.shape[1])
        layers = now.layers[: self._distance] if self._options.trajectory else now.layers
        return self._predict("semantic", now.semantic, layers)

    def router_ran(self, routed: Routed) -> list[Prediction]:
        """Trajectory search over the layers seen, for the layer d ahead. Ignored if the number of rows is not that of
        the pass's beginning, as in another stack of the model.
        """
        now, scores, layer = self._pass, routed.scores, routed.router.layer
        self.work.num_calls += 1
        if now is None or scores is None or len(scores) != now.num_rows or layer <= now.last or not now.num_rows:
            return []
        if layer not in now.layers:
            return []
        if now.rows is not None:
            scores = scores[now.rows]
        now.last = layer
        now.num_seen += 1
        now.scores[:, layer, : scores.shape[1]] = scores
        if routed.experts is not None:
            experts = now.of_rows(routed.experts)
            now.chosen[:, layer, : experts.shape[1]] = experts
        search = self._search
        if not search.num_maps or not search.is_current or not self._options.trajectory:
            return []
        search.observe(layer, scores)
        self._count_work(len(scores), scores.shape[1])
        target = layer + self._distance
        cosines = search.trajectory() if target in now.layers else None
        return [] if cosines is None else self._predict("trajectory", cosines, range(target, target + 1))

    def end_iteration(self, ok: bool) -> None:
        """Add the pass's maps, if it ended well and every layer of its stack was seen."""
        now, self._pass = self._pass, None
        self.work.num_calls += 1
        if now is None or not ok or not self._options.update or not now.num_seen:
            return
        if now.num_seen < len(now.layers):
            self._num_left_out += len(now.requests)
            return
        search = self._search
        trajectory = search.of_all_layers() if self._options.trajectory and search.is_current else None
        semantic = now.semantic if search.is_current else None
        self._add(now.scores, now.chosen, now.requests, now.embedding, semantic, trajectory)

    def learn(self, history: History) -> None:
        """Add the maps of these rows, as if their passes had run here, one by one."""
        for first in range(0, len(history.requests), BLOCK):
            rows = slice(first, first + BLOCK)
            embedding = history.embedding if self._options.semantic else None
            self._add(
                history.scores[rows],
                history.experts[rows],
                history.requests[rows],
                None if embedding is None else embedding[rows],
            )

    def facts(self) -> dict[str, int | float | None]:
        """`maps` of `capacity`; `left_out` maps of passes that were not seen whole; rows matched (`semantic_searches`,
        `trajectory_searches`) and the mean similarity of their matches.
        """
        facts: dict[str, int | float | None] = {
            "maps": self._store.num_maps,
            "capacity": self._store.capacity,
            "left_out": self._num_left_out,
        }
        for kind, (count, total) in self._found.items():
            facts[f"{kind}_searches"] = count
            facts[f"{kind}_score"] = total / count if count else None
        return facts

    def _empty(self) -> MapStore:
        options = self._options
        return MapStore(self._shape, options.capacity, semantic_weight=self._weight, quota=options.quota)

    def _predict(self, kind: str, cosines: Floats, layers: range) -> list[Prediction]:
        """Predict each of these layers from the nearest maps that have scores for it."""
        store, predictions = self._store, []
        best = self._search.nearest(cosines)
        is_counted = False
        for layer in layers:
            nearest, squares = best, store.squares[layer]
            if not (squares[best.slots[0]] if len(best.slots) == 1 else squares[best.slots].all()):
                has_it = squares[: cosines.shape[1]] > 0
                if not has_it.any():
                    continue
                nearest = self._search.nearest(np.where(has_it, cosines, -np.float32(np.inf)))
            if not is_counted:
                is_counted = True
                count, total = self._found[kind]
                scores = nearest.scores
                sum_of_scores = scores[0] if len(scores) == 1 else np.sum(scores)
                self._found[kind] = count + len(scores), total + float(sum_of_scores)
            found = self._prediction(layer, self._distance if kind == "trajectory" else layer + 1, nearest)
            if found is not None:
                predictions.append(found)
        return predictions

    def _prediction(self, layer: int, distance: int, nearest: NearestMaps) -> Prediction | None:
        """None where no expert is likely."""
        num_experts, top_k = self._shape.num_experts[layer], self._shape.top_k[layer]
        slots, scores = nearest
        if len(slots) == 1:
            row = self._store.maps[layer, slots[0], :num_experts]
            score = float(scores[0])
            experts, likely = select(row, score, top_k, self._options.select)
        else:
            rows = self._store.maps[layer, slots, :num_experts]
            experts, likely = union(rows, select_rows(rows, np.asarray(scores), top_k, self._options.select))
            row, score = rows.max(axis=0), float(np.mean(scores))
        return Prediction(layer, experts, likely, distance, score, row.tolist()) if experts else None

    def _add(
        self,
        scores: Floats,
        chosen: Ids,
        requests: npt.NDArray[np.int64],
        embedding: Floats | None,
        semantic: Floats | None = None,
        trajectory: Floats | None = None,
    ) -> None:
        num_layers, num_experts = scores.shape[1:]
        if trajectory is None and self._store.num_maps:
            self._count_work(len(requests), num_layers * num_experts)
        self.work.read_nbytes += scores.nbytes
        self._store.add(scores, chosen, requests, embedding, semantic, trajectory)

    def _count_work(self, num_rows: int, width: int) -> None:
        """Count a product of rows with all stored maps, of `width` numbers each."""
        work, numbers = self.work, self._store.num_maps * width
        work.read_nbytes += 4 * numbers
        work.flops += 2 * num_rows * numbers


def select(probabilities: Floats, score: float, top_k: int, mode: Select = "delta") -> tuple[list[int], list[float]]:
    """Experts by falling probability [E] (ties: the lowest id), and their probabilities.

    "delta": the fewest whose sum reaches clip(1 - score, 0, 1), at least `top_k` (equations 6 to 8). "top-k": `top_k`.
    Either leaves out those of probability 0, however few remain.
    """
    order = (-probabilities).argsort(kind="stable")
    falling: list[float] = probabilities[order].tolist()
    count = top_k
    threshold = 1.0 - score if mode == "delta" else 0.0
    reached = sum(falling[:top_k])
    num_experts = len(falling)
    if threshold > reached:
        threshold = min(threshold, 1.0)
        while reached < threshold and count < num_experts:
            reached += falling[count]
            count += 1
    while count and falling[count - 1] <= 0.0:
        count -= 1
    return order[:count].tolist(), falling[:count]


def select_rows(probabilities: Floats, scores: Floats, top_k: int, mode: Select = "delta") -> npt.NDArray[np.bool_]:
    """`select` of every row: which experts [T, E], given probabilities [T, E] and scores [T]."""
    falling = -np.sort(-probabilities, axis=1)
    counts = np.full(len(falling), min(top_k, falling.shape[1]))
    if mode == "delta":
        threshold = np.clip(1.0 - scores.astype(np.float64), 0.0, 1.0)
        reached = np.cumsum(falling, axis=1, dtype=np.float64) >= threshold[:, None]
        counts = np.maximum(counts, np.where(reached[:, -1], reached.argmax(axis=1) + 1, falling.shape[1]))
    counts = np.minimum(counts, (falling > 0).sum(axis=1))
    least = falling[np.arange(len(falling)), np.maximum(counts, 1) - 1][:, None]
    selected: npt.NDArray[np.bool_] = probabilities > least
    is_equal = probabilities == least
    num_left = (counts - selected.sum(axis=1))[:, None]
    selected |= is_equal & (np.cumsum(is_equal, axis=1, dtype=np.int32) <= num_left)
    return selected


def union(probabilities: Floats, selected: npt.NDArray[np.bool_]) -> tuple[list[int], list[float]]:
    """The experts that any row selected, by their highest probability among the rows that did (ties: the lowest id)."""
    highest = np.where(selected, probabilities, 0.0).max(axis=0)
    order = (-highest).argsort(kind="stable")[: int((highest > 0).sum())]
    return order.tolist(), highest[order].tolist()
