"""What policies learn, and the one file format that keeps it.

A file is safetensors: the arrays of `LearnedState.state`, and a header of texts: the kind of state, the model it is of,
and settings. It is replaced as a whole, sealed by a CRC-32, and read as hostile input: everything is checked before
memory is allocated for it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError, StoreError
from expertly.core.files import disk_errors, replacing
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.headers import (
    TensorSpec,
    header_bytes_of,
    header_metadata,
    parse_safetensors_header,
    safetensors_header,
)
from expertly.core.untrusted import open_file

VERSION = 1

MAX_LAYERS = 4096
MAX_EXPERTS = 0xFFFE
MAX_CAPACITY = 1 << 20
MAX_NBYTES = 1 << 36  # that a file may take in memory: a small file must not claim all there is

OF_A_TRACE = "trace:"  # begins the identity of a state made of a trace whose model was not named

MARK = b'"expertly-'
"""In every header: no other file is replaced."""

NO_CHECKSUM = "0" * 8
_CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{8})"')
_NUMPY = {"I64": "<i8", "I32": "<i4", "U16": "<u2", "F32": "<f4", "F16": "<f2"}

Shape = tuple[int, ...]
Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """How many experts each MoE layer of a model has, and how many its router chooses."""

    num_experts: tuple[int, ...]
    top_k: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.num_experts) == len(self.top_k) <= MAX_LAYERS:
            raise ConfigError(
                f"model shape: num_experts of {len(self.num_experts)} layers and top_k of {len(self.top_k)}; "
                f"must be as many, 1 to {MAX_LAYERS} layers"
            )
        for experts, top_k in zip(self.num_experts, self.top_k, strict=True):
            if not 1 <= top_k <= experts <= MAX_EXPERTS:
                raise ConfigError(
                    f"model shape: num_experts={experts}, top_k={top_k}: must be 1 <= top_k <= experts <= {MAX_EXPERTS}"
                )

    def __str__(self) -> str:
        """`26 layers of 64 experts, top-6`."""
        return f"{len(self.num_experts)} layers of {_span(self.num_experts)} experts, top-{_span(self.top_k)}"

    @classmethod
    def of(cls, geometry: Geometry) -> ModelShape:
        layers = geometry.layers
        return cls(tuple(layer.num_experts for layer in layers), tuple(layer.top_k for layer in layers))

    def geometry(self) -> Geometry:
        """A model of this shape, with experts of any size."""
        return Geometry(
            tuple(LayerGeometry(*one, 1, 1, 2, 1) for one in zip(self.num_experts, self.top_k, strict=True))
        )

    @property
    def num_layers(self) -> int:
        return len(self.num_experts)

    @property
    def max_experts(self) -> int:
        """E, of the largest layer."""
        return max(self.num_experts)

    @property
    def max_top_k(self) -> int:
        return max(self.top_k)


class Header:
    """The texts of a file's header. Whatever is read from it is checked: StoreError names the file, the field and its
    value.
    """

    def __init__(self, path: Path, texts: Mapping[str, str], shape: ModelShape | None = None) -> None:
        """`shape`: used where the texts have none."""
        self.path = path
        self.texts = texts
        self.identity = texts.get("identity", "")  # of the model, as its packed store has it
        self.shape = shape or self._layers()
        self.about: Facts = self.json_object("about") if "about" in texts else {}  # created, source, ...

    def refuse(self, name: str, accepted: str) -> NoReturn:
        raise StoreError(f"{self.path}: {name}={self.texts.get(name)!r:.80}: {accepted}")

    def json_object(self, name: str) -> dict[str, Any]:
        value = None
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(self.texts.get(name, ""))
        if not isinstance(value, dict):
            self.refuse(name, "must be a JSON object")
        return value

    def whole_numbers(self, name: str, least: int, most: int) -> tuple[int, ...]:
        """A list in `shape`."""
        numbers = self.json_object("shape").get(name)
        if not isinstance(numbers, list) or not all(type(one) is int and least <= one <= most for one in numbers):
            self.refuse("shape", f"{name} must be whole numbers from {least} to {most}")
        return tuple(numbers)

    def number(self, name: str, kind: Callable[[str], float] = float) -> Any:
        """A finite number of this kind, int or float. Its bounds are checked by whatever is made of it."""
        with contextlib.suppress(ValueError, OverflowError):
            value = kind(self.texts.get(name, ""))
            if math.isfinite(value):
                return value
        self.refuse(name, "must be a whole number" if kind is int else "must be a number")

    def check(self, kind: type[LearnedState], identity: str | None, shape: ModelShape | None) -> None:
        """Raises StoreError unless it is a header of this kind, for the given model (None: for any)."""
        if self.texts.get("version") != str(VERSION):
            self.refuse("version", f"this version of expertly reads {VERSION}; make the file again")
        if re.fullmatch("[0-9a-f]{8}", self.texts.get("checksum", "")) is None:
            self.refuse("checksum", "must be eight hexadecimal digits")
        if not self.identity:
            self.refuse("identity", "must say which model it is of")
        if identity is not None and identity != self.identity:
            what = "of another model, or of this one before it changed"
            if self.identity.startswith(OF_A_TRACE) and kind.made_by:
                what = f"of a trace whose model was not named; `expertly {kind.made_by} --model` names it"
            self.refuse("identity", f"{what}; expected {identity!r:.80}")
        if shape is not None and shape != self.shape:
            raise StoreError(f"{self.path}: shape: of {self.shape}; expected {shape}, as the model has")
        if kind.has_plain_facts and not all(map(_is_plain, self.about.values())):
            self.refuse("about", "must hold texts and numbers")

    def _layers(self) -> ModelShape:
        num_experts, top_k = (self.whole_numbers(name, 1, MAX_EXPERTS) for name in ("num_experts", "top_k"))
        try:
            return ModelShape(num_experts, top_k)
        except ConfigError as error:
            self.refuse("shape", str(error))


class LearnedState(ABC):
    """What a policy learned, as plain numbers that a file can keep. One class a kind."""

    kind: ClassVar[str]  # a file's `format` is "expertly-KIND"; beside a store its file is called so
    holds: ClassVar[str]  # in words, and which system uses it
    unit: ClassVar[str]  # what `num_learned` counts
    made_by: ClassVar[str] = ""  # the command that makes such a file of a trace, if there is one
    schema: ClassVar[Mapping[str, tuple[str, str]]]
    """Each array, in file order: its type in a file and a letter a dimension: L layers, E experts of the largest layer,
    K the largest top-k; any other letter has the size of the first array that has it.
    """
    optional: ClassVar[frozenset[str]] = frozenset()  # arrays that may be missing
    has_plain_facts: ClassVar[bool] = True  # whether `about` holds texts and numbers only

    shape: ModelShape
    generation: int = 0  # changes when the state changes
    hidden_size: int = 0  # the largest router input that it is made for; 0: it looks at none

    @property
    @abstractmethod
    def num_learned(self) -> int: ...

    @abstractmethod
    def state(self) -> dict[str, Array] | None:
        """Its arrays, which may be views; None while another thread changes them."""
        ...

    def settings(self) -> dict[str, str]:
        """What the header holds beside the model."""
        return {}

    def lists(self) -> dict[str, Sequence[int]]:
        """What the header holds under `shape`."""
        return {"num_experts": self.shape.num_experts, "top_k": self.shape.top_k}

    @classmethod
    def sizes(cls, header: Header, found: Mapping[str, int]) -> Mapping[str, int]:
        """Sizes that dimensions must have, where that is not what was `found`. Checks the header. Raises StoreError."""
        return {}

    @classmethod
    @abstractmethod
    def check(cls, path: Path, shape: ModelShape, arrays: Arrays) -> None:
        """Raises StoreError naming the array where numbers cannot have been learned."""
        ...

    @classmethod
    @abstractmethod
    def restored(cls, header: Header, arrays: Arrays) -> Any:
        """A state of these arrays, which have passed `sizes` and `check`. Raises StoreError, and ConfigError where
        settings in the header cannot be.
        """
        ...

    def check_model(self, path: Path, embedding_size: int) -> None:  # noqa: B027 - most need not
        """Raises StoreError unless it is of a model whose embeddings have so many numbers."""


Own = TypeVar("Own", bound="LearnedStore")


class LearnedStore(LearnedState):
    """A state that collects items up to a capacity, also those that another store of the same model collected."""

    capacity: int

    @property
    @abstractmethod
    def num_needed(self) -> int:
        """The least capacity that would hold all items."""
        ...

    @abstractmethod
    def digests(self) -> set[bytes]:
        """A digest of each item; equal items have equal digests."""
        ...

    @abstractmethod
    def absorb(self, other: Any, known: Container[bytes], most: int) -> int:
        """Add the newest items of `other` whose digests are not in `known`, the oldest of them first: at most `most`,
        or as many as there is room for. Returns how many were added.
        """
        ...

    @classmethod
    @abstractmethod
    def merged(cls, stores: Sequence[Any], capacity: int) -> Any:
        """A store of `capacity` to which the items of `stores` (at least one) were added one store after the other,
        each oldest first; redundant items go. Raises ConfigError where they are not of one model.
        """
        ...

    def of_another(self: Own, arrays: Arrays) -> Own:
        """A store made of another one's `state`. Raises StoreError where it is of another kind or model, or holds
        numbers that cannot have been learned.
        """
        longest = max((len(array) for array in arrays.values() if array.ndim == 1), default=1)
        texts = self.settings() | {"capacity": str(max(1, longest))}
        header = Header(Path("what another has learned"), texts, self.shape)
        arrays = {name: arrays[name] for name in self.schema if name in arrays}
        _check_tensors(type(self), header, {name: (self.schema[name][0], one.shape) for name, one in arrays.items()})
        return _restored(type(self), header, arrays)


AnyState = TypeVar("AnyState", bound=LearnedState)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state at one moment, to be written."""

    kind: type[LearnedState]
    shape: ModelShape
    texts: Mapping[str, str]
    arrays: dict[str, Array]
    generation: int

    @classmethod
    def of(cls, learned: LearnedState, *, copy: bool = False) -> Snapshot | None:
        """`copy`: the state goes on changing while this is written. None while another thread changes it."""
        generation, state = learned.generation, learned.state()
        if state is None:
            return None
        lists = {name: list(numbers) for name, numbers in learned.lists().items()}
        texts = {"shape": json.dumps(lists, separators=(",", ":")), **learned.settings()}
        arrays = {name: array.copy() for name, array in state.items()} if copy else state
        return cls(type(learned), learned.shape, texts, arrays, generation)


@dataclass(frozen=True, slots=True)
class LearnedFile(Generic[AnyState]):
    """A file that has been read whole."""

    header: Header
    nbytes: int  # of the file
    learned: AnyState

    @property
    def path(self) -> Path:
        return self.header.path


def save_learned(path: Path, learned: LearnedState | Snapshot, identity: str, about: Facts | None = None) -> None:
    """Replace the file at `path`. `identity` is the model's; `about` are more facts for the header, as JSON. After a
    crash the file is what it was before. Raises StoreError where it cannot be written, or holds numbers that cannot
    have been learned.
    """
    shot = learned if isinstance(learned, Snapshot) else Snapshot.of(learned)
    assert shot is not None, "another thread changes it"
    shot.kind.check(path, shot.shape, shot.arrays)
    arrays = {
        name: np.ascontiguousarray(shot.arrays[name], _NUMPY[dtype])
        for name, (dtype, _) in shot.kind.schema.items()
        if name in shot.arrays
    }
    specs = [TensorSpec(name, shot.kind.schema[name][0], array.shape) for name, array in arrays.items()]
    metadata = {
        "format": _format_of(shot.kind),
        "version": str(VERSION),
        "checksum": NO_CHECKSUM,
        "identity": identity,
        "about": json.dumps(dict(about or {}), separators=(",", ":"), allow_nan=False),
        **shot.texts,
    }
    raw = safetensors_header(specs, metadata)
    crc = zlib.crc32(raw)
    for array in arrays.values():
        crc = zlib.crc32(_bytes_of(array), crc)
    sealed = safetensors_header(specs, metadata | {"checksum": f"{crc:08x}"})
    assert without_checksum(sealed) == (raw, f"{crc:08x}")
    with disk_errors(path.parent, f"writing {path.name}", StoreError, ""), replacing(path, MARK) as file:
        file.write(sealed)
        for array in arrays.values():
            file.write(_bytes_of(array))


def read_learned(
    path: Path, *kinds: type[AnyState], identity: str | None = None, shape: ModelShape | None = None
) -> LearnedFile[AnyState]:
    """Read and check everything. `identity` and `shape` are those of the model that it must be of; None: of any.

    Raises StoreError naming the file and the field: a file that is missing, truncated, altered, of none of these kinds,
    of another version or model, or that holds numbers that cannot have been learned.
    """
    try:
        with open_file(path, StoreError) as file:
            nbytes = os.fstat(file.fileno()).st_size
            raw = header_bytes_of(file, path, StoreError)
            infos = parse_safetensors_header(path, raw, StoreError, nbytes)
            kind, header = _header(path, raw, kinds, identity, shape)
            _check_tensors(kind, header, {name: (info.dtype, info.shape) for name, info in infos.items()})
            # In file order, which leaves nothing between them.
            arrays: dict[str, Array] = {n: np.empty(i.shape, _NUMPY[i.dtype]) for n, i in infos.items()}
            _read_arrays(file, path, raw, arrays)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror or error})") from None
    return LearnedFile(header, nbytes, _restored(kind, header, arrays))


def check_numbers(
    path: Path, name: str, values: Array, is_right: npt.NDArray[np.bool_], axes: Sequence[str], accepted: str
) -> None:
    """Raises StoreError naming the first of `values` that is not right. `axes`: what each dimension counts."""
    if not is_right.all():
        place = tuple(int(at) for at in np.unravel_index(int(is_right.argmin()), is_right.shape))
        where = ", ".join(f"{axis} {at}" for axis, at in zip(axes, place, strict=False))
        raise StoreError(f"{path}: tensor {name!r}: {where}: {values[place].tolist()!s:.80}; must be {accepted}")


def check_born(path: Path, name: str, born: Array) -> None:
    """Raises StoreError unless `born` are the numbers by which things were added."""
    if len(np.unique(born)) != len(born) or (len(born) and born.min() < 0):
        raise StoreError(f"{path}: tensor {name!r}: must count what was added: from 0, none twice")


def without_checksum(header: bytes) -> tuple[bytes, str]:
    """A header with a blank checksum, as it was when its checksum was computed, and that checksum."""
    match = _CHECKSUM.search(header)
    if match is None:
        return header, ""
    return header[: match.start(1)] + NO_CHECKSUM.encode() + header[match.end(1) :], match[1].decode()


def _format_of(kind: type[LearnedState]) -> str:
    return f"expertly-{kind.kind}"


def _header(
    path: Path, raw: bytes, kinds: Sequence[type[AnyState]], identity: str | None, shape: ModelShape | None
) -> tuple[type[AnyState], Header]:
    texts = header_metadata(path, raw, StoreError)
    found = texts.get("format")
    kind = next((one for one in kinds if _format_of(one) == found), None)
    if kind is None:
        accepted = " or ".join(f"{_format_of(one)!r} ({one.holds})" for one in kinds)
        raise StoreError(f"{path}: format={found!r:.80}: not a file of that kind; accepted: {accepted}")
    header = Header(path, {"about": "", **texts})
    header.check(kind, identity, shape)
    return kind, header


def _check_tensors(kind: type[LearnedState], header: Header, found: Mapping[str, tuple[str, Shape]]) -> None:
    """Raises StoreError where arrays of these types and shapes do not fit the header, or one is missing."""
    path, schema, shape = header.path, kind.schema, header.shape
    sizes = {"L": shape.num_layers, "E": shape.max_experts, "K": shape.max_top_k}
    for name, (_, letters) in schema.items():
        if name in found and len(found[name][1]) == len(letters):
            sizes = dict(zip(letters, found[name][1], strict=True)) | sizes
    sizes |= kind.sizes(header, sizes)
    for name, (dtype, size) in found.items():
        if name not in schema:
            raise StoreError(f"{path}: tensor {name!r:.80}: unknown; accepted: {', '.join(schema)}")
        expected = schema[name][0], tuple(sizes.get(letter, 0) for letter in schema[name][1])
        if (dtype, size) != expected:
            needs = f"{expected[0]} {list(expected[1])}"
            raise StoreError(f"{path}: tensor {name!r}: {dtype} {list(size)!s:.80}; must be {needs}")
    for name in schema:
        if name not in found and name not in kind.optional:
            raise StoreError(f"{path}: tensor {name!r}: missing")


def _restored(kind: type[AnyState], header: Header, arrays: Arrays) -> AnyState:
    kind.check(header.path, header.shape, arrays)
    try:
        made: AnyState = kind.restored(header, arrays)
    except ConfigError as error:
        raise StoreError(f"{header.path}: {error}") from None
    except MemoryError:
        raise StoreError(f"{header.path}: not enough memory for {kind.holds}") from None
    return made


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _span(numbers: tuple[int, ...]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _read_arrays(file: FileIO, path: Path, raw: bytes, arrays: Mapping[str, Array]) -> None:
    """Fill the arrays from a file that is positioned at them, and check its seal."""
    blank, checksum = without_checksum(len(raw).to_bytes(8, "little") + raw)
    crc = zlib.crc32(blank)
    with BufferedReader(file) as reader:  # which reads on until an array is full
        for name, array in arrays.items():
            data = _bytes_of(array)
            if reader.readinto(data) != len(data):
                raise StoreError(f"{path}: truncated inside tensor {name!r}")
            crc = zlib.crc32(data, crc)
    if f"{crc:08x}" != checksum:
        raise StoreError(f"{path}: checksum={checksum!r:.20}: the file was damaged or altered (it sums to {crc:08x})")
