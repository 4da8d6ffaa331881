"""What a request has asked for most so far: request-level hit counts (what fMoE, section 2, measures maps against)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Began, History, Ids, Routed, Want
from expertly.policies.predictor.base import Predictor
from expertly.policies.predictor.popularity import Counts as CountsOfLayer
from expertly.policies.predictor.popularity import Popular, count, shares
from expertly.policies.predictor.ranking import Reach, WidthOptions, best_of_rows


class Counts(Predictor):
    """Names, for each request of a pass, the experts that it chose most often in the layer, `distance` layers ahead;
    before it has chosen any there, the most popular. Scores are shares of the request's choices. A request that
    a pass leaves out is forgotten.
    """

    wants: frozenset[Want] = frozenset({"experts"})

    def __init__(
        self,
        geometry: Geometry,
        trained: Mapping[int, int],
        distance: int = 1,
        options: WidthOptions = WidthOptions(),  # noqa: B008 - frozen
    ) -> None:
        """`trained`: tokens that each expert served in a training part, by expert id; may be empty."""
        super().__init__()
        self._layers = geometry.layers
        self._reach = Reach(geometry, distance)
        self._width = options.width
        self._popular = Popular(geometry, trained)
        self._rows: list[tuple[list[CountsOfLayer], slice | Ids]] = []  # of each request: counts by layer, its rows
        self._counts: dict[int, list[CountsOfLayer]] = {}  # of the requests of this pass
        self._num_rows = 0

    def begin_iteration(self, began: Began) -> Iterator[Prediction]:
        requests, first = np.unique(began.requests, return_index=True)
        self._num_rows = len(began.requests)
        before, self._counts = self._counts, {}
        for request in requests[np.argsort(first)].tolist():
            counts = before.get(request)
            if counts is None:
                counts = [np.zeros(layer.num_experts, np.int64) for layer in self._layers]
            self._counts[request] = counts
        if len(self._counts) == 1:
            self._rows = [(counts, slice(None)) for counts in self._counts.values()]
        else:
            self._rows = [
                (counts, np.flatnonzero(began.requests == request)) for request, counts in self._counts.items()
            ]
        for layer in self._reach.at_begin():
            yield from self._predict(layer, layer + 1)

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        if routed.experts is not None:
            self._popular.saw(routed.layer, routed.experts)
            is_known = (
                len(routed.experts) == self._num_rows
            )  # a pass whose beginning was left out: whose rows are they?
            for counts, rows in self._rows if is_known else ():
                count(counts[routed.layer], routed.experts[rows])
        ahead = self._reach.after(routed.layer)
        if ahead is not None:
            yield from self._predict(ahead, self._reach.distance)

    def learn(self, history: History) -> None:
        self._popular.learn(history.experts)

    def facts(self) -> dict[str, int | float | None]:
        """`requests`: those of the last pass, of which counts are kept."""
        return {"requests": len(self._counts)}

    def _predict(self, layer: int, distance: int) -> Iterator[Prediction]:
        self.work.num_calls += 1
        self.work.read_nbytes += self._layers[layer].num_experts * 8 * len(self._rows)
        popular = self._popular.shares(layer)
        rows = []
        for counts, _ in self._rows:
            scores = shares(counts[layer])
            if scores is None:
                scores = popular
            if scores is not None:
                rows.append(scores)
        if rows:
            prediction = best_of_rows(layer, distance, np.stack(rows), self._width or self._layers[layer].top_k)
            if prediction is not None:
                yield prediction
