"""ProMoE: small networks, trained on a trace, foretell a layer's experts from the router input of an earlier one
(section 4); LRU keeps them. H numbers of a router input, N hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.geometry import MAX_LAYERS, Geometry, ModelShape
from expertly.core.messages import Prediction
from expertly.core.observation import Floats, Routed, Want
from expertly.policies.known import NOTHING, Known
from expertly.policies.learned import Arrays, LearnedState, Sizes, Tensor
from expertly.policies.prediction import RankingPredictor, WidthOptions, best_of_rows

Weights = npt.NDArray[np.floating[Any]]

Pair = tuple[int, int]
"""(layer whose router input is looked at, layer that is predicted from it)."""

MAX_DISTANCES = 64
MAX_WIDTH = 1 << 20  # of a router input or a hidden layer
_MOST = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """The network of a pair of layers: softmax(out @ relu(hidden @ z + hidden_bias) + direct @ z + bias), z = (x -
    mean) * scale. Its linear path is ours: a near layer's choice is nearly linear in the router input.
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
        return sum(part.size for part in (self.hidden, self.hidden_bias, self.out, self.direct, self.bias))


_SHARED = ("mean", "scale", "hidden", "hidden_bias")
_OF_EXPERTS = ("out", "direct", "bias")


@dataclass(eq=False)
class LearnedWeights(LearnedState):
    """One `Mlp` for each pair of layers that predicting at one of `distances` needs (see `pairs`)."""

    kind = "predictor"
    unit = "networks"
    made_by = "lab train"
    tensors = {  # noqa: RUF012 - of M networks; what is beyond a layer's own experts is 0
        "starts": Tensor("I32", "L", 0, MAX_LAYERS),
        "distances": Tensor("I32", "D", 1, MAX_LAYERS),
        "source": Tensor("I32", "M", 0, MAX_LAYERS),
        "target": Tensor("I32", "M", 0, MAX_LAYERS),
        "mean": Tensor("F16", "MH", -_MOST, _MOST),
        "scale": Tensor("F16", "MH", -_MOST, _MOST),
        "hidden": Tensor("F16", "MNH", -_MOST, _MOST),
        "hidden_bias": Tensor("F16", "MN", -_MOST, _MOST),
        "out": Tensor("F16", "MEN", -_MOST, _MOST),
        "direct": Tensor("F16", "MEH", -_MOST, _MOST),
        "bias": Tensor("F16", "ME", -_MOST, _MOST),
    }

    shape: ModelShape
    starts: tuple[int, ...] = ()  # first layer of each layer's stack: 0, except in a decoder behind an encoder
    distances: tuple[int, ...] = ()
    mlps: Mapping[Pair, Mlp] = field(default_factory=dict)

    def has(self, distance: int) -> bool:
        return all(pair in self.mlps for pair in pairs(self.starts, distance))

    @property
    def hidden_size(self) -> int:  # type: ignore[override]
        """The largest size of a router input; 0 where nothing is predicted."""
        return max((mlp.hidden.shape[1] for mlp in self.mlps.values()), default=0)

    def sizes(self) -> Sizes:
        return {"D": (1, MAX_DISTANCES), "H": (1, MAX_WIDTH), "N": (1, MAX_WIDTH)}

    def state(self) -> dict[str, npt.NDArray[Any]]:
        order, num_experts = sorted(self.mlps), self.shape.max_experts
        of_order = {"source": [source for source, _ in order], "target": [target for _, target in order]}
        numbers = {"starts": self.starts, "distances": self.distances, **of_order}
        arrays: dict[str, npt.NDArray[Any]] = {name: np.array(some, np.int32) for name, some in numbers.items()}
        for name in (*_SHARED, *_OF_EXPERTS):
            each = [getattr(self.mlps[pair], name) for pair in order]
            if name in _OF_EXPERTS:
                each = [np.pad(part, [(0, num_experts - len(part)), *[(0, 0)] * (part.ndim - 1)]) for part in each]
            blank = [{"M": 0, "E": num_experts}.get(letter, 1) for letter in self.tensors[name].dims]  # of one layer
            with np.errstate(over="ignore"):
                arrays[name] = np.stack(each).astype(np.float16) if each else np.zeros(blank, np.float16)
        return arrays

    def restore(self, arrays: Arrays) -> None:
        """Raises ConfigError where a network is there twice, is of no use, or is missing."""
        starts, distances = (tuple(arrays[name].tolist()) for name in ("starts", "distances"))
        if any(start > layer for layer, start in enumerate(starts)):
            raise ConfigError(f"tensor 'starts': {starts!s:.80}: must not be behind their layers")
        wanted = {distance: pairs(starts, distance) for distance in distances}
        useful = {pair for some in wanted.values() for pair in some}
        mlps: dict[Pair, Mlp] = {}
        for index, pair in enumerate(zip(arrays["source"].tolist(), arrays["target"].tolist(), strict=True)):
            if pair not in useful or pair in mlps:
                raise ConfigError(f"network {index}: of layers {pair}: twice, or of no use at the file's distances")
            num_experts = self.shape.num_experts[pair[1]]
            mlps[pair] = Mlp(
                *(arrays[name][index] for name in _SHARED), *(arrays[name][index][:num_experts] for name in _OF_EXPERTS)
            )
        for distance, some in wanted.items():
            if not mlps.keys() >= set(some):
                raise ConfigError(f"tensor 'distances': {distance}: a network for it is missing")
        self.starts, self.distances, self.mlps = starts, distances, mlps


def pairs(starts: Sequence[int], distance: int) -> list[Pair]:
    """The pairs that predict each layer from `distance` layers before it, or from the first layer of its stack where
    that is nearer (ProMoE, section 4, footnote 1). First layers are not predicted.
    """
    return [(max(start, layer - distance), layer) for layer, start in enumerate(starts) if layer > start]


class Network:
    """An `Mlp` in float32, with one matrix for everything that is multiplied with an input."""

    def __init__(self, mlp: Mlp) -> None:
        self._width, self.hidden_size = mlp.hidden.shape
        first = np.concatenate([mlp.hidden, mlp.direct]).astype(np.float32) * mlp.scale.astype(np.float32)  # [N + E, H]
        offset = first @ mlp.mean.astype(np.float32)
        self._first: Floats = np.ascontiguousarray(first.T)
        self._first_bias: Floats = np.concatenate([mlp.hidden_bias, mlp.bias]).astype(np.float32) - offset
        self._out: Floats = np.ascontiguousarray(mlp.out.T, np.float32)

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
        weights, shape = known.get(LearnedWeights), ModelShape.of(geometry)
        if weights is None:
            how = "make them with `expertly lab train TRACE --out FILE` and name the file: predictor=FILE"
            raise ConfigError(f"prediction 'learned': no weights of a predictor; {how} (--predictor FILE)")
        if weights.shape != shape:
            raise ConfigError(f"prediction 'learned': weights of a model of {weights.shape}; this one has {shape}")
        if not weights.has(self._distance):
            accepted = f"accepted with them: {', '.join(map(str, weights.distances))}"
            problem = f"distance={self._distance}: its weights are not of that"
            raise ConfigError(f"prediction 'learned': {problem}; {accepted}")
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
                numbers = f"{inputs.shape[1]} numbers; its weights are for {network.hidden_size}"
                raise ConfigError(f"prediction 'learned': router inputs of {numbers}")
            scores = network.probabilities(inputs)
            if not np.isfinite(scores).all():
                continue  # the hidden state is not
            width = self._width or self._layers[target].top_k
            prediction = best_of_rows(target, target - routed.layer, scores, width)
            if prediction is not None:
                yield prediction
