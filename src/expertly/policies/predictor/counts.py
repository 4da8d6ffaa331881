"""What a request has asked for most so far: request-level hit counts (what fMoE, section 2, measures maps against)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Began, Floats, Ids, Routed
from expertly.policies.predictor.popularity import Counts as CountsOfLayer
from expertly.policies.predictor.popularity import Popularity, count, shares
from expertly.policies.predictor.ranking import WidthOptions


class Counts(Popularity):
    """Names, for each request of a pass, the experts that it chose most often in the layer, `distance` layers ahead;
    before it has chosen any there, the most popular. Scores are shares of the request's choices. A request that
    a pass leaves out is forgotten.
    """

    def __init__(
        self,
        geometry: Geometry,
        trained: Mapping[int, int],
        distance: int = 1,
        options: WidthOptions = WidthOptions(),  # noqa: B008 - frozen
    ) -> None:
        """`trained`: tokens that each expert served in a training part, by expert id; may be empty."""
        super().__init__(geometry, trained, distance, options)
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
        yield from super().begin_iteration(began)

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        # Of a pass whose beginning was left out nobody knows whose rows they are.
        if routed.experts is not None and len(routed.experts) == self._num_rows:
            for counts, rows in self._rows:
                count(counts[routed.layer], routed.experts[rows])
        yield from super().router_ran(routed)

    def facts(self) -> dict[str, int | float | None]:
        """`requests`: those of the last pass, of which counts are kept."""
        return {"requests": len(self._counts)}

    def _shares(self, layer: int) -> list[Floats]:
        popular = self._popular.shares(layer)
        found = [shares(counts[layer]) for counts, _ in self._rows]
        return [one for share in found if (one := popular if share is None else share) is not None]
