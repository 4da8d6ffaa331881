"""The weights of predictors that are trained on a trace, and their file: safetensors, whose header says of which kind
and model it is. A file is read as hostile input: its header is checked before memory is allocated for what it names.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError, StoreError
from expertly.core.files import disk_errors, replacing
from expertly.core.geometry import ModelShape, range_text
from expertly.core.headers import (
    TensorInfo,
    TensorSpec,
    header_bytes_of,
    header_metadata,
    parse_safetensors_header,
    safetensors_header,
)
from expertly.core.untrusted import LEARNED, check_value, parse_as, reading

VERSION = 2
"""Of the format, and of the constants that weights depend on."""
MAX_CAPACITY = 1 << 20
MAX_NBYTES = LEARNED.nbytes  # that a state may take in memory, too: a small file must not claim all there is
OF_A_TRACE = "trace:"  # begins the identity of a state made of a trace whose model was not named
MARK = b'"expertly-'
"""In every header: no other file is replaced."""
_NUMPY = {"I64": "<i8", "I32": "<i4", "U16": "<u2", "F32": "<f4", "F16": "<f2"}

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Sizes = Mapping[str, tuple[int, int]]
"""The least and the most numbers that a dimension may have, by its letter."""


class Tensor(NamedTuple):
    """How a file keeps one array of a state."""

    dtype: str  # safetensors' name: I64, I32, U16, F32 or F16
    dims: str  # a letter each: L layers, E experts of the largest layer, others as `sizes` says
    least: float  # of its numbers
    most: float


class LearnedState(ABC):
    """What was learned on a trace, as arrays that a file can keep. One class a kind, which can be made with a
    `ModelShape` alone, and then restored.
    """

    kind: ClassVar[str]  # a file's `format` is "expertly-KIND"; beside a store its file is called so
    unit: ClassVar[str]  # what it has several of, in messages
    made_by: ClassVar[str] = ""  # the command that makes such a file of a trace, if there is one
    tensors: ClassVar[Mapping[str, Tensor]]  # by name, in file order

    shape: ModelShape
    hidden_size: int = 0  # the largest router input that it is made for; 0: it looks at none

    @abstractmethod
    def state(self) -> dict[str, Array]:
        """Its arrays, which may be views."""
        ...

    @abstractmethod
    def restore(self, arrays: Arrays) -> None:
        """Continue from the `state` of another, whose arrays are as `tensors` and `sizes` say; nothing has been learned
        yet. Raises ConfigError, before anything changes, where the arrays contradict each other.
        """
        ...

    def sizes(self) -> Sizes:
        """Bounds of dimensions; others may have 0 to MAX_CAPACITY numbers."""
        return {}


AnyState = TypeVar("AnyState", bound=LearnedState)


class LearnedFile(NamedTuple, Generic[AnyState]):
    """A file that has been read whole."""

    learned: AnyState
    identity: str  # of the model, as its packed store has it
    about: Mapping[str, Any]  # created, source, ...


def save_learned(path: Path, learned: LearnedState, identity: str, about: Mapping[str, Any] | None = None) -> None:
    """Replace the file at `path` as a whole. `identity` is the model's; `about` are more facts for the header, as JSON.
    Raises StoreError where it cannot be written, or the state holds numbers that cannot have been learned.
    """
    state, tensors = learned.state(), learned.tensors
    _check_numbers(path, tensors, state)
    arrays = {name: np.ascontiguousarray(state[name], _NUMPY[tensors[name].dtype]) for name in tensors}
    texts = {"shape": asdict(learned.shape), "about": dict(about or {})}
    metadata = {"format": f"expertly-{learned.kind}", "version": str(VERSION), "identity": identity}
    metadata |= {name: json.dumps(value, separators=(",", ":"), allow_nan=False) for name, value in texts.items()}
    specs = [TensorSpec(name, tensors[name].dtype, array.shape) for name, array in arrays.items()]
    with disk_errors(path.parent, f"writing {path.name}", StoreError, ""), replacing(path, MARK) as file:
        file.write(safetensors_header(specs, metadata))
        for array in arrays.values():
            file.write(array.reshape(-1).view(np.uint8).data)


def read_learned(path: Path, *accepted: type[AnyState], identity: str | None = None) -> LearnedFile[AnyState]:
    """Read and check everything, and restore the state of the file's kind, one of `accepted`, for the model that the
    file names. `identity`: the model's, None for any.

    Raises StoreError naming the file, the field, its value and what is accepted: a file that is missing, truncated, of
    another kind, version or model, or that holds what the state cannot have learned.
    """
    try:
        with reading(path, StoreError) as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes > MAX_NBYTES:
                raise StoreError(f"{path}: {nbytes} bytes; accepted: {MAX_NBYTES}")
            raw = header_bytes_of(file, path, StoreError)
            infos = parse_safetensors_header(path, raw, StoreError, nbytes)
            texts = header_metadata(path, raw, StoreError)
            learned = _made_for(path, texts, accepted, identity)
            about = parse_as(dict[str, Any], texts.get("about", ""), f"{path}: about", StoreError)
            check_value(about, f"{path}: about", LEARNED, StoreError)
            _check_shapes(path, learned, infos)
            # In file order, which leaves nothing between them.
            flat = {name: np.fromfile(file, _NUMPY[info.dtype], prod(info.shape)) for name, info in infos.items()}
        arrays = {name: array.reshape(infos[name].shape) for name, array in flat.items()}
        _check_numbers(path, learned.tensors, arrays)
        learned.restore(arrays)
    except (ConfigError, ValueError) as error:  # ValueError: fewer numbers than there were
        raise StoreError(f"{path}: {error}") from None
    except MemoryError:
        raise StoreError(f"{path}: not enough memory for its {nbytes} bytes") from None
    return LearnedFile(learned, texts["identity"], about)


def _made_for(
    path: Path, texts: Mapping[str, str], accepted: Sequence[type[AnyState]], identity: str | None
) -> AnyState:
    """The state that a file with these texts is to be restored into."""
    kinds = {f"expertly-{state.kind}": state for state in accepted}
    model = texts.get("identity", "")
    is_unnamed = model.startswith(OF_A_TRACE)
    other = "of a trace whose model was not named (--model)" if is_unnamed else "of another model, or of a former one"
    for name, is_right, reason in (
        ("format", texts.get("format") in kinds, f"not a file of that kind; accepted: {' or '.join(map(repr, kinds))}"),
        ("version", texts.get("version") == str(VERSION), f"accepted: {VERSION}; make the file again"),
        ("identity", bool(model), "must say which model it is of"),
        ("identity", identity in (None, model), f"{other}; accepted: {identity!r:.80}"),
    ):
        if not is_right:
            raise StoreError(f"{path}: {name}={texts.get(name)!r:.80}: {reason}")
    shape = parse_as(ModelShape, texts.get("shape", ""), f"{path}: shape", StoreError)
    return kinds[texts["format"]](shape)  # type: ignore[call-arg]


def _check_shapes(path: Path, learned: LearnedState, infos: Mapping[str, TensorInfo]) -> None:
    """Raises StoreError where arrays of these types and shapes are not those of the state, or one is missing."""
    shape, tensors = learned.shape, learned.tensors
    bounds = {"L": (shape.num_layers, shape.num_layers), "E": (shape.max_experts, shape.max_experts), **learned.sizes()}
    for name in infos.keys() - tensors.keys():
        raise StoreError(f"{path}: tensor {name!r:.80}: unknown; accepted: {', '.join(tensors)}")
    for name, (dtype, dims, *_) in tensors.items():
        info = infos.get(name)
        ranges = [bounds.get(letter, (0, MAX_CAPACITY)) for letter in dims]
        accepted = f"accepted: {dtype} [{', '.join(map(range_text, ranges))}]"
        if info is None:
            raise StoreError(f"{path}: tensor {name!r}: missing; {accepted}")
        is_right = (info.dtype, len(info.shape)) == (dtype, len(dims))
        for letter, num in zip(dims, info.shape, strict=False):
            least, most = bounds.get(letter, (0, MAX_CAPACITY))
            is_right = is_right and least <= num <= most
            bounds[letter] = num, num  # as many in all tensors
        if not is_right:
            raise StoreError(f"{path}: tensor {name!r}: {info.dtype} {list(info.shape)!s:.80}; {accepted}")


def _check_numbers(path: Path, tensors: Mapping[str, Tensor], arrays: Arrays) -> None:
    """Raises StoreError naming the first number that is not one of those that its tensor may hold."""
    for name, array in arrays.items():
        least, most = tensors[name].least, tensors[name].most
        is_right = (array >= least) & (array <= most)  # NaN is not
        if not is_right.all():
            place = np.argwhere(~is_right)[0].tolist()
            said = f"{place}: {array[tuple(place)]}; accepted: {least:g} to {most:g}"
            raise StoreError(f"{path}: tensor {name!r}: {said}")
