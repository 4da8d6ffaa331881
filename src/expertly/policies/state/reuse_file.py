"""The file of what a ReuseModel has learned: see `maps.sealed`. Its header names the model whose routing taught it, and
what its numbers mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import StoreError
from expertly.core.headers import TensorInfo
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.fmoe.store import MAX_NBYTES
from expertly.policies.reuse.layer import DISCOUNT, FADING, HORIZON
from expertly.policies.reuse.model import REACH, num_weights
from expertly.policies.state.header import Facts, about_in, describe
from expertly.policies.state.metadata import check_identity, failure, json_object, layers_in, metadata_of, read_metadata
from expertly.policies.state.sealed import Arrays, Shape, read_sealed, write_sealed

KIND = "expertly-reuse"

DTYPES = {"tokens": "I64", "mean": "F32", "weights": "F32"}
"""The tensors, in file order: the `state` of a ReuseModel."""

MEANING: Mapping[str, float] = {"discount": DISCOUNT, "horizon": HORIZON, "fading": float(FADING), "reach": REACH}
"""What weights are of: with other inputs or values they would mean nothing."""

MAX_TOKENS = 1 << 53
MAX_WEIGHT = 1e6
"""Far above any that is learned: what is read must not overflow where it is used."""
_ROUNDING = 1e-3
"""How far above 1 a mean share of tokens may be."""


@dataclass(frozen=True, slots=True)
class ReuseFile:
    """A file that has been read whole. `state` is what `ReuseModel.restore` takes."""

    path: Path
    identity: str  # of the model, as its packed store has it
    shape: ModelShape
    about: Facts
    nbytes: int  # of the file
    state: Mapping[str, npt.NDArray[Any]]

    @classmethod
    def read(cls, path: Path, identity: str | None = None, shape: ModelShape | None = None) -> ReuseFile:
        """Read and check everything. `identity` and `shape` are those of the model that it must be of; None: of any.

        Raises StoreError naming the file and the field: a file that is missing, truncated, altered, of another format,
        version or model, made with other settings, or that holds numbers that nobody learns.
        """
        (own, layers, about), state, nbytes = read_sealed(path, DTYPES, (), partial(_parse, path, identity, shape))
        _check(path, state)
        return cls(path, own, layers, about, nbytes, state)

    @property
    def num_tokens(self) -> int:
        """That were seen, in the layer that saw most."""
        return int(self.state["tokens"].max())


def save_reuse(
    path: Path, state: Mapping[str, npt.NDArray[Any]], identity: str, shape: ModelShape, about: Facts | None = None
) -> None:
    """Replace the file at `path` by one of the `state` of a ReuseModel. `identity` and `shape` are the model's, `about`
    whatever else the file shall say of itself.

    After a crash the file is what it was before. Raises StoreError where it cannot be written, or holds numbers that
    nobody learns.
    """
    _check(path, state)
    sizes = {"num_experts": shape.num_experts, "top_k": shape.top_k}

    def metadata(checksum: str) -> dict[str, str]:
        said = metadata_of(KIND, checksum, identity, sizes, dict(about or {}))
        return {**said, "meaning": json.dumps(MEANING, separators=(",", ":"))}

    write_sealed(path, DTYPES, state, metadata)


def _parse(
    path: Path, identity: str | None, shape: ModelShape | None, raw: bytes, infos: Mapping[str, TensorInfo]
) -> tuple[tuple[str, ModelShape, Facts], dict[str, Shape]]:
    """What the header says, and the shapes of the tensors."""
    found = read_metadata(path, raw, KIND)
    own, layers = found["identity"], layers_in(path, found)
    check_identity(path, KIND, own, identity)
    if shape is not None and shape != layers:
        raise StoreError(f"{path}: shape: of {describe(layers)}; expected {describe(shape)}, as the model has")
    if json_object(path, found, "meaning") != MEANING:
        raise failure(path, found, "meaning", f"learned by another version of expertly; this one has {dict(MEANING)}")
    num = num_weights(layers.num_experts)
    if 4 * num > MAX_NBYTES:
        raise failure(path, found, "shape", f"weights of {4 * num} bytes; at most {MAX_NBYTES} are accepted")
    return (own, layers, about_in(path, found)), {
        "tokens": (layers.num_layers,),
        "mean": (sum(layers.num_experts),),
        "weights": (num,),
    }


def _check(path: Path, state: Mapping[str, npt.NDArray[Any]] | Arrays) -> None:
    for name, least, most, what in (
        ("tokens", 0, MAX_TOKENS, "a number of tokens"),
        ("mean", 0, 1 + _ROUNDING, "a share of tokens"),
        ("weights", -MAX_WEIGHT, MAX_WEIGHT, "a weight"),
    ):
        array = state[name]
        is_wrong = ~((array >= least) & (array <= most))  # NaN, too
        if is_wrong.any():
            at = int(np.argmax(is_wrong))
            raise StoreError(
                f"{path}: tensor {name!r}: number {at}: {array[at]}; must be {what}, {least:g} to {most:g}"
            )
