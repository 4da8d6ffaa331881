"""Predictors that know a layer's experts without being shown anything: they name it so many layers ahead."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from expertly.core.messages import Prediction
from expertly.core.observation import Began, Routed
from expertly.policies.prediction import RankingPredictor


class FixedDistancePredictor(RankingPredictor):
    """Predicts a layer when the layer `distance` before it has run, and the first layers when a pass begins."""

    def begin_iteration(self, began: Began) -> Iterable[Prediction]:
        for layer in range(min(self._distance, len(self._layers))):
            if (prediction := self._predict(layer, layer + 1)) is not None:
                yield prediction

    def router_ran(self, routed: Routed) -> Iterable[Prediction]:
        layer = routed.layer + self._distance
        if layer < len(self._layers) and (prediction := self._predict(layer, self._distance)) is not None:
            yield prediction

    @abstractmethod
    def _predict(self, layer: int, distance: int) -> Prediction | None:
        """Predicts one layer, and counts its work."""
        ...
