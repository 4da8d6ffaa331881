"""fMoE and its rivals as the authors' artifact runs them (IntelliSys-Lab/FineMoE-EuroSys26 at 051cb7e): what each puts
into the prefetch queue after a layer. All of them predict within one forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Began, Floats, Routed, Want
from expertly.policies.base import PolicyOptions, option
from expertly.policies.fmoe import FMoE
from expertly.policies.known import NOTHING, Known
from expertly.policies.moe_infinity import EAM, EAMOptions
from expertly.policies.prediction import Predictor, RankingPredictor, WidthOptions, best_of_rows, distance_in


class SameIds(Predictor):
    """ "Mixtral-Offloading": the ids that layer l's router chose, for all layers up to l + `distance`. Nearer layers
    come first.
    """

    name = "same-ids"
    gives_probabilities = False
    wants: frozenset[Want] = frozenset({"experts"})

    def __init__(self, geometry: Geometry, distance: int, options: PolicyOptions, known: Known = NOTHING) -> None:
        self._geometry = geometry
        self._distance = distance_in(geometry, distance)

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        if routed.experts is None:
            return
        chosen = dict.fromkeys(routed.experts.ravel().tolist())
        for layer in range(routed.layer + 1, min(routed.layer + self._distance + 1, self._geometry.num_layers)):
            num_experts = self._geometry.layers[layer].num_experts
            ids = [expert for expert in chosen if 0 <= expert < num_experts]
            if ids:
                ahead = layer - routed.layer
                yield Prediction(layer, ids, [1 / ahead] * len(ids), ahead)


@dataclass(frozen=True)
class StrideOptions(WidthOptions):
    stride: int = option(2, "layers from one that is named to the next", least=1)


class Stride(RankingPredictor):
    """ "ProMoE": the routers of every second layer up to l + `distance`, asked early about layer l's input. Where a
    model has fewer layers than the stride ahead, the next one's.
    """

    name = "stride"
    options = StrideOptions
    needs = ("lookahead",)
    wants: frozenset[Want] = frozenset({"lookahead"})

    def __init__(self, geometry: Geometry, distance: int, options: StrideOptions, known: Known = NOTHING) -> None:
        super().__init__(geometry, distance, options, known)
        self._stride = min(options.stride, self._distance)

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        shown = routed.lookahead
        if shown is None or not shown.size:
            return
        farthest = min(self._distance, shown.shape[1], len(self._layers) - 1 - routed.layer)
        for ahead in range(self._stride, farthest + 1, self._stride):
            shape = self._layers[routed.layer + ahead]
            scores = shown[:, ahead - 1, : shape.num_experts]
            prediction = best_of_rows(routed.layer + ahead, ahead, scores, self._width or shape.top_k)
            if prediction is not None:
                yield prediction


NAMED_LAYERS = 6
LEAST = 1e-6


class EagerEAM(EAM):
    """ "MoE-Infinity": of the matrices nearest to all that the request has run, a quarter of the experts of each of the
    next six layers; and 1e-6 is added to every expert of the layers up to l + 2 + d + L/2, so that all of them are
    queued. d is `distance`.
    """

    name = "eam-artifact"
    default_distance = None

    def __init__(self, geometry: Geometry, distance: int, options: EAMOptions, known: Known = NOTHING) -> None:
        super().__init__(geometry, distance_in(geometry, distance) + 2 + geometry.num_layers // 2, options, known)
        self._said_anew.add(NAMED_LAYERS)

    def named(self, layer: int, ahead: int, rows: Floats) -> Prediction | None:
        p = np.full(rows.shape[1], LEAST, np.float32)
        best = best_of_rows(layer, ahead, rows, max(1, rows.shape[1] // 4)) if ahead <= NAMED_LAYERS else None
        if best is not None:
            p[best.experts] += np.array(best.scores, np.float32)
        return best_of_rows(layer, ahead, np.minimum(p, 1)[None], len(p))


class FMoEArtifact(FMoE):
    """As `fmoe`, but trajectories are searched in decode only: of a prompt the first layers alone are predicted."""

    name = "fmoe-artifact"
    _is_prompt = False

    def begin_iteration(self, began: Began) -> Iterator[Prediction]:
        self._is_prompt = bool(began.is_prefill.any())
        return super().begin_iteration(began)

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        predictions = super().router_ran(routed)  # which notes what the router said
        return iter(()) if self._is_prompt else predictions
