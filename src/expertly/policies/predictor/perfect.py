"""Perfect prediction: the demands to come, in their order. Only a simulation has them."""

from __future__ import annotations

from collections.abc import Iterator

from expertly.core.errors import ConfigError
from expertly.core.messages import Prediction
from expertly.core.observation import Routed
from expertly.policies.known import Known
from expertly.policies.predictor.base import Predictor


class Perfect(Predictor):
    """Names what each of the next `distance` layers needs, the next one first, across iterations."""

    def __init__(self, num_layers: int, known: Known, distance: int | None = None) -> None:
        if known.future is None:
            raise ConfigError("prediction 'perfect': needs to know the demands to come; only a simulation does")
        super().__init__()
        self._future = known.future
        self._reach = num_layers - 1 if distance is None else min(distance, num_layers - 1)  # one demand a layer
        self._said = -1  # the last step named

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        """The steps that have come into reach."""
        now = self._future.step
        for step in range(max(self._said, now) + 1, now + self._reach + 1):
            needs = self._future.needs(step - now)
            if needs is None:
                return
            layer, experts = needs
            self._said = step
            yield Prediction(layer, experts, [-float(step)] * len(experts), step - now)
