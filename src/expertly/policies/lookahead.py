"""Asks the routers of later layers about the input of an earlier layer (MoEpic, section 3.2, equation 3; ProMoE,
section 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Began, Routed, Want
from expertly.policies.base import option
from expertly.policies.known import Known
from expertly.policies.prediction import RankingPredictor, WidthOptions, best_of_rows


@dataclass(frozen=True)
class LookaheadOptions(WidthOptions):
    next_token: bool = option(False, "past the last layer, too: the first layers, as the next token will run them")


class Lookahead(RankingPredictor):
    """After layer l, names the best experts of layer l + distance; after the first layer, of all layers up to there. It
    looks no farther than it is shown. Of a layer that goes by the token alone, it names the experts when the pass
    begins, for certain.

    With `next_token`, layers past the last one are the first ones of the next pass. Then each request's last row is
    asked, since its next token follows from that. If no pass follows, the prediction was wrong.
    """

    name = "lookahead"
    options = LookaheadOptions
    needs = ("lookahead",)
    wants: frozenset[Want] = frozenset({"lookahead"})

    def __init__(self, geometry: Geometry, distance: int, options: LookaheadOptions, known: Known) -> None:
        super().__init__(geometry, distance, options, known)
        self._next_token = options.next_token
        self._num_rows = 1  # of this pass
        self._last = np.zeros(1, np.intp)  # of them, each request's last

    def lookahead_width(self, layer: int) -> int | None:
        if self._distance > 1 or self._next_token or type(self) is not Lookahead:
            return None
        following = self._layers[layer + 1 : layer + 2]
        return (self._width or following[0].top_k) if following else 0

    def begin_iteration(self, began: Began) -> Iterator[Prediction]:
        if self._next_token:
            self._num_rows = len(began.requests)
            self._last = _last_rows(began.requests)
        for layer, experts in began.choices.items():
            scores = np.zeros((len(experts), self._layers[layer].num_experts), np.float32)
            np.put_along_axis(scores, experts, 1.0, axis=1)
            prediction = best_of_rows(layer, layer + 1, scores, experts.shape[1])
            if prediction is not None:
                yield prediction

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        shown, num_layers, now = routed.lookahead, len(self._layers), routed.layer
        if shown is None or not shown.size:
            return
        farthest = min(self._distance, shown.shape[1], num_layers - 1)
        for distance in range(1 if now == 0 else max(1, farthest), farthest + 1):
            layer = (now + distance) % num_layers
            if layer < now and not self._next_token:
                return
            scores = shown[:, distance - 1, : self._layers[layer].num_experts]  # [T, E]
            if layer < now and len(scores) > 1:
                if len(scores) != self._num_rows:
                    return  # of a pass whose beginning was left out: nobody knows whose rows they are
                scores = scores[self._last]
            prediction = best_of_rows(layer, distance, scores, self._width or self._layers[layer].top_k)
            if prediction is not None:
                yield prediction


def _last_rows(requests: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    """The last row of each request; `requests` [T]."""
    from_the_end = np.unique(requests[::-1], return_index=True)[1]
    last: npt.NDArray[np.intp] = np.sort(len(requests) - 1 - from_the_end)
    return last
