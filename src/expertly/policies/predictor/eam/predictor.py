"""Predicts later layers from the activation matrices of similar requests (MoE-Infinity, section 4.5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Began, Floats, History, Ids, Routed, Want
from expertly.policies.base import PolicyOptions, option
from expertly.policies.known import NOTHING, Known
from expertly.policies.learned import MAX_CAPACITY, ModelShape
from expertly.policies.predictor.base import Predictor, best_of_rows, distance_in
from expertly.policies.predictor.eam.matrices import DEFAULT_CAPACITY, Collection, Counts, Match, Matrices

DIGITS = 6
"""Decimals of an outlook."""


@dataclass(frozen=True)
class EAMOptions(PolicyOptions):
    """Options of `eam`; the paper leaves these open."""

    capacity: int = option(DEFAULT_CAPACITY, "matrices, of prompts and of decoding each", least=1, most=MAX_CAPACITY)
    matches: int = option(4, "nearest matrices that are summed", least=1)
    width: int | None = option(
        None, "experts named of each layer; half as many as its router chooses, rounded up, unless said", least=1
    )
    threshold: float = option(
        0.0, "share of the tokens of the matched requests below which an expert is not named", least=0, most=1
    )
    proximity: bool = option(True, "of two layers the nearer one's experts first, where it names several")
    update: bool = option(True, "learn from what runs")


_Named = tuple[list[int], list[float], list[float]]
"""Of a layer: experts, their p, and the p of all."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """One request's part of the running pass."""

    request: int
    is_prefill: bool
    rows: npt.NDArray[np.intp]
    counts: Counts  # [L, E] of this iteration (the paper's iEAM)
    match: Match
    predicted: Floats | None  # [L, E] rows of sum 1 (its pEAM); None: nothing is known
    named: dict[int, _Named | None] = field(default_factory=dict)  # of `predicted`, by layer, as far as it was asked
    slots: tuple[int, ...] | None = None  # matched; None: whatever is popular
    cosine: float | None = None


class EAM(Predictor):
    """Names the experts of the next `distance` layers, anew after each router. Of the stored requests, it takes the
    `matches` whose matrices, over the layers that this iteration has run, are nearest to its own by cosine, and names
    the experts that most of their tokens chose. When an iteration begins, it names the most popular experts of its
    phase. A score is p x (1 - (i - l) / L) for layer i predicted after layer l (p alone without `proximity`);
    confidence is the mean cosine. Every request of a pass is matched by itself; the prediction is the union, by the
    highest p.

    A request's iterations are summed, those of its prompt and of its decoding separately. The sums enter the collection
    at the first pass without that request (or at `finish`); a request that comes back later starts anew. An iteration
    that failed, or of which a layer was not seen, is left out, so that all rows of a sum count the same tokens, K
    times.
    """

    name = "eam"
    options = EAMOptions
    learns = Matrices
    wants: frozenset[Want] = frozenset({"experts"})

    def __init__(
        self, geometry: Geometry, distance: int = 1, options: EAMOptions = EAMOptions(), known: Known = NOTHING
    ) -> None:
        super().__init__()
        self._options = options
        self._shape = ModelShape.of(geometry)
        self._distance = distance_in(geometry, distance)
        self._sizes = np.array(self._shape.num_experts)[:, None]  # [L, 1]
        self._is_expert = np.arange(self._shape.max_experts) < self._sizes  # [L, E]
        self._store = Matrices(self._shape, options.capacity)
        self._open: dict[int, tuple[Counts, Counts]] = {}  # of each request that is not over: prompt, decoding
        self._pass: list[_Sequence] | None = None
        self._layers = range(self._shape.num_layers)  # of the pass
        self._num_rows = 0
        self._last = -1
        self._num_seen = 0
        self._said: tuple[object, ...] | None = None  # what the last outlook was made of
        self._num_left_out = 0
        self._found = (0, 0.0)  # requests matched after a layer, sum of their cosines

    @property
    def learned(self) -> Matrices:
        return self._store

    def adopt(self, learned: Matrices) -> None:
        """Matrices of the same capacity are taken as they are, otherwise copied."""
        if learned.shape != self._shape:
            raise ConfigError(f"activation matrices: are of another model: {learned.shape}, must be {self._shape}")
        store = Matrices(self._shape, self._options.capacity)
        if learned.capacity == store.capacity:
            store = learned
        else:
            store.extend(learned)
        self._store = store
        self._pass = self._said = None

    def begin_iteration(self, began: Began) -> Iterator[Prediction]:
        """Predict the most popular experts of the phase, in the first layers. Requests that are not in the pass are
        over.
        """
        self._leave_out()
        requests, first = np.unique(began.requests, return_index=True)
        self._close_all_but(set(requests.tolist()))
        self._layers = range(self._shape.num_layers) if began.layers is None else began.layers
        self._num_rows = len(began.requests)
        self._last, self._num_seen = -1, 0
        self._pass = []
        for place in np.sort(first).tolist():
            request, is_prefill = int(began.requests[place]), bool(began.is_prefill[place])
            collection = self._store.of_phase(is_prefill)
            popular = _shares(collection.total) if collection.num_matrices else None
            rows, counts = np.flatnonzero(began.requests == request), np.zeros(collection.total.shape, np.int64)
            self._pass.append(_Sequence(request, is_prefill, rows, counts, Match(collection), popular))
        self.work.num_calls += 1
        self.work.read_nbytes += self._is_expert.size * 8 * len(self._pass)
        start = self._layers.start if len(self._layers) else 0
        return self._predict({layer: layer + 1 for layer in self._layers[: self._distance]}, start)

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        sequences, experts, layer = self._pass, routed.experts, routed.layer
        self.work.num_calls += 1
        if sequences is None or experts is None or len(experts) != self._num_rows:
            return iter(())  # of a pass whose beginning was left out nobody knows whose rows they are
        if layer <= self._last or layer not in self._layers:
            return iter(())
        self._last = layer
        self._num_seen += 1
        for sequence in sequences:
            self._observe(sequence, layer, experts if len(sequences) == 1 else experts[sequence.rows])
        last = min(layer + self._distance, self._layers.stop - 1)
        return self._predict({ahead: ahead - layer for ahead in range(layer + 1, last + 1)}, layer)

    def end_iteration(self, ok: bool) -> None:
        """Add the iteration to the sums of its requests, if it ended well and was seen whole."""
        self.work.num_calls += 1
        sequences = self._pass
        if sequences is None or not ok or self._num_seen != len(self._layers):
            self._leave_out()
            return
        self._pass = None
        if self._options.update:
            for sequence in sequences:
                self._sum_of(sequence.request, sequence.is_prefill)[...] += sequence.counts
                self.work.read_nbytes += sequence.counts.nbytes

    def learn(self, history: History) -> None:
        """Learn as if these rows had run; a request is over when a block has nothing of it."""
        requests, shape = history.requests, self._shape
        self._close_all_but(set(requests.tolist()))
        num_experts, num_numbers = shape.max_experts, shape.num_layers * shape.max_experts
        experts = history.experts.astype(np.int64)
        is_choice = (experts >= 0) & (experts < self._sizes)
        places = np.where(is_choice, experts + np.arange(shape.num_layers)[:, None] * num_experts, num_numbers)
        _, first = np.unique(requests, return_index=True)
        for request in requests[np.sort(first)].tolist():
            for is_prefill in (True, False):
                mine = places[(requests == request) & (history.is_prefill == is_prefill)]
                if len(mine):
                    counts = np.bincount(mine.ravel(), minlength=num_numbers + 1)[:num_numbers]
                    self._sum_of(request, is_prefill)[...] += counts.reshape(shape.num_layers, num_experts)

    def finish(self) -> None:
        self._close_all_but(set())

    def facts(self) -> dict[str, int | float | None]:
        """Matrices of prompts (`prefill_matrices`) and of decoding, of `capacity` each; iterations `left_out` that
        failed or were not seen whole; requests matched after a layer (`searches`) and their mean `cosine`.
        """
        count, total = self._found
        return {
            "prefill_matrices": self._store.prefill.num_matrices,
            "decode_matrices": self._store.decode.num_matrices,
            "capacity": self._store.capacity,
            "left_out": self._num_left_out,
            "searches": count,
            "cosine": total / count if count else None,
        }

    def _leave_out(self) -> None:
        if self._pass:
            self._num_left_out += len(self._pass)
        self._pass = None

    def _close_all_but(self, requests: set[int]) -> None:
        """Requests outside these are over."""
        for request in [request for request in self._open if request not in requests]:
            for collection, counts in zip(
                (self._store.prefill, self._store.decode), self._open.pop(request), strict=True
            ):
                if collection.num_matrices == collection.capacity and counts.any():
                    self._count_work(collection, collection.num_matrices * counts.size)
                collection.add(counts)

    def _sum_of(self, request: int, is_prefill: bool) -> Counts:
        """The sums of a request that is not over, [L, E]."""
        sums = self._open.get(request)
        if sums is None:
            shape = self._is_expert.shape
            sums = self._open[request] = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        return sums[0 if is_prefill else 1]

    def _observe(self, sequence: _Sequence, layer: int, experts: Ids) -> None:
        """A layer's router chose these experts for the rows of a request, [T, K]."""
        counts = _counted(experts, self._shape.num_experts[layer])
        row = sequence.counts[layer]
        for expert, num in counts.items():
            row[expert] = num
        match = sequence.match
        if not match.collection.num_matrices:
            return
        match.observe(layer, counts)
        self._count_work(match.collection, match.num_read + 2 * match.collection.num_matrices)
        nearest = match.nearest(self._options.matches)
        if nearest is None:
            return
        self._found = self._found[0] + 1, self._found[1] + nearest.cosine
        sequence.cosine = nearest.cosine
        if nearest.slots != sequence.slots:
            sequence.slots = nearest.slots
            sequence.predicted = _shares(match.collection.matrices[list(nearest.slots)].sum(axis=0))
            sequence.named.clear()
            self.work.read_nbytes += 4 * len(nearest.slots) * sequence.predicted.size

    def _predict(self, distances: Mapping[int, int], now: int) -> Iterator[Prediction]:
        """Predict these layers, nearer ones first; `now` is the layer that has run. The first prediction carries the
        outlook, if that changed.
        """
        sequences = [sequence for sequence in self._pass or () if sequence.predicted is not None]
        rows = [sequence.predicted for sequence in sequences if sequence.predicted is not None]
        if not rows:
            return
        cosines = [sequence.cosine for sequence in sequences if sequence.cosine is not None]
        confidence = sum(cosines) / len(cosines) if cosines else None
        is_first, known = True, sequences[0].named if len(sequences) == 1 else {}
        for layer, distance in distances.items():
            if layer not in known:
                known[layer] = self._named(layer, rows)
            if (named := known[layer]) is None:
                continue
            experts, shares, probabilities = named
            near = 1 - (layer - now) / self._shape.num_layers if self._options.proximity else 1.0
            outlook = self._outlook(sequences, rows) if is_first else None
            scores = [near * share for share in shares]
            yield Prediction(layer, experts, scores, distance, confidence, probabilities, outlook)
            is_first = False

    def _named(self, layer: int, rows: Sequence[Floats]) -> _Named | None:
        num_experts, top_k = self._shape.num_experts[layer], self._shape.top_k[layer]
        shares = [row[layer, :num_experts] for row in rows]
        likely = np.stack(shares)
        if self._options.threshold:
            likely[likely * top_k < self._options.threshold] = 0
        best = best_of_rows(layer, 1, likely, self._options.width or (top_k + 1) // 2)
        if best is None:
            return None
        probabilities = (shares[0] if len(shares) == 1 else np.maximum.reduce(shares)).tolist()
        return best.experts, best.scores, probabilities

    def _outlook(self, sequences: list[_Sequence], rows: list[Floats]) -> tuple[float, ...] | None:
        """The predicted matrices as one, by the highest p; None where it is the last outlook again."""
        made_of = tuple(
            (one.match.collection.generation, one.is_prefill, one.slots, None if one.slots is not None else one.request)
            for one in sequences
        )
        if made_of == self._said:
            return None
        self._said = made_of
        predicted = rows[0] if len(rows) == 1 else np.maximum.reduce(rows)
        numbers: list[float] = np.round(predicted[self._is_expert].astype(np.float64), DIGITS).tolist()
        return tuple(numbers)

    def _count_work(self, collection: Collection, num_numbers: int) -> None:
        """Count that so many numbers are read, and each is multiplied and added."""
        self.work.read_nbytes += 4 * num_numbers
        self.work.flops += 2 * num_numbers


def _counted(experts: Ids, num_experts: int) -> dict[int, int]:
    """How many of the rows [T, K] chose each expert."""
    if len(experts) == 1:
        chosen: list[int] = experts[0].tolist()
        return dict(Counter(expert for expert in chosen if 0 <= expert < num_experts))
    flat = experts.ravel().astype(np.int64)
    counts = np.bincount(flat[(flat >= 0) & (flat < num_experts)], minlength=num_experts)
    here = np.flatnonzero(counts)
    return dict(zip(here.tolist(), counts[here].tolist(), strict=True))


def _shares(counts: npt.NDArray[np.generic]) -> Floats:
    """Rows [L, E] scaled to sum 1; those of zeros stay."""
    numbers = counts.astype(np.float64)
    total = numbers.sum(axis=1, keepdims=True)
    total[total == 0] = 1
    shares: Floats = (numbers / total).astype(np.float32)
    return shares
