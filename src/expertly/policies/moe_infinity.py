"""MoE-Infinity: activation matrices of past requests, how many tokens each expert served, say which experts a running
one will need and which are evicted. In the order of the paper, whose sections are named.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry, ModelShape
from expertly.core.messages import Prediction
from expertly.core.observation import Began, Floats, History, Ids, Routed, Want
from expertly.policies.base import option
from expertly.policies.eviction import DenseScoredPolicy
from expertly.policies.known import NOTHING, Known
from expertly.policies.learned import MAX_CAPACITY, MAX_NBYTES
from expertly.policies.prediction import ALL_LAYERS, Predictor, WidthOptions, best_of_rows, distance_in
from expertly.policies.similarity import TIE, RunningCosines, inverse_root

# -- 4.3, B.1: collections of a few requests' matrices that differ from each other ------------------------------------

DEFAULT_CAPACITY = 120
MAX_COUNT = 1 << 24  # tokens beyond which float32 cannot count; more count as so many

Counts = npt.NDArray[np.int64]


class Collection:
    """Matrices of up to `capacity` requests, of one phase. Slots below `num_matrices` are filled; callers must not
    write the arrays. Raises ConfigError where it would not fit into memory.
    """

    def __init__(self, shape: ModelShape, capacity: int = DEFAULT_CAPACITY) -> None:
        num_layers, num_experts = shape.num_layers, shape.max_experts
        nbytes = 4 * capacity * num_layers * num_experts
        if nbytes > MAX_NBYTES:
            raise ConfigError(f"capacity={capacity}: matrices of {nbytes} bytes; at most {MAX_NBYTES} are accepted")
        self.capacity = capacity
        self.num_matrices = 0
        # [L, E, C] tokens served: a search reads along an expert. Zeroed pages take no memory before they are written.
        self.columns: Floats = np.zeros((num_layers, num_experts, capacity), np.float32)
        self.squares = np.zeros((num_layers, capacity))  # [L, C] squared length of a matrix' row
        self.born: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)  # [C] counts insertions: the newest is highest
        self.total: Counts = np.zeros((num_layers, num_experts), np.int64)  # [L, E] the sum of all matrices

    def add(self, counts: npt.NDArray[Any]) -> None:
        """Add a request's matrix [L, E], unless it has no token. It takes a free slot or, when none is left, that of
        the matrix nearest to it (appendix B.1), the oldest of equals.
        """
        assert counts.shape == self.total.shape
        matrix = np.minimum(counts, MAX_COUNT).astype(np.float32)
        if not matrix.any():
            return
        born = int(self.born.max()) + 1
        slot = self.num_matrices
        if slot < self.capacity:
            self.num_matrices += 1
        else:
            cosines = matrix.reshape(-1) @ self.columns.reshape(-1, self.capacity)
            cosines *= inverse_root(self.squares.sum(axis=0)) * inverse_root(np.square(matrix).sum(keepdims=True))[0]
            nearest = np.flatnonzero(cosines >= cosines.max() - TIE)
            slot = int(nearest[self.born[nearest].argmin()])
        self.total += matrix.astype(np.int64) - self.columns[:, :, slot].astype(np.int64)
        self.columns[:, :, slot] = matrix
        self.squares[:, slot] = np.square(matrix, dtype=np.float64).sum(axis=1)
        self.born[slot] = born


# -- 4.5: the match of a running request with them --------------------------------------------------------------------


class Match(RunningCosines):
    """The cosines of one request's matrix to every matrix of a collection, over the layers that the request has run.
    `counts` [L, E] is what its earlier iterations add up to.
    """

    def __init__(self, collection: Collection, counts: Counts | None = None) -> None:
        super().__init__(1, collection.num_matrices)
        self.collection = collection
        self._counts = np.zeros_like(collection.total) if counts is None else counts
        layers = np.flatnonzero(self._counts.any(axis=1))
        if len(layers):
            before = self._counts.reshape(-1).astype(np.float32)
            dots = before @ collection.columns.reshape(len(before), -1)[:, : self.num_stored]
            squares = np.square(self._counts, dtype=np.float64).sum()
            self.add(dots, squares, collection.squares[layers, : self.num_stored].sum(axis=0))

    def observe(self, layer: int, counts: Counts) -> None:
        """How many of the iteration's tokens each expert of a layer serves, [E]."""
        (chosen,) = counts.nonzero()
        num, before = counts[chosen], self._counts[layer]
        dots = num.astype(np.float32) @ self.collection.columns[layer, chosen, : self.num_stored]
        stored = None if before.any() else self.collection.squares[layer, : self.num_stored]
        self.add(dots, num @ (num + 2 * before[chosen]), stored)

    def nearest(self, num: int) -> tuple[tuple[int, ...], float] | None:
        """The slots, rising, of the `num` nearest matrices, fewer where fewer have anything in common, of equal ones,
        up to rounding, the newest; and the cosine of the nearest, above 0 up to 1. None where there are none.
        """
        rows = self.cosines()
        if rows is None:
            return None
        cosines = rows[0]
        last = max(self.num_stored - num, 0)
        best, least = float(cosines.max()), float(np.partition(cosines, last)[last])
        slots = np.flatnonzero(cosines >= max(least - TIE, TIE))
        if len(slots) > num:  # several are as near as the last of them
            is_equal = cosines[slots] <= least + TIE
            equal = slots[is_equal]
            newest = equal[np.argsort(-self.collection.born[equal])]
            slots = np.sort(np.append(slots[~is_equal], newest)[:num])
        return (tuple(slots.tolist()), min(best, 1.0)) if len(slots) else None


# -- 4.5, 4.6: the predictor ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EAMOptions(WidthOptions):
    """Options of `eam`. The paper leaves `matches`, `width` and the distance open."""

    matrix: Literal["request", "pass"] = option(
        "request", "what is matched: all that the request has run in this phase, or its running iteration alone"
    )
    capacity: int = option(DEFAULT_CAPACITY, "matrices, of prompts and of decoding each", least=1, most=MAX_CAPACITY)
    matches: int = option(4, "nearest matrices that are summed", least=1)


@dataclass(slots=True, eq=False)
class _OfRequest:
    """One request's part of the running pass."""

    rows: npt.NDArray[np.intp]
    total: Counts  # [L, E] of its iterations of this phase so far (the paper's rEAM)
    counts: Counts  # [L, E] of this one (its iEAM)
    match: Match
    predicted: Floats | None = None  # [L, E] rows of sum 1 (its pEAM); None: nothing is known
    slots: tuple[int, ...] | None = None  # matched; None: whatever is popular


class EAM(Predictor):
    """Names the experts of the next `distance` layers, when an iteration begins and anew after each router: those that
    most tokens of the `matches` nearest matrices chose; of a request that has run nothing in this phase, the most
    popular ones. A score is p x (1 - (i - l) / L) for layer i predicted after layer l.
    Every request of a pass is matched by itself; the prediction is the union, by the highest p. While the same matrices
    are nearest, only the next layer and one that has come within reach are predicted.

    A request's iterations are summed, those of its prompt and of its decoding separately. The sums enter the collection
    at the first pass without that request. An iteration that failed, or of which a layer was not seen,
    is left out, so that all rows of a sum count the same tokens, K times.
    """

    name = "eam"
    default_distance: ClassVar[int | None] = ALL_LAYERS
    options = EAMOptions
    wants: frozenset[Want] = frozenset({"experts"})

    def __init__(
        self, geometry: Geometry, distance: int = 1, options: EAMOptions = EAMOptions(), known: Known = NOTHING
    ) -> None:
        self._options = options
        self._shape = ModelShape.of(geometry)
        self._distance = distance_in(geometry, distance)
        self._said_anew = {1, self._distance}  # layers ahead that are predicted while the same matrices are nearest
        self._is_expert = np.arange(self._shape.max_experts) < np.array(self._shape.num_experts)[:, None]  # [L, E]
        self.prompts, self.decoding = (Collection(self._shape, options.capacity) for _ in range(2))  # section 4.3
        self._open: dict[int, tuple[Counts, Counts]] = {}  # of each request that is not over: prompt, decoding
        self._pass: list[_OfRequest] | None = None
        self._num_rows = 0
        self._last = -1
        self._num_seen = 0
        self._said: Floats | None = None  # [L, E] the last outlook
        self._matched = (0, 0.0)  # requests matched, sum of their cosines

    def begin_iteration(self, began: Began) -> Iterator[Prediction]:
        """Requests that are not in the pass are over."""
        requests = list(dict.fromkeys(began.requests.tolist()))
        self._close_all_but(requests)
        self._num_rows = len(began.requests)
        self._last, self._num_seen = -1, 0
        self._pass = []
        for request in requests:
            rows = np.flatnonzero(began.requests == request)
            is_prefill = bool(began.is_prefill[rows[0]])
            collection = self.prompts if is_prefill else self.decoding
            total = self._total_of(request, is_prefill)
            match = Match(collection, total if self._options.matrix == "request" else None)
            entry = _OfRequest(rows, total, np.zeros_like(total), match)
            self._match(entry)
            if entry.predicted is None and collection.num_matrices:
                entry.predicted = _shares(collection.total)
            self._pass.append(entry)
        return self._predict(range(min(self._distance, self._shape.num_layers)))

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        experts, layer = routed.experts, routed.layer
        if self._pass is None or experts is None or len(experts) != self._num_rows:
            return iter(())  # of a pass whose beginning was left out nobody knows whose rows they are
        if layer <= self._last:
            return iter(())
        self._last = layer
        self._num_seen += 1
        is_new = False
        for entry in self._pass:
            entry.counts[layer] = self._counted(layer, experts[entry.rows])
            entry.match.observe(layer, entry.counts[layer])
            is_new |= self._match(entry)
        ahead = range(layer + 1, min(layer + self._distance + 1, self._shape.num_layers))
        return self._predict(ahead if is_new else [near for near in ahead if near - layer in self._said_anew])

    def end_iteration(self, ok: bool) -> None:
        """Add the iteration to the sums of its requests, if it ended well and was seen whole."""
        if ok and self._num_seen == self._shape.num_layers:
            for entry in self._pass or ():
                entry.total += entry.counts
        self._pass = None

    def learn(self, history: History) -> None:
        """Learn as if these rows had run; a request is over when a block has nothing of it."""
        requests = list(dict.fromkeys(history.requests.tolist()))
        self._close_all_but(requests)
        for request in requests:
            for is_prefill in (True, False):
                chosen = history.experts[(history.requests == request) & (history.is_prefill == is_prefill)]
                for layer, row in enumerate(self._total_of(request, is_prefill)):
                    row += self._counted(layer, chosen[:, layer])

    def facts(self) -> dict[str, int | float | None]:
        """Matrices of prompts (`prefill_matrices`) and of decoding, of `capacity` each; `searches` that found a match,
        and their mean `cosine`.
        """
        count, total = self._matched
        return {
            "prefill_matrices": self.prompts.num_matrices,
            "decode_matrices": self.decoding.num_matrices,
            "capacity": self._options.capacity,
            "searches": count,
            "cosine": total / count if count else None,
        }

    def _close_all_but(self, requests: Container[int]) -> None:
        """Requests outside these are over."""
        for request in [request for request in self._open if request not in requests]:
            prompt, decoding = self._open.pop(request)
            self.prompts.add(prompt)
            self.decoding.add(decoding)

    def _total_of(self, request: int, is_prefill: bool) -> Counts:
        """The sums of a request that is not over, [L, E]."""
        if request not in self._open:
            shape = self._shape.num_layers, self._shape.max_experts
            self._open[request] = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        return self._open[request][0 if is_prefill else 1]

    def _counted(self, layer: int, experts: Ids) -> Counts:
        """[E] how many of the rows [T, K] chose each expert."""
        ids = experts.ravel().astype(np.int64)
        is_choice = (ids >= 0) & (ids < self._shape.num_experts[layer])
        counts: Counts = np.bincount(ids[is_choice], minlength=self._shape.max_experts)
        return counts

    def _match(self, entry: _OfRequest) -> bool:
        """Search, aggregate and scale (figure 5). Returns whether other matrices are nearest now."""
        nearest = entry.match.nearest(self._options.matches)
        if nearest is None:
            return False
        slots, cosine = nearest
        self._matched = self._matched[0] + 1, self._matched[1] + cosine
        if slots == entry.slots:
            return False
        entry.slots = slots
        entry.predicted = _shares(entry.match.collection.columns[:, :, list(slots)].sum(axis=2))
        return True

    def _predict(self, layers: Sequence[int]) -> Iterator[Prediction]:
        """Predict these layers, nearer ones first. The first prediction carries the outlook, if that changed."""
        predicted = [entry.predicted for entry in self._pass or () if entry.predicted is not None]
        if not predicted or not layers:
            return
        likely = np.stack(predicted)  # [T, L, E]
        outlook = self._outlook(likely.max(axis=0))
        for layer in layers:
            best = self.named(layer, layer - self._last, likely[:, layer, : self._shape.num_experts[layer]])
            if best is not None:
                ahead = layer - self._last
                scores = [(1 - ahead / self._shape.num_layers) * score for score in best.scores]
                yield replace(best, scores=scores, outlook=outlook)
                outlook = None

    def named(self, layer: int, ahead: int, rows: Floats) -> Prediction | None:
        """The experts of a layer that are named, of rows [T, E] of predicted matrices; scores are p."""
        return best_of_rows(layer, ahead, rows, self._options.width or self._shape.top_k[layer])

    def _outlook(self, predicted: Floats) -> tuple[float, ...] | None:
        """The predicted matrices as one, by the highest p; None where it is the last outlook again."""
        if self._said is not None and np.array_equal(predicted, self._said):
            return None
        self._said = predicted
        return tuple(predicted[self._is_expert].tolist())


def _shares(counts: npt.NDArray[np.generic]) -> Floats:
    """Rows [L, E] scaled to sum 1; those of zeros stay."""
    total = counts.astype(np.float64).sum(axis=1, keepdims=True)
    shares: Floats = (counts / np.maximum(total, 1)).astype(np.float32)
    return shares


# -- 4.7: eviction, algorithm 1 ---------------------------------------------------------------------------------------

EPSILON = 1e-6  # added to each p, and the sum of a layer's p where all are 0


class EAMEviction(DenseScoredPolicy):
    """Evicts the least (p + eps) x (1 - l / L) / sum of the layer's p, layers l from 0 (algorithm 1). The p are those
    of the newest outlook; before the first one, of the newest prediction of each layer, or 0.
    """

    name = "eam"
    needs_probabilities = True

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        sizes = [layer.num_experts for layer in geometry.layers]
        self._first = np.cumsum([0, *sizes[:-1]])  # expert id of each layer
        self._layer = np.repeat(np.arange(len(sizes)), sizes)  # of each expert
        self._decay = 1 - self._layer / len(sizes)
        self._likely = np.zeros(len(self._layer))
        self._has_outlook = False
        self._scores: npt.NDArray[np.float64] | None = None  # of every expert; None: to be computed

    def predicted(self, first_expert: int, probabilities: Sequence[float]) -> None:
        if not self._has_outlook:
            self._likely[first_expert : first_expert + len(probabilities)] = probabilities
            self._scores = None

    def expected(self, outlook: Sequence[float]) -> None:
        self._has_outlook = True
        self._likely = np.asarray(outlook, np.float64)
        self._scores = None

    def all_scores(self) -> npt.NDArray[np.float64]:
        if self._scores is None:
            total = np.add.reduceat(self._likely, self._first)
            total[total == 0] = EPSILON
            self._scores = (self._likely + EPSILON) * self._decay / total[self._layer]
        return self._scores
