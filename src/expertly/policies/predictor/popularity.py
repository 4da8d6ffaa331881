"""The most popular experts of a layer, whoever asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Began, Floats, History, Ids, Routed, Want
from expertly.policies.predictor.base import Predictor
from expertly.policies.predictor.ranking import Reach, WidthOptions, best_of_rows

Counts = npt.NDArray[np.int64]


def count(counts: Counts, experts: Ids) -> None:
    """Add the choices of rows, `experts` [T, K], to a layer's `counts` [E]; what is no expert is no choice."""
    chosen = experts.ravel().astype(np.int64)
    counts += np.bincount(chosen[(chosen >= 0) & (chosen < len(counts))], minlength=len(counts))


class Popular:
    """How often each expert was chosen: in a training part where there is one, else in all that was seen so far."""

    def __init__(self, geometry: Geometry, trained: Mapping[int, int]) -> None:
        self._counts = [np.zeros(layer.num_experts, np.int64) for layer in geometry.layers]
        self._is_given = bool(trained)  # by expert id, of the rows that `learn` is told, too
        self._is_trained = self._is_given
        for eid, num in trained.items():
            layer = geometry.layer_of_expert(eid)
            self._counts[layer][eid - geometry.first_expert_id(layer)] = num

    def learn(self, experts: Ids) -> None:
        """Rows of a training part, [T, L, K]."""
        if not self._is_given and len(experts):
            self._is_trained = True
            for layer, counts in enumerate(self._counts):
                count(counts, experts[:, layer])

    def saw(self, layer: int, experts: Ids) -> None:
        """Rows of a running pass, [T, K]."""
        if not self._is_trained:
            count(self._counts[layer], experts)

    def shares(self, layer: int) -> Floats | None:
        """Of the choices in this layer, [E]; None where there were none."""
        return shares(self._counts[layer])


def shares(counts: Counts) -> Floats | None:
    """`counts` [E] as shares of their sum; None where that is 0."""
    total = int(counts.sum())
    return (counts / total).astype(np.float32) if total else None


class Popularity(Predictor):
    """Names the most popular experts of each layer, `distance` layers ahead. Scores are shares of the choices."""

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

    def begin_iteration(self, began: Began) -> Iterator[Prediction]:
        for layer in self._reach.at_begin(began.layers):
            yield from self._predict(layer, layer + 1)

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        if routed.experts is not None:
            self._popular.saw(routed.layer, routed.experts)
        ahead = self._reach.after(routed.layer)
        if ahead is not None:
            yield from self._predict(ahead, self._reach.distance)

    def learn(self, history: History) -> None:
        self._popular.learn(history.experts)

    def _predict(self, layer: int, distance: int) -> Iterator[Prediction]:
        self.work.num_calls += 1
        scores = self._shares(layer)
        self.work.read_nbytes += self._layers[layer].num_experts * 8 * len(scores)
        if scores:
            prediction = best_of_rows(layer, distance, np.stack(scores), self._width or self._layers[layer].top_k)
            if prediction is not None:
                yield prediction

    def _shares(self, layer: int) -> list[Floats]:
        """[E] each, of which the best are named."""
        popular = self._popular.shares(layer)
        return [] if popular is None else [popular]
