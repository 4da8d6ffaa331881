"""Weights of the learned predictor as plain data (ProMoE, section 4): who reads them from where is a driver's affair.

H numbers of a router input, N hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.observation import Floats

Weights = npt.NDArray[np.floating[Any]]

Pair = tuple[int, int]
"""The layer whose router input is looked at, and the layer that is predicted from it."""


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """Of one pair of layers: softmax(out @ relu(hidden @ z + hidden_bias) + direct @ z + bias), z = (x - mean) * scale.

    Two layers and a path past the first: what a router input says of a near layer is all but linear.
    """

    mean: Weights  # [H]
    scale: Weights  # [H] 0: nothing is made of this number
    hidden: Weights  # [N, H]
    hidden_bias: Weights  # [N]
    out: Weights  # [E, N]
    direct: Weights  # [E, H]
    bias: Weights  # [E]

    @property
    def num_parameters(self) -> int:
        return sum(one.size for one in (self.hidden, self.hidden_bias, self.out, self.direct, self.bias))


@dataclass(frozen=True, slots=True, eq=False)
class LearnedWeights:
    """One `Mlp` for each pair that predicting at one of `distances` needs (see `pairs`)."""

    num_experts: tuple[int, ...]  # of each layer
    top_k: tuple[int, ...]
    starts: tuple[int, ...]  # the first layer of the stack that the layer is in: 0, but of a decoder behind an encoder
    distances: tuple[int, ...]
    mlps: Mapping[Pair, Mlp]

    def has(self, distance: int) -> bool:
        return all(pair in self.mlps for pair in pairs(self.starts, distance))

    @property
    def hidden_size(self) -> int:
        """Most numbers of a router input; 0 where there is nothing to predict."""
        return max((mlp.hidden.shape[1] for mlp in self.mlps.values()), default=0)


def pairs(starts: Sequence[int], distance: int) -> list[Pair]:
    """What predicts each layer from `distance` layers before it, or from the first layer of its stack where that is
    nearer (ProMoE, section 4, footnote 1). Nothing predicts a first layer.
    """
    return [(max(start, layer - distance), layer) for layer, start in enumerate(starts) if layer > start]


class Network:
    """An `Mlp` made ready: float32, and one matrix for all that is done to an input."""

    def __init__(self, mlp: Mlp) -> None:
        self.num_parameters = mlp.num_parameters
        self._width = len(mlp.hidden)
        first = np.concatenate([mlp.hidden, mlp.direct]).astype(np.float32) * mlp.scale.astype(np.float32)  # [N + E, H]
        offset = first @ mlp.mean.astype(np.float32)
        self._first: Floats = np.ascontiguousarray(first.T)
        self._first_bias: Floats = np.concatenate([mlp.hidden_bias, mlp.bias]).astype(np.float32) - offset
        self._out: Floats = np.ascontiguousarray(mlp.out.T, np.float32)

    @property
    def hidden_size(self) -> int:
        return len(self._first)

    def probabilities(self, inputs: Floats) -> Floats:
        """[T, E] of router inputs [T, up to H]; a model whose layers differ in width shows fewer numbers of some."""
        both = inputs @ self._first[: inputs.shape[1]] + self._first_bias
        logits: Floats = np.maximum(both[:, : self._width], 0) @ self._out + both[:, self._width :]
        logits -= logits.max(axis=1, keepdims=True)
        np.exp(logits, out=logits)
        logits /= logits.sum(axis=1, keepdims=True)
        return logits
