"""How soon each expert is used again, as a linear function of what nearby layers used lately; learned online."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import StoreError
from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan
from expertly.policies.learned import MAX_NBYTES, Arrays, Header, LearnedState, ModelShape, Shape
from expertly.policies.reuse.layer import DISCOUNT, FADING, HORIZON, LayerReuse, fade

Floats = npt.NDArray[np.float32]

MAX_TOKENS = 1 << 53
MAX_WEIGHT = 1e6
"""Far above any that is learned: what a file has must not overflow where it is used."""
_ROUNDING = 1e-3
"""How far above 1 a mean share of tokens may be."""

REACH = 4
"""Layers before and behind that a layer looks at."""
MOST_WEIGHTS = 1 << 18
"""Of a layer: with many experts it looks at fewer layers, at least at itself."""
MEANING: Mapping[str, float] = {"discount": DISCOUNT, "horizon": HORIZON, "fading": float(FADING), "reach": REACH}
"""What weights are of: with other inputs or values they would mean nothing."""
SURE = 100.0
"""Added in a prompt to what layers yet to run are worth, more than any value: a prompt needs nearly all experts."""


class ReuseModel(LearnedState):
    """A value for each expert of a layer: the expected sum of DISCOUNT ** (k - 1) over the steps k from now on that
    need it. The inputs are the shares of the last tokens that the experts of this layer and those near it served, of
    layers behind it up to the step before; weights follow what then was needed.

    Every step costs a product of a layer's weights with a vector; what was learned is taken in every few steps.
    """

    kind = "reuse"
    holds = "what was learned of reuse, by which expertly keeps experts"
    unit = "tokens"
    schema = {"tokens": "I64", "mean": "F32", "weights": "F32"}  # noqa: RUF012

    def __init__(self, geometry: Geometry) -> None:
        self.shape = ModelShape.of(geometry)
        self._begin(_ends(geometry))

    def _begin(self, ends: list[int]) -> None:
        num_layers, num_experts = len(ends) - 1, ends[-1]
        self._ends = ends
        self._recent: Floats = np.zeros(num_experts, np.float32)  # by dense id
        self._mean: Floats = np.zeros(num_experts, np.float32)  # what `_recent` is on average
        self._values: Floats = np.zeros(num_experts, np.float32)  # said when each layer ran last
        places = [_place(ends, layer) for layer in range(num_layers)]
        self._layers = [LayerReuse(own, seen, self._recent, self._mean) for own, seen in places]
        self._own = [(self._recent[own], self._values[own]) for own, _ in places]
        self._discounts: dict[int, Floats] = {}  # of a layer that runs: of every expert's value
        self._worth: Floats | None = self._values
        self._layer = 0  # that runs, or ran last
        self._is_decode = True
        self._num_begun = self._num_ended = 0  # changes of what it has learned: not as many while one is made

    def fits(self, geometry: Geometry) -> bool:
        """Whether it is of a model with so many experts a layer."""
        return self._ends == _ends(geometry)

    def copy(self) -> ReuseModel:
        """One that goes on from here by itself."""
        one = ReuseModel.__new__(ReuseModel)
        one.shape = self.shape
        one._begin(self._ends)
        for name in ("_recent", "_mean", "_values"):
            getattr(one, name)[:] = getattr(self, name)
        for layer, mine in zip(one._layers, self._layers, strict=True):
            layer.same_as(mine)
        one._layer, one._is_decode, one._worth = self._layer, self._is_decode, None
        return one

    def observe(self, router: RouterRan) -> None:
        """A layer is about to run. Prompts move the inputs; only decode teaches."""
        layer, batch_tokens, experts = router.layer, router.batch_tokens, router.experts
        self._layer, self._is_decode, self._worth = layer, router.serves_decode, None
        if not batch_tokens:
            return
        self._num_begun += 1
        left = fade(batch_tokens)
        share = (1 - left) / batch_tokens
        recent, values = self._own[layer]
        recent *= left
        for expert, num in zip(experts, router.num_tokens, strict=True):
            recent[expert] += num * share
        if 0 in router.num_tokens:  # by pads alone
            experts = [expert for expert, num in zip(experts, router.num_tokens, strict=True) if num]
        values[:] = self._layers[layer].step(experts, batch_tokens, is_decode=self._is_decode)
        self._num_ended += 1

    def worth(self) -> Floats:
        """Of every expert by dense id, its value as seen from the layer that runs: a layer that is yet to run in this
        step is nearer than one that has run. Not to be written.
        """
        if self._worth is None:
            self._worth = self._values * self._discount(self._layer)
            if not self._is_decode:
                self._worth[self._ends[self._layer + 1] :] += SURE
        return self._worth

    @property
    def num_tokens(self) -> int:
        """That it has seen, in the layer that saw most."""
        return max(layer.num_tokens for layer in self._layers)

    def state(self) -> dict[str, npt.NDArray[Any]] | None:
        """A copy of what it has learned: `tokens` that each layer has seen, [L], the `mean` of all inputs, by dense id,
        and all `weights`, layer after layer. What was used lately, and is yet to be learned from, is no part of it.

        None while another thread lets it observe; and from then on, where that was interrupted half-way.
        """
        num_begun = self._num_begun
        if num_begun != self._num_ended:
            return None
        state = {
            "tokens": np.array([layer.num_tokens for layer in self._layers], np.int64),
            "mean": self._mean.copy(),
            "weights": np.concatenate([layer.weights.reshape(-1) for layer in self._layers]),
        }
        return state if num_begun == self._num_begun else None

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on with what one of a model of the same layers had learned."""
        self._mean[:] = state["mean"]
        start = 0
        for layer, num_tokens in zip(self._layers, state["tokens"].tolist(), strict=True):
            end = start + layer.weights.size
            layer.restore(state["weights"][start:end].reshape(layer.weights.shape), num_tokens)
            start = end
        assert start == len(state["weights"])

    # -- as a file keeps it ------------------------------------------------------------------------------------

    @property
    def num_learned(self) -> int:
        return self.num_tokens

    @property
    def generation(self) -> int:  # type: ignore[override]
        return self.num_tokens

    def settings(self) -> dict[str, str]:
        return {"meaning": json.dumps(MEANING, separators=(",", ":"))}

    @classmethod
    def layout(cls, header: Header, sizes: Mapping[str, Shape]) -> Mapping[str, Shape]:
        if header.json_object("meaning") != MEANING:
            header.refuse("meaning", f"learned by another version of expertly; this one has {MEANING}")
        shape, num = header.shape, num_weights(header.shape.num_experts)
        if 4 * num > MAX_NBYTES:
            header.refuse("shape", f"weights of {4 * num} bytes; at most {MAX_NBYTES} are accepted")
        return {"tokens": (shape.num_layers,), "mean": (sum(shape.num_experts),), "weights": (num,)}

    @classmethod
    def check(cls, path: Path, shape: ModelShape, arrays: Arrays) -> None:
        for name, least, most, what in (
            ("tokens", 0, MAX_TOKENS, "a number of tokens"),
            ("mean", 0, 1 + _ROUNDING, "a share of tokens"),
            ("weights", -MAX_WEIGHT, MAX_WEIGHT, "a weight"),
        ):
            array = arrays[name]
            is_wrong = ~((array >= least) & (array <= most))  # NaN, too
            if is_wrong.any():
                at = int(np.argmax(is_wrong))
                found = f"number {at}: {array[at]}; must be {what}, {least:g} to {most:g}"
                raise StoreError(f"{path}: tensor {name!r}: {found}")

    @classmethod
    def restored(cls, header: Header, arrays: Arrays) -> ReuseModel:
        model = cls(header.shape.geometry())
        model.restore(arrays)
        return model

    def _discount(self, layer: int) -> Floats:
        if layer not in self._discounts:
            num_layers = len(self._layers)
            ahead = (np.arange(num_layers) - layer - 1) % num_layers + 1
            self._discounts[layer] = np.repeat(DISCOUNT ** (ahead / num_layers), np.diff(self._ends)).astype(np.float32)
        return self._discounts[layer]


def num_weights(num_experts: Sequence[int]) -> int:
    """Of a model with so many experts a layer."""
    ends = [0, *accumulate(num_experts)]
    places = (_place(ends, layer) for layer in range(len(num_experts)))
    return sum((own.stop - own.start) * (seen.stop - seen.start) for own, seen in places)


def _ends(geometry: Geometry) -> list[int]:
    """Where each layer's dense ids begin, and where the last one's end."""
    return [*map(geometry.first_expert_id, range(geometry.num_layers)), geometry.num_experts]


def _place(ends: Sequence[int], layer: int) -> tuple[slice, slice]:
    """The dense ids of a layer's experts, and of those that it looks at: as many layers as MOST_WEIGHTS allows."""
    num_layers, own = len(ends) - 1, slice(ends[layer], ends[layer + 1])
    for reach in range(REACH, 0, -1):
        seen = slice(ends[max(0, layer - reach)], ends[min(num_layers, layer + reach + 1)])
        if (seen.stop - seen.start) * (own.stop - own.start) <= MOST_WEIGHTS:
            return own, seen
    return own, own
