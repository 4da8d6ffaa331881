"""Predicts by small networks, trained on a trace, that look at a layer's router input (ProMoE, section 4): their
weights as plain data, and the predictor.

H numbers of a router input, N hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError, StoreError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Floats, Routed, Want
from expertly.policies.known import NOTHING, Known
from expertly.policies.learned import MAX_LAYERS, Arrays, Header, LearnedState, ModelShape
from expertly.policies.predictor.base import RankingPredictor, WidthOptions, best_of_rows

Weights = npt.NDArray[np.floating[Any]]

Pair = tuple[int, int]
"""(layer whose router input is looked at, layer that is predicted from it)."""

MAX_DISTANCES = 64
MAX_WIDTH = 1 << 20  # of a router input or a hidden layer


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """The network of a pair of layers: softmax(out @ relu(hidden @ z + hidden_bias) + direct @ z + bias), z = (x -
    mean) * scale.

    Two layers and a path around the first, because a near layer's choice is nearly linear in the router input.
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


_SHARED = ("mean", "scale", "hidden", "hidden_bias")
_OF_EXPERTS = ("out", "direct", "bias")


@dataclass(frozen=True, eq=False)
class LearnedWeights(LearnedState):
    """One `Mlp` for each pair of layers that predicting at one of `distances` needs (see `pairs`)."""

    kind = "predictor"
    holds = "the weights of a predictor, by which promoe predicts"
    unit = "networks"
    made_by = "lab train"
    schema = {  # noqa: RUF012 - of M networks; what is beyond a layer's own experts is 0
        "source": ("I32", "M"),
        "target": ("I32", "M"),
        "mean": ("F16", "MH"),
        "scale": ("F16", "MH"),
        "hidden": ("F16", "MNH"),
        "hidden_bias": ("F16", "MN"),
        "out": ("F16", "MEN"),
        "direct": ("F16", "MEH"),
        "bias": ("F16", "ME"),
    }
    has_plain_facts = False

    num_experts: tuple[int, ...]  # by layer
    top_k: tuple[int, ...]
    starts: tuple[int, ...]  # first layer of each layer's stack: 0, except in a decoder behind an encoder
    distances: tuple[int, ...]
    mlps: Mapping[Pair, Mlp]

    def has(self, distance: int) -> bool:
        return all(pair in self.mlps for pair in pairs(self.starts, distance))

    @property
    def hidden_size(self) -> int:  # type: ignore[override]
        """The largest size of a router input; 0 where nothing is predicted."""
        return max((mlp.hidden.shape[1] for mlp in self.mlps.values()), default=0)

    # -- as a file keeps it ------------------------------------------------------------------------------------

    @property
    def shape(self) -> ModelShape:  # type: ignore[override]
        return ModelShape(self.num_experts, self.top_k)

    @property
    def num_learned(self) -> int:
        return len(self.mlps)

    def lists(self) -> dict[str, Sequence[int]]:
        return {**super().lists(), "starts": self.starts, "distances": self.distances}

    def state(self) -> dict[str, npt.NDArray[Any]]:
        order, num_experts = sorted(self.mlps), max(self.num_experts)
        arrays: dict[str, npt.NDArray[Any]] = {
            "source": np.array([source for source, _ in order], np.int32),
            "target": np.array([target for _, target in order], np.int32),
        }
        for name in (*_SHARED, *_OF_EXPERTS):
            each = [getattr(self.mlps[pair], name) for pair in order]
            if name in _OF_EXPERTS:
                each = [np.pad(one, [(0, num_experts - len(one)), *[(0, 0)] * (one.ndim - 1)]) for one in each]
            blank = (0, *[1] * (len(self.schema[name][1]) - 1))  # of a model of one layer
            with np.errstate(over="ignore"):
                arrays[name] = np.stack(each).astype(np.float16) if each else np.zeros(blank, np.float16)
        return arrays

    @classmethod
    def sizes(cls, header: Header, found: Mapping[str, int]) -> Mapping[str, int]:
        starts, distances = _stacks(header)
        if not 1 <= len(distances) <= MAX_DISTANCES:
            header.refuse("shape", f"must have 1 to {MAX_DISTANCES} distances")
        if len(starts) != header.shape.num_layers:
            header.refuse("shape", "starts must be of as many layers as num_experts")
        if any(start > layer for layer, start in enumerate(starts)):
            header.refuse("shape", "starts must not be behind their layers")
        width, hidden_size = found.get("N", 0), found.get("H", 0)
        if not (1 <= width <= MAX_WIDTH and 1 <= hidden_size <= MAX_WIDTH):
            accepted = f"N={width}, H={hidden_size}; must be [M, N, H] of up to {MAX_WIDTH} each"
            raise StoreError(f"{header.path}: tensor 'hidden': {accepted}")
        return {} if found.get("M") else {"E": 1}

    @classmethod
    def check(cls, path: Path, shape: ModelShape, arrays: Arrays) -> None:
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise StoreError(f"{path}: tensor {name!r}: holds a number that is not finite")

    @classmethod
    def restored(cls, header: Header, arrays: Arrays) -> LearnedWeights:
        """Raises StoreError where a network is there twice, is of no use, or is missing."""
        path, shape, (starts, distances) = header.path, header.shape, _stacks(header)
        useful = {pair for distance in distances for pair in pairs(starts, distance)}
        mlps: dict[Pair, Mlp] = {}
        for index, pair in enumerate(zip(arrays["source"].tolist(), arrays["target"].tolist(), strict=True)):
            if pair not in useful or pair in mlps:
                raise StoreError(
                    f"{path}: network {index}: of layers {pair}: twice, or of no use at the file's distances"
                )
            num_experts = shape.num_experts[pair[1]]
            mlps[pair] = Mlp(
                *(arrays[name][index] for name in _SHARED), *(arrays[name][index][:num_experts] for name in _OF_EXPERTS)
            )
        weights = cls(shape.num_experts, shape.top_k, starts, distances, mlps)
        for distance in distances:
            if not weights.has(distance):
                raise StoreError(f"{path}: shape: distances={distance}: a network for it is missing")
        return weights


def _stacks(header: Header) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`starts` and `distances` of a header."""
    return header.whole_numbers("starts", 0, MAX_LAYERS), header.whole_numbers("distances", 1, MAX_LAYERS)


def pairs(starts: Sequence[int], distance: int) -> list[Pair]:
    """The pairs that predict each layer from `distance` layers before it, or from the first layer of its stack where
    that is nearer (ProMoE, section 4, footnote 1). First layers are not predicted.
    """
    return [(max(start, layer - distance), layer) for layer, start in enumerate(starts) if layer > start]


class Network:
    """An `Mlp` in float32, with one matrix for everything that is multiplied with an input."""

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
        """[T, E] for router inputs [T, up to H]; where a model's layers differ in width, some inputs are shorter."""
        both = inputs @ self._first[: inputs.shape[1]] + self._first_bias
        logits: Floats = np.maximum(both[:, : self._width], 0) @ self._out + both[:, self._width :]
        logits -= logits.max(axis=1, keepdims=True)
        np.exp(logits, out=logits)
        logits /= logits.sum(axis=1, keepdims=True)
        return logits


class Learned(RankingPredictor):
    """After layer l, names the best experts of layer l + distance; after the first layer of a stack, of all layers up
    to there. Each row is looked at by itself; the prediction is the union of what the rows name. Scores are the
    networks' probabilities.
    """

    name = "learned"
    needs = ("router_inputs",)
    weights = LearnedWeights
    wants: frozenset[Want] = frozenset({"inputs"})

    def __init__(
        self, geometry: Geometry, distance: int = 1, options: WidthOptions = WidthOptions(), known: Known = NOTHING
    ) -> None:
        """Raises ConfigError where there are no weights, or they are for another model or other distances."""
        super().__init__(geometry, distance, options, known)
        weights = _checked(geometry, known.get(LearnedWeights), self._distance)
        self._networks: dict[int, list[tuple[int, Network]]] = {}  # source -> (target, network)
        for source, target in pairs(weights.starts, self._distance):
            self._networks.setdefault(source, []).append((target, Network(weights.mlps[source, target])))

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        """Raises ConfigError where the router input is not of the model that the weights are for."""
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


def _checked(geometry: Geometry, weights: LearnedState | None, distance: int) -> LearnedWeights:
    if not isinstance(weights, LearnedWeights):
        raise ConfigError(
            "prediction 'learned': no weights of a predictor; make them with `expertly lab train TRACE --out "
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
