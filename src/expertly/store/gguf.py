"""Headers of GGUF files, read as hostile input: everything is checked before anything is allocated for it."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import CheckpointError
from expertly.core.untrusted import GGUF, reading
from expertly.store.checkpoint import TensorRef

SUFFIX = ".gguf"

_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_MAX_NAMES = 1 << 16
"""Tensors of a file, and its metadata keys."""

SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
"""Ending of the names of a split model's files: a number from 1, and how many there are."""

_LENGTH = struct.Struct("<Q")
_READ_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True, repr=False)
class GgufList:
    """A list in the metadata, whose values stay the header's bytes until they are asked for."""

    path: Path = field(compare=False)
    key: str
    kind: int  # GGUF's number of the type of its values
    num: int
    raw: bytes

    def __len__(self) -> int:
        return self.num

    def __repr__(self) -> str:
        return f"a list of {self.num} {'texts' if self.is_text else 'numbers'}"

    @property
    def is_text(self) -> bool:
        return self.kind == _STRING

    def numbers(self) -> npt.NDArray[Any]:
        """Of a list that is not of texts."""
        return np.frombuffer(self.raw, np.dtype(_NUMBERS[self.kind]).newbyteorder("<"))

    def texts(self) -> list[str]:
        """Of a list of texts. Raises CheckpointError where a value is none."""
        texts, at = [], 0
        try:
            for _ in range(self.num):
                end = at + 8 + _LENGTH.unpack_from(self.raw, at)[0]
                texts.append(self.raw[at + 8 : end].decode())
                at = end
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: {self.key:.80}: entry {len(texts)}: is no UTF-8") from None
        return texts


@dataclass(frozen=True, slots=True)
class GgufFiles:
    """A model's GGUF file, or all of its parts. `metadata` is the first file's: numbers, strings, GgufLists."""

    path: Path  # the first
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorRef]  # by GGUF's names; dtype is GGUF's name of the type
    headers: Mapping[str, bytes]  # by file name

    @classmethod
    def open(cls, path: Path) -> GgufFiles:
        """Open a file, or any part of a split model. Raises CheckpointError naming the file and the field."""
        match = SPLIT.search(path.name)
        number, num = (int(match[1]), int(match[2])) if match else (1, 1)
        if not 1 <= number <= num:
            raise CheckpointError(f"{path}: part {number} of {num}, by its name: there is none")
        parts = [path]
        if match is not None:
            stem = path.name[: match.start()]
            parts = [path.with_name(f"{stem}-{place + 1:05d}-of-{num:05d}{SUFFIX}") for place in range(num)]
        metadata: dict[str, Any] = {}
        tensors: dict[str, TensorRef] = {}
        headers: dict[str, bytes] = {}
        for place, part in enumerate(parts):
            if num > 1 and not part.exists():
                raise CheckpointError(f"{part}: missing: the model is split into {num} files")
            fields, of_part, headers[part.name] = _read(part)
            _check_part(part, fields, place, num, metadata)
            metadata = metadata or fields
            again = next((name for name in of_part if name in tensors), None)
            if again is not None:
                raise CheckpointError(f"{part}: tensor {again!r:.80} is also in {tensors[again].path.name}")
            tensors |= of_part
        total = metadata.get("split.tensors.count", len(tensors))
        if total != len(tensors):
            raise CheckpointError(
                f"{parts[0]}: split.tensors.count={total!r:.80}: must be {len(tensors)}, the tensors of its parts"
            )
        return cls(parts[0], metadata, tensors, headers)


def _check_part(part: Path, fields: Mapping[str, Any], place: int, num: int, first: Mapping[str, Any]) -> None:
    """Raises CheckpointError where a file is not part `place` of `num` of the model of the `first` one's metadata."""
    said = fields.get("split.no"), fields.get("split.count")
    is_whole = num == 1 and said in ((None, None), (0, 0))  # llama.cpp writes 0 where it merges parts
    if said != (place, num) and not is_whole:
        raise CheckpointError(f"{part}: split.no={said[0]!r:.80}, split.count={said[1]!r:.80}: disagree with its name")
    for key, value in fields.items() if first else ():
        if key.startswith("split.") or (key.startswith("general.") and key != "general.architecture"):
            continue
        if type(first.get(key)) is not type(value) or first[key] != value:
            raise CheckpointError(f"{part}: {key:.80}: is not that of the first part: of another model?")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, TensorRef], bytes]:
    with reading(path, CheckpointError) as file:
        header = _Header(path, file)
        metadata = header.metadata()
        return metadata, header.tensors(metadata.get("general.alignment", 32)), header.raw


class _Header:
    """Parses a header from front to back."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self._path, self._file, self._at, self._buffer = path, file, 0, bytearray()
        self._size = os.fstat(file.fileno()).st_size
        self._end = min(self._size, GGUF.nbytes)
        self._left = GGUF.items
        if self._take(4) != b"GGUF":
            raise self._refused("not a GGUF file: it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
            order = f" in big-endian order, of version {swapped}" if swapped in _VERSIONS else ""
            raise self._refused(f"version={version}{order}: accepted: 2, 3, little-endian")
        self._num_tensors, self._num_fields = self._count("tensor_count", 24), self._count("metadata_kv_count", 13)
        for name, num in (("tensor_count", self._num_tensors), ("metadata_kv_count", self._num_fields)):
            if num > _MAX_NAMES:
                raise self._refused(f"{name}={num}: accepted: at most {_MAX_NAMES}")

    @property
    def raw(self) -> bytes:
        return bytes(self._buffer[: self._at])

    def metadata(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for _ in range(self._num_fields):
            key = self._string("a metadata key")
            if not key.isprintable():
                raise self._refused(f"a metadata key is {key!r:.80}: must be printable")
            if key in fields:
                raise self._refused(f"{key:.80}: is there twice")
            fields[key] = self._value(key, self._number("I"))
        return fields

    def tensors(self, alignment: object) -> dict[str, TensorRef]:
        """Raises CheckpointError where sizes are impossible, or tensors overlap or do not fill the file."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._refused(f"general.alignment={alignment!r:.80}: must be a power of two up to 1048576")
        entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for _ in range(self._num_tensors):
            name = self._string("a tensor's name")
            tensor, num_dimensions = f"tensor {name!r:.80}", self._number("I")
            if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
                raise self._refused(f"{tensor}: {num_dimensions} dimensions: must be 1 to 4")
            shape = tuple(reversed([self._number("Q") for _ in range(num_dimensions)]))
            kind, offset = self._number("I"), self._number("Q")
            if name in entries:
                raise self._refused(f"{tensor}: is named twice")
            try:
                known = GGMLQuantizationType(kind)
            except ValueError:
                raise self._refused(f"{tensor}: type={kind}: unknown to the package gguf") from None
            block, block_nbytes = GGML_QUANT_SIZES[known]
            if any(not 0 < size < 1 << 40 for size in shape) or shape[-1] % block:
                accepted = f"must be whole blocks of {block} in {known.name}"
                raise self._refused(f"{tensor}: shape={list(shape)}: {accepted}")
            entries[name] = known.name, shape, offset, math.prod(shape) // block * block_nbytes
        begin, expected = -(-self._at // alignment) * alignment, 0
        for name, (_, _, offset, nbytes) in entries.items():
            if offset % alignment or begin + offset + nbytes > self._size:
                accepted = f"begin at a multiple of {alignment} and end in the file, which has {self._size} bytes"
                raise self._refused(
                    f"tensor {name!r:.80}: offset={offset}: its {nbytes} bytes must {accepted}: truncated?"
                )
        tensors: dict[str, TensorRef] = {}
        for name, (dtype, shape, offset, nbytes) in sorted(entries.items(), key=lambda item: item[1][2]):
            if offset != expected:
                problem = f"{'overlaps' if offset < expected else 'leaves unused bytes after'} what is before it"
                raise self._refused(f"tensor {name!r:.80}: offset={offset}: {problem}; must be {expected}")
            tensors[name] = TensorRef(self._path, dtype, shape, begin + offset, nbytes)
            expected = -(-(offset + nbytes) // alignment) * alignment
        if self._size > begin + expected:
            raise self._refused(f"{self._size - begin - expected} bytes at the end belong to no tensor")
        return tensors

    def _refused(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {text}")

    def _value(self, key: str, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string(key)
        element = self._number("I") if kind == _ARRAY else kind
        if element not in _NUMBERS and element != _STRING:
            raise self._refused(f"{key:.80}: type={element}: no number, string or list of these")
        width = struct.calcsize(f"<{_NUMBERS[element]}") if element in _NUMBERS else 8
        num = self._count(key, width)
        raw = self._take(num * width) if element in _NUMBERS else self._strings(key, num)
        return GgufList(self._path, key, element, num, raw)

    def _strings(self, key: str, num: int) -> bytes:
        if num > self._left:
            raise self._refused(f"{key:.80}: {num} texts; accepted: {GGUF.items} in all lists")
        self._left -= num
        at, have, length = self._at, len(self._buffer), _LENGTH.unpack_from
        for _ in range(num):
            if at + 8 > have:
                have = self._fill(at + 8)
            nbytes = length(self._buffer, at)[0]
            at += 8 + nbytes
            if at > self._end or nbytes > GGUF.text:
                raise self._refused(f"{key:.80}: a string of {nbytes} bytes; accepted: {GGUF.text}, in the header")
        return self._take(at - self._at)

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _count(self, name: str, least_nbytes: int) -> int:
        """The number of entries that follow, each of at least `least_nbytes`."""
        count: int = self._number("Q")
        if count * least_nbytes > self._end - self._at:
            raise self._refused(f"{name:.80}: {count} entries, more than the file holds: truncated?")
        return count

    def _string(self, name: str) -> str:
        nbytes = self._count(name, 1)
        if nbytes > GGUF.text:
            raise self._refused(f"{name:.80}: a string of {nbytes} bytes; accepted: {GGUF.text}")
        raw = self._take(nbytes)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._refused(f"{name:.80}: {raw[:40]!r}: is no UTF-8") from None

    def _take(self, nbytes: int) -> bytes:
        end = self._at + nbytes
        if end > len(self._buffer):
            self._fill(end)
        raw = bytes(self._buffer[self._at : end])
        self._at = end
        return raw

    def _fill(self, end: int) -> int:
        """Have the bytes before `end` in the buffer; how many it has then."""
        if end > self._end:
            raise self._refused(f"truncated: its header goes on behind byte {len(self._buffer)}")
        while len(self._buffer) < end:
            raw = self._file.read(min(self._end, max(end, 2 * len(self._buffer), _READ_NBYTES)) - len(self._buffer))
            if not raw:
                raise self._refused("truncated while its header was read")
            self._buffer += raw
        return len(self._buffer)
