"""What policies learn, and the one file format that keeps it: safetensors, whose header says of which kind and model it
is. A file is read as hostile input: its header is checked before memory is allocated for what it names.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError, StoreError
from expertly.core.files import disk_errors, replacing
from expertly.core.geometry import Geometry, LayerGeometry
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
MAX_LAYERS, MAX_EXPERTS, MAX_CAPACITY = 4096, 0xFFFE, 1 << 20
_ANY = 0, MAX_CAPACITY  # numbers of a dimension
MAX_NBYTES = LEARNED.nbytes  # that a state may take in memory, too: a small file must not claim all there is
OF_A_TRACE = "trace:"  # begins the identity of a state made of a trace whose model was not named
MARK = b'"expertly-'
"""In every header: no other file is replaced."""

_NUMPY = {"I64": "<i8", "I32": "<i4", "U16": "<u2", "F32": "<f4", "F16": "<f2"}

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Facts = Mapping[str, Any]
Sizes = Mapping[str, tuple[int, int]]
"""The least and the most numbers that a dimension may have, by its letter."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """How many experts each MoE layer of a model has, and how many its router chooses."""

    num_experts: tuple[int, ...]
    top_k: tuple[int, ...]

    def __post_init__(self) -> None:
        numbers = f"num_experts={list(self.num_experts)!s:.80}, top_k={list(self.top_k)!s:.80}"
        if not 1 <= len(self.num_experts) == len(self.top_k) <= MAX_LAYERS:
            raise ConfigError(f"model shape: {numbers}: must be as many, of 1 to {MAX_LAYERS} layers")
        if not all(1 <= k <= num <= MAX_EXPERTS for num, k in zip(self.num_experts, self.top_k, strict=True)):
            raise ConfigError(f"model shape: {numbers}: must be 1 <= top_k <= experts <= {MAX_EXPERTS}")

    def __str__(self) -> str:
        """`26 layers of 64 experts, top-6`."""
        return f"{len(self.num_experts)} layers of {_span(self.num_experts)} experts, top-{_span(self.top_k)}"

    @classmethod
    def of(cls, geometry: Geometry) -> ModelShape:
        layers = geometry.layers
        return cls(tuple(layer.num_experts for layer in layers), tuple(layer.top_k for layer in layers))

    def geometry(self) -> Geometry:
        """A model of this shape, with experts of any size."""
        sizes = zip(self.num_experts, self.top_k, strict=True)
        return Geometry(tuple(LayerGeometry(num_experts, top_k, 1, 1, 2, 1) for num_experts, top_k in sizes))

    @property
    def num_layers(self) -> int:
        return len(self.num_experts)

    @property
    def max_experts(self) -> int:
        """E, of the largest layer."""
        return max(self.num_experts)


class Tensor(NamedTuple):
    """How a file keeps one array of a state."""

    dtype: str  # safetensors' name: I64, I32, U16, F32 or F16
    dims: str  # a letter each: L layers, E experts of the largest layer, others as `sizes` says
    least: float  # of its numbers
    most: float
    is_optional: bool = False


class LearnedState(ABC):
    """What a policy learned, as arrays that a file can keep. One class a kind; trained weights are made with a
    `ModelShape` alone, and then restored.
    """

    kind: ClassVar[str]  # a file's `format` is "expertly-KIND"; beside a store its file is called so
    unit: ClassVar[str]  # what `num_learned` counts
    made_by: ClassVar[str] = ""  # the command that makes such a file of a trace, if there is one
    tensors: ClassVar[Mapping[str, Tensor]]  # by name, in file order

    shape: ModelShape
    generation: int = 0  # changes when the state changes
    hidden_size: int = 0  # the largest router input that it is made for; 0: it looks at none

    @property
    @abstractmethod
    def num_learned(self) -> int: ...

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


@dataclass(frozen=True, slots=True)
class LearnedFile(Generic[AnyState]):
    """A file that has been read whole."""

    path: Path
    identity: str  # of the model, as its packed store has it
    about: Facts  # created, source, ...
    learned: AnyState


def save_learned(path: Path, learned: LearnedState, identity: str, about: Facts | None = None) -> None:
    """Replace the file at `path` as a whole. `identity` is the model's; `about` are more facts for the header, as JSON.
    Raises StoreError where it cannot be written, or the state holds numbers that cannot have been learned.
    """
    state, tensors = learned.state(), learned.tensors
    _check_numbers(path, learned, state)
    arrays = {name: np.ascontiguousarray(state[name], _NUMPY[tensors[name].dtype]) for name in tensors if name in state}
    texts = {"shape": asdict(learned.shape), "about": dict(about or {})}
    metadata = {"format": f"expertly-{learned.kind}", "version": str(VERSION), "identity": identity}
    metadata |= {name: json.dumps(value, separators=(",", ":"), allow_nan=False) for name, value in texts.items()}
    specs = [TensorSpec(name, tensors[name].dtype, array.shape) for name, array in arrays.items()]
    with disk_errors(path.parent, f"writing {path.name}", StoreError, ""), replacing(path, MARK) as file:
        file.write(safetensors_header(specs, metadata))
        for array in arrays.values():
            file.write(_bytes_of(array))


def read_learned(
    path: Path, *accepted: type[AnyState] | AnyState, identity: str | None = None, sizes: Sizes | None = None
) -> LearnedFile[AnyState]:
    """Read and check everything, and restore the state of the file's kind: one of `accepted`, or of a class among these
    one that is made for the model that the file names. `identity`: the model's, None for any; `sizes`: of the model, in
    place of the state's own.

    Raises StoreError naming the file, the field, its value and what is accepted: a file that is missing, truncated, of
    another kind, version or model, or that holds what the state cannot have learned.
    """
    try:
        with reading(path, StoreError) as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes > LEARNED.nbytes:
                raise StoreError(f"{path}: {nbytes} bytes; accepted: {LEARNED.nbytes}")
            raw = header_bytes_of(file, path, StoreError)
            infos = parse_safetensors_header(path, raw, StoreError, nbytes)
            texts = header_metadata(path, raw, StoreError)
            learned = _fitting(path, texts, accepted, identity)
            about = parse_as(dict[str, Any], texts.get("about", ""), f"{path}: about", StoreError)
            check_value(about, f"{path}: about", LEARNED, StoreError)
            _check_tensors(path, learned, infos, {**learned.sizes(), **(sizes or {})})
            # In file order, which leaves nothing between them.
            arrays: dict[str, Array] = {name: np.empty(info.shape, _NUMPY[info.dtype]) for name, info in infos.items()}
            with BufferedReader(file) as reader:  # which reads on until an array is full
                for name, array in arrays.items():
                    if reader.readinto(_bytes_of(array)) != array.nbytes:
                        raise StoreError(f"{path}: truncated inside tensor {name!r}")
        _check_numbers(path, learned, arrays)
        learned.restore(arrays)
    except ConfigError as error:
        raise StoreError(f"{path}: {error}") from None
    except MemoryError:
        raise StoreError(f"{path}: not enough memory for its {nbytes} bytes") from None
    return LearnedFile(path, texts["identity"], about, learned)


def _fitting(
    path: Path, texts: Mapping[str, str], accepted: Sequence[type[AnyState] | AnyState], identity: str | None
) -> AnyState:
    """The state that the file is to be restored into."""

    def refuse(name: str, reason: str) -> StoreError:
        return StoreError(f"{path}: {name}={texts.get(name)!r:.80}: {reason}")

    kinds = {f"expertly-{state.kind}": state for state in accepted}
    kind = kinds.get(texts.get("format", ""))
    if kind is None:
        raise refuse("format", f"not a file of that kind; accepted: {' or '.join(map(repr, kinds))}")
    if texts.get("version") != str(VERSION):
        raise refuse("version", f"accepted: {VERSION}; make the file again")
    model = texts.get("identity", "")
    if not model:
        raise refuse("identity", "must say which model it is of")
    if identity not in (None, model):
        reason = "of another model, or of this one before it changed"
        if model.startswith(OF_A_TRACE) and kind.made_by:
            reason = f"of a trace whose model was not named; `expertly {kind.made_by} --model` names it"
        raise refuse("identity", f"{reason}; accepted: {identity!r:.80}")
    shape = parse_as(ModelShape, texts.get("shape", ""), f"{path}: shape", StoreError)
    learned: AnyState = kind(shape) if isinstance(kind, type) else kind  # type: ignore[call-arg]
    if learned.shape != shape:
        raise StoreError(f"{path}: shape: of {shape}; accepted: {learned.shape}, as the model has")
    return learned


def _check_tensors(path: Path, learned: LearnedState, infos: Mapping[str, TensorInfo], sizes: Sizes) -> None:
    """Raises StoreError where arrays of these types and shapes are not those of the state, or one is missing."""
    shape = learned.shape
    bounds = {"L": (shape.num_layers, shape.num_layers), "E": (shape.max_experts, shape.max_experts), **sizes}
    for name in infos.keys() - learned.tensors.keys():
        raise StoreError(f"{path}: tensor {name!r:.80}: unknown; accepted: {', '.join(learned.tensors)}")
    for name, (dtype, dims, *_, is_optional) in learned.tensors.items():
        if name not in infos:
            if is_optional:
                continue
            raise StoreError(f"{path}: tensor {name!r}: missing")
        info = infos[name]
        accepted = f"{dtype} [{', '.join(_span(bounds.get(letter, _ANY)) for letter in dims)}]"
        is_right = (info.dtype, len(info.shape)) == (dtype, len(dims))
        for letter, num in zip(dims, info.shape, strict=False):
            least, most = bounds.get(letter, _ANY)
            is_right = is_right and least <= num <= most
            bounds[letter] = num, num
        if not is_right:
            raise StoreError(f"{path}: tensor {name!r}: {info.dtype} {list(info.shape)!s:.80}; accepted: {accepted}")


def _check_numbers(path: Path, learned: LearnedState, arrays: Arrays) -> None:
    """Raises StoreError naming the first number that is not one of those that its tensor may hold."""
    for name, array in arrays.items():
        least, most = learned.tensors[name].least, learned.tensors[name].most
        with np.errstate(invalid="ignore"):
            if array.size == 0 or least <= array.min().item() <= array.max().item() <= most:
                continue
            place = np.unravel_index(int(((array >= least) & (array <= most)).argmin()), array.shape)  # NaN is wrong
        raise StoreError(
            f"{path}: tensor {name!r}: {[int(at) for at in place]}: {array[place]}; accepted: {least:g} to {most:g}"
        )


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
