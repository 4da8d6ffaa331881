"""Names the most popular experts: of a layer, or of each request so far (as fMoE, section 2, compares maps with)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Began, Floats, History, Ids, Routed, Want
from expertly.policies.known import Known
from expertly.policies.prediction import WidthOptions, best_of_rows
from expertly_lab.baselines.fixed_distance import FixedDistancePredictor

LayerCounts = npt.NDArray[np.int64]


def count(counts: LayerCounts, experts: Ids) -> None:
    """Add the choices of rows, `experts` [T, K], to a layer's `counts` [E]; ids outside 0..E-1 do not count."""
    chosen = experts.ravel().astype(np.int64)
    counts += np.bincount(chosen[(chosen >= 0) & (chosen < len(counts))], minlength=len(counts))


class Popular:
    """How often each expert was chosen: in a training part where there is one, else in everything seen so far."""

    def __init__(self, geometry: Geometry, trained: Mapping[int, int]) -> None:
        self._counts = [np.zeros(layer.num_experts, np.int64) for layer in geometry.layers]
        self._is_given = bool(trained)  # by expert id, of the rows that `learn` is told, too
        self._is_trained = self._is_given
        for eid, num in trained.items():
            layer = geometry.layer_of[eid]
            self._counts[layer][eid - geometry.first_ids[layer]] = num

    def learn(self, experts: Ids) -> None:
        """Count rows of a training part, [T, L, K]."""
        if not self._is_given and len(experts):
            self._is_trained = True
            for layer, counts in enumerate(self._counts):
                count(counts, experts[:, layer])

    def saw(self, layer: int, experts: Ids) -> None:
        """Count rows of a running pass, [T, K]."""
        if not self._is_trained:
            count(self._counts[layer], experts)

    def shares(self, layer: int) -> Floats | None:
        """Each expert's share of the choices in this layer, [E]; None where there were none."""
        return shares(self._counts[layer])


def shares(counts: LayerCounts) -> Floats | None:
    """`counts` [E] as shares of their sum; None where that is 0."""
    total = int(counts.sum())
    return (counts / total).astype(np.float32) if total else None


class Popularity(FixedDistancePredictor):
    """Names the most popular experts of each layer, `distance` layers ahead. Scores are shares of the choices."""

    name = "popularity"
    wants: frozenset[Want] = frozenset({"experts"})

    def __init__(self, geometry: Geometry, distance: int, options: WidthOptions, known: Known) -> None:
        super().__init__(geometry, distance, options, known)
        self._popular = Popular(geometry, known.popularity)

    def router_ran(self, routed: Routed) -> Iterable[Prediction]:
        if routed.experts is not None:
            self._popular.saw(routed.layer, routed.experts)
        return super().router_ran(routed)

    def learn(self, history: History) -> None:
        self._popular.learn(history.experts)

    def _predict(self, layer: int, distance: int) -> Prediction | None:
        scores = self._shares(layer)
        width = self._width or self._layers[layer].top_k
        return best_of_rows(layer, distance, np.stack(scores), width) if scores else None

    def _shares(self, layer: int) -> list[Floats]:
        """Shares, [E] each, of which the best are named."""
        popular = self._popular.shares(layer)
        return [] if popular is None else [popular]


class Counts(Popularity):
    """Names, for each request of a pass, the experts that it chose most often in the layer, `distance` layers ahead;
    before it has chosen any there, the most popular. Scores are shares of the request's choices. A request that is not
    in the next pass is forgotten.
    """

    name = "counts"

    def __init__(self, geometry: Geometry, distance: int, options: WidthOptions, known: Known) -> None:
        super().__init__(geometry, distance, options, known)
        self._counts: dict[int, list[LayerCounts]] = {}  # of the requests of this pass, by layer
        self._rows: list[tuple[list[LayerCounts], slice | Ids]] = []  # of each request: its counts, its rows
        self._num_rows = 0

    def begin_iteration(self, began: Began) -> Iterable[Prediction]:
        requests, first = np.unique(began.requests, return_index=True)
        self._num_rows = len(began.requests)
        before, self._counts, self._rows = self._counts, {}, []
        for request in requests[np.argsort(first)].tolist():
            counts = before.get(request)
            if counts is None:
                counts = [np.zeros(layer.num_experts, np.int64) for layer in self._layers]
            self._counts[request] = counts
            is_alone = len(requests) == 1
            self._rows.append((counts, slice(None) if is_alone else np.flatnonzero(began.requests == request)))
        return super().begin_iteration(began)

    def router_ran(self, routed: Routed) -> Iterable[Prediction]:
        # Of a pass whose beginning was left out nobody knows whose rows they are.
        if routed.experts is not None and len(routed.experts) == self._num_rows:
            for counts, rows in self._rows:
                count(counts[routed.layer], routed.experts[rows])
        return super().router_ran(routed)

    def facts(self) -> dict[str, int | float | None]:
        """`requests`: those of the last pass, whose counts are kept."""
        return {"requests": len(self._counts)}

    def _shares(self, layer: int) -> list[Floats]:
        popular = self._popular.shares(layer)
        known = [shares(counts[layer]) for counts, _ in self._rows]
        return [used for share in known if (used := popular if share is None else share) is not None]
