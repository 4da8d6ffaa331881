"""What small networks, trained on a trace, say of a layer's router input (ProMoE, section 4)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Routed, Want
from expertly.policies.learned import LearnedWeights, Network, pairs
from expertly.policies.predictor.base import Predictor
from expertly.policies.predictor.ranking import Reach, WidthOptions, best_of_rows


class Learned(Predictor):
    """After layer l, the best of layer l + distance; after the first layer of a stack, of all layers up to there. Rows
    are looked at one by one, the prediction is the union of what they name. Scores are what the networks make of the
    router's scores.
    """

    wants: frozenset[Want] = frozenset({"inputs"})

    def __init__(
        self,
        geometry: Geometry,
        weights: LearnedWeights | None,
        distance: int = 1,
        options: WidthOptions = WidthOptions(),  # noqa: B008 - frozen
    ) -> None:
        """Raises ConfigError where there are no weights, or they are of another model or of other distances."""
        super().__init__()
        reach = Reach(geometry, distance)
        weights = _checked(geometry, weights, reach.distance)
        self._layers = geometry.layers
        self._width = options.width
        self._networks: dict[int, list[tuple[int, Network]]] = {}  # by the layer that is looked at: what is predicted
        for source, target in pairs(weights.starts, reach.distance):
            self._networks.setdefault(source, []).append((target, Network(weights.mlps[source, target])))

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        """Raises ConfigError where the router input is not of the model that the weights are of."""
        inputs = routed.inputs
        if inputs is None or not len(inputs):
            return
        for target, network in self._networks.get(routed.layer, ()):
            if inputs.shape[1] > network.hidden_size:
                raise ConfigError(
                    f"prediction 'learned': router inputs of {inputs.shape[1]} numbers; its weights are for "
                    f"{network.hidden_size}"
                )
            self.work.num_calls += 1
            self.work.read_nbytes += 4 * network.num_parameters
            self.work.flops += 2 * len(inputs) * network.num_parameters
            scores = network.probabilities(inputs)
            if not np.isfinite(scores).all():
                continue  # the hidden state is not
            width = self._width or self._layers[target].top_k
            prediction = best_of_rows(target, target - routed.layer, scores, width)
            if prediction is not None:
                yield prediction


def _checked(geometry: Geometry, weights: LearnedWeights | None, distance: int) -> LearnedWeights:
    if weights is None:
        raise ConfigError(
            "prediction 'learned': no weights of a predictor; make them with `expertly train-predictor TRACE --out "
            "FILE` and name the file: predictor=FILE (--predictor FILE)"
        )
    for name in ("num_experts", "top_k"):
        own, found = [getattr(layer, name) for layer in geometry.layers], list(getattr(weights, name))
        if own != found:
            raise ConfigError(
                f"prediction 'learned': weights of a model with {name}={found!s:.80} in its layers; this one has "
                f"{own!s:.80}"
            )
    if not weights.has(distance):
        accepted = ", ".join(map(str, weights.distances))
        raise ConfigError(
            f"prediction 'learned': distance={distance}: its weights are not of that; accepted with them: {accepted}"
        )
    return weights
