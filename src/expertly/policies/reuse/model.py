"""How soon each expert is used again, as a linear function of what nearby layers used lately; learned online."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import numpy.typing as npt

from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan
from expertly.policies.reuse.layer import DISCOUNT, LayerReuse, fade

Floats = npt.NDArray[np.float32]

REACH = 4
"""Layers before and behind that a layer looks at."""
MOST_WEIGHTS = 1 << 18
"""Of a layer: with many experts it looks at fewer layers, at least at itself."""
SURE = 100.0
"""Added in a prompt to what layers yet to run are worth, more than any value: a prompt needs nearly all experts."""


class ReuseModel:
    """A value for each expert of a layer: the expected sum of DISCOUNT ** (k - 1) over the steps k from now on that
    need it. The inputs are the shares of the last tokens that the experts of this layer and those near it served, of
    layers behind it up to the step before; weights follow what then was needed.

    Every step costs a product of a layer's weights with a vector; what was learned is taken in every few steps.
    """

    def __init__(self, geometry: Geometry) -> None:
        num_layers = geometry.num_layers
        self._ends = [geometry.first_expert_id(layer) for layer in range(num_layers)] + [geometry.num_experts]
        self._recent: Floats = np.zeros(geometry.num_experts, np.float32)  # by dense id
        self._mean: Floats = np.zeros(geometry.num_experts, np.float32)  # what `_recent` is on average
        self._values: Floats = np.zeros(geometry.num_experts, np.float32)  # said when each layer ran last
        self._layers = [LayerReuse(*_place(self._ends, layer)) for layer in range(num_layers)]
        self._discounts: dict[int, Floats] = {}  # of a layer that runs: of every expert's value
        self._worth: Floats | None = self._values
        self._layer = 0  # that runs, or ran last
        self._is_decode = True

    def fits(self, geometry: Geometry) -> bool:
        """Whether it is of a model with so many experts a layer."""
        ends = [geometry.first_expert_id(layer) for layer in range(geometry.num_layers)]
        return self._ends == [*ends, geometry.num_experts]

    def copy(self) -> ReuseModel:
        """One that goes on from here by itself."""
        return deepcopy(self)

    def observe(self, router: RouterRan) -> None:
        """A layer is about to run. Prompts move the inputs; only decode teaches."""
        self._layer, self._is_decode, self._worth = router.layer, router.serves_decode, None
        one, batch_tokens = self._layers[router.layer], router.batch_tokens
        if not batch_tokens:
            return
        left = fade(batch_tokens)
        own = self._recent[one.own]
        own *= left
        own[router.experts] += np.asarray(router.num_tokens, np.float32) * ((1 - left) / batch_tokens)
        used = router.experts
        if 0 in router.num_tokens:  # by pads alone
            used = [expert for expert, num in zip(used, router.num_tokens, strict=True) if num]
        self._values[one.own] = one.step(self._recent, self._mean, used, batch_tokens, is_decode=self._is_decode)

    def worth(self) -> Floats:
        """Of every expert by dense id, its value as seen from the layer that runs: a layer that is yet to run in this
        step is nearer than one that has run. Not to be written.
        """
        if self._worth is None:
            self._worth = self._values * self._discount(self._layer)
            if not self._is_decode:
                self._worth[self._ends[self._layer + 1] :] += SURE
        return self._worth

    def _discount(self, layer: int) -> Floats:
        if layer not in self._discounts:
            num_layers = len(self._layers)
            ahead = (np.arange(num_layers) - layer - 1) % num_layers + 1
            self._discounts[layer] = np.repeat(DISCOUNT ** (ahead / num_layers), np.diff(self._ends)).astype(np.float32)
        return self._discounts[layer]


def _place(ends: Sequence[int], layer: int) -> tuple[slice, slice]:
    """The dense ids of a layer's experts, and of those that it looks at: as many layers as MOST_WEIGHTS allows."""
    num_layers, own = len(ends) - 1, slice(ends[layer], ends[layer + 1])
    for reach in range(REACH, 0, -1):
        seen = slice(ends[max(0, layer - reach)], ends[min(num_layers, layer + reach + 1)])
        if (seen.stop - seen.start) * (own.stop - own.start) <= MOST_WEIGHTS:
            return own, seen
    return own, own
