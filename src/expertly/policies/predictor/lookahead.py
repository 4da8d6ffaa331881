"""What the routers of later layers say of a layer's input (MoEpic, section 3.2, equation 3; ProMoE, section 4)."""

from __future__ import annotations

from collections.abc import Iterator

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Routed, Want
from expertly.policies.predictor.base import Predictor
from expertly.policies.predictor.ranking import Reach, WidthOptions, best_of_rows


class Lookahead(Predictor):
    """After layer l, the best of layer l + distance; after the first layer, of all layers up to there. Looks no farther
    than what it is shown does.
    """

    wants: frozenset[Want] = frozenset({"lookahead"})

    def __init__(self, geometry: Geometry, distance: int = 1, options: WidthOptions = WidthOptions()) -> None:  # noqa: B008 - frozen
        super().__init__()
        self._layers = geometry.layers
        self._reach = Reach(geometry, distance)
        self._width = options.width

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        if routed.lookahead is None or not routed.lookahead.size:
            return
        farthest = min(self._reach.distance, routed.lookahead.shape[1])
        for distance in range(1 if routed.layer == 0 else farthest, farthest + 1):
            layer = routed.layer + distance
            if layer >= len(self._layers):
                return
            scores = routed.lookahead[:, distance - 1, : self._layers[layer].num_experts]  # [T, E]
            self.work.num_calls += 1
            self.work.read_nbytes += scores.nbytes
            prediction = best_of_rows(layer, distance, scores, self._width or self._layers[layer].top_k)
            if prediction is not None:
                yield prediction
