"""The file of a learned predictor's weights: see `maps.sealed`. Its header names the model that they are of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import StoreError
from expertly.core.headers import TensorInfo
from expertly.policies.predictor.learned import LearnedWeights, Mlp, Pair, pairs
from expertly.policies.state.metadata import (
    MAX_LAYERS,
    check_identity,
    failure,
    json_object,
    layers_in,
    metadata_of,
    read_metadata,
    whole_numbers,
)
from expertly.policies.state.sealed import Shape, num_of, read_sealed, write_sealed

FORMAT = "expertly-predictor"

DTYPES = {
    "source": "I32",  # [M] of each of M networks
    "target": "I32",  # [M]
    "mean": "F16",  # [M, H]
    "scale": "F16",  # [M, H]
    "hidden": "F16",  # [M, N, H]
    "hidden_bias": "F16",  # [M, N]
    "out": "F16",  # [M, E, N]
    "direct": "F16",  # [M, E, H]
    "bias": "F16",  # [M, E]
}
"""The tensors, in file order; E is that of the layer with the most experts, what is beyond a layer's own is 0."""

MAX_DISTANCES = 64
MAX_WIDTH = 1 << 20  # of a router input or a hidden layer


@dataclass(frozen=True, slots=True)
class PredictorFile:
    """A file of weights that has been read whole."""

    path: Path
    identity: str  # of the model, as its packed store has it
    about: Mapping[str, Any]  # how they were trained, and how often they are right
    nbytes: int  # of the file
    weights: LearnedWeights

    @classmethod
    def read(cls, path: Path, identity: str | None = None) -> PredictorFile:
        """Read and check everything. `identity`: of the model that the weights must be of; None: of any.

        Raises StoreError naming the file and the field: a file that is missing, truncated, altered, of another format
        or version, of another model, or lacks a network that one of its distances needs.
        """
        (found, shape, names), arrays, nbytes = read_sealed(path, DTYPES, (), partial(_parse, path, identity))
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise StoreError(f"{path}: tensor {name!r}: holds a number that is not finite")
        mlps = _mlps(path, shape, arrays)
        weights = LearnedWeights(shape["num_experts"], shape["top_k"], shape["starts"], shape["distances"], mlps)
        for distance in weights.distances:
            if not weights.has(distance):
                raise StoreError(f"{path}: shape: distances={distance}: a network for it is missing")
        return cls(path, found, names, nbytes, weights)


def save_predictor(path: Path, weights: LearnedWeights, identity: str, about: Mapping[str, Any]) -> None:
    """Replace the file at `path`. `identity` is the model's, `about` what else the file shall say of itself, in JSON.
    After a crash the file is what it was before. Raises StoreError where it cannot be written.
    """
    order = sorted(weights.mlps)
    num_experts = max(weights.num_experts)
    arrays: dict[str, npt.NDArray[Any]] = {
        "source": np.array([source for source, _ in order], np.int32),
        "target": np.array([target for _, target in order], np.int32),
    }
    for name in DTYPES:
        if name not in arrays:
            each = [getattr(weights.mlps[pair], name) for pair in order]
            if name in ("out", "direct", "bias"):
                each = [np.pad(one, [(0, num_experts - len(one)), *[(0, 0)] * (one.ndim - 1)]) for one in each]
            with np.errstate(over="ignore"):
                arrays[name] = np.stack(each).astype(np.float16) if each else np.zeros(_blank(name), np.float16)
    shape = {name: getattr(weights, name) for name in ("num_experts", "top_k", "starts", "distances")}
    write_sealed(path, DTYPES, arrays, lambda checksum: metadata_of(FORMAT, checksum, identity, shape, about))


def _blank(name: str) -> Shape:
    """Of a model of one layer, which has no networks."""
    return (0, *[1] * {"hidden": 2, "out": 2, "direct": 2}.get(name, 1))


def _parse(
    path: Path, identity: str | None, raw: bytes, infos: Mapping[str, TensorInfo]
) -> tuple[tuple[str, dict[str, tuple[int, ...]], dict[str, Any]], dict[str, Shape]]:
    """What the header says, and the shapes of the tensors."""
    found = read_metadata(path, raw, FORMAT)
    own = found["identity"]
    check_identity(path, FORMAT, own, identity)
    shape = _shape(path, found)
    num = num_of(path, infos, "source", "network")
    width, hidden_size = _sizes(path, infos)
    num_experts = max(shape["num_experts"])
    return (own, shape, json_object(path, found, "about")), {
        "source": (num,),
        "target": (num,),
        "mean": (num, hidden_size),
        "scale": (num, hidden_size),
        "hidden": (num, width, hidden_size),
        "hidden_bias": (num, width),
        "out": (num, num_experts if num else 1, width),
        "direct": (num, num_experts if num else 1, hidden_size),
        "bias": (num, num_experts if num else 1),
    }


def _sizes(path: Path, infos: Mapping[str, TensorInfo]) -> tuple[int, int]:
    """N and H."""
    shape = infos["hidden"].shape if "hidden" in infos else ()
    if len(shape) != 3 or not all(1 <= size <= MAX_WIDTH for size in shape[1:]):
        raise StoreError(f"{path}: tensor 'hidden': {list(shape)!s:.80}; must be [M, N, H] of up to {MAX_WIDTH} each")
    return shape[1], shape[2]


def _shape(path: Path, found: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    layers = layers_in(path, found)
    starts = whole_numbers(path, found, "starts", 0, MAX_LAYERS)
    distances = whole_numbers(path, found, "distances", 1, MAX_LAYERS)
    if not 1 <= len(distances) <= MAX_DISTANCES:
        raise failure(path, found, "shape", f"must have 1 to {MAX_DISTANCES} distances")
    if len(starts) != layers.num_layers:
        raise failure(path, found, "shape", "starts must be of as many layers as num_experts")
    if any(start > layer for layer, start in enumerate(starts)):
        raise failure(path, found, "shape", "starts must not be behind their layers")
    return {"num_experts": layers.num_experts, "top_k": layers.top_k, "starts": starts, "distances": distances}


def _mlps(path: Path, shape: Mapping[str, tuple[int, ...]], arrays: Mapping[str, npt.NDArray[Any]]) -> dict[Pair, Mlp]:
    known = {pair for distance in shape["distances"] for pair in pairs(shape["starts"], distance)}
    mlps: dict[Pair, Mlp] = {}
    for index, pair in enumerate(zip(arrays["source"].tolist(), arrays["target"].tolist(), strict=True)):
        if pair not in known or pair in mlps:
            raise StoreError(f"{path}: network {index}: of layers {pair}: twice, or of no use at the file's distances")
        num_experts = shape["num_experts"][pair[1]]
        names = ("mean", "scale", "hidden", "hidden_bias")
        cut = ("out", "direct", "bias")
        mlps[pair] = Mlp(*(arrays[name][index] for name in names), *(arrays[name][index][:num_experts] for name in cut))
    return mlps
