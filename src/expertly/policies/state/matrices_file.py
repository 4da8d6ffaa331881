"""The file of a model's activation matrices: see `maps.sealed`."""

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
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.eam.matrices import MAX_COUNT, Collection, Matrices
from expertly.policies.state.header import Facts, MatricesHeader, check_model
from expertly.policies.state.sealed import Shape, num_of, read_sealed, write_sealed

DTYPES = {"prefill_born": "I64", "prefill": "I32", "decode_born": "I64", "decode": "I32"}
"""The tensors, in file order: of C matrices each, [C] and [C, L, E], tokens that each expert served."""

_PHASES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class MatricesFile:
    """A file of matrices that has been read whole."""

    path: Path
    header: MatricesHeader
    nbytes: int  # of the file
    store: Matrices

    @classmethod
    def read(cls, path: Path, identity: str | None = None, shape: ModelShape | None = None) -> MatricesFile:
        """Read and check everything; see `MapsFile.read`."""
        header, arrays, nbytes = read_sealed(path, DTYPES, (), partial(_parse, path, identity, shape))
        try:
            collections = []
            for phase in _PHASES:
                check_phase(path, header.shape, phase, arrays[phase], arrays[f"{phase}_born"])
                state = {"matrices": arrays[phase], "born": arrays[f"{phase}_born"]}
                collections.append(Collection.from_state(header.shape, state, header.capacity))
        except MemoryError:
            raise StoreError(f"{path}: capacity={header.capacity}: not enough memory for so many matrices") from None
        return cls(path, header, nbytes, Matrices.of(*collections))


def load_matrices(path: str | Path, identity: str | None = None, shape: ModelShape | None = None) -> Matrices:
    """The matrices in a file; see `MatricesFile.read`."""
    return MatricesFile.read(Path(path), identity, shape).store


def save_matrices(path: str | Path, store: Matrices, identity: str, about: Facts | None = None) -> None:
    """Replace the file at `path` by one of all matrices of `store`; see `save_maps`."""
    path, state = Path(path), store.state()
    for phase in _PHASES:
        check_phase(path, store.shape, phase, state[phase], state[f"{phase}_born"])
    header = MatricesHeader(identity, store.shape, store.capacity, dict(about or {}))
    write_sealed(path, DTYPES, state, header.metadata)


def check_phase(
    path: Path, shape: ModelShape, phase: str, matrices: npt.NDArray[Any], born: npt.NDArray[np.int64]
) -> None:
    """Whether numbers can be those of a collection. Raises StoreError naming the file, the tensor and what is wrong."""
    is_expert = np.arange(shape.max_experts) < np.array(shape.num_experts)[:, None]
    is_wrong = ~((matrices >= 0) & (matrices <= np.where(is_expert, MAX_COUNT, 0)))
    if is_wrong.any():
        slot, layer, expert = np.unravel_index(int(np.argmax(is_wrong)), is_wrong.shape)
        accepted = f"a count of tokens, from 0 to {MAX_COUNT}"
        if not is_expert[layer, expert]:
            accepted = f"0: there are {shape.num_experts[layer]} experts"
        where = f"matrix {slot}, layer {layer}, expert {expert}: {matrices[slot, layer, expert]}"
        raise StoreError(f"{path}: tensor {phase!r}: {where}; must be {accepted}")
    is_empty = ~matrices.any(axis=(1, 2))
    if is_empty.any():
        raise StoreError(f"{path}: tensor {phase!r}: matrix {int(np.argmax(is_empty))}: counts no token")
    if len(np.unique(born)) != len(born) or (len(born) and born.min() < 0):
        raise StoreError(f"{path}: tensor '{phase}_born': must count the matrices: from 0, none twice")


def _parse(
    path: Path, identity: str | None, shape: ModelShape | None, raw: bytes, infos: Mapping[str, TensorInfo]
) -> tuple[MatricesHeader, dict[str, Shape]]:
    """The header, and the shapes of the tensors."""
    header = MatricesHeader.parse(path, raw)
    check_model(path, header, identity, shape)
    expected: dict[str, Shape] = {}
    for phase in _PHASES:
        num = num_of(path, infos, f"{phase}_born", "matrix")
        if num > header.capacity:
            raise StoreError(f"{path}: tensor '{phase}_born': {num} matrices, more than the capacity={header.capacity}")
        expected |= {f"{phase}_born": (num,), phase: (num, header.shape.num_layers, header.shape.max_experts)}
    return header, expected
