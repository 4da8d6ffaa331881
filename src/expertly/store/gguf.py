"""Headers of GGUF files, read as hostile input: everything is checked before anything is allocated for it."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from expertly.core.errors import CheckpointError
from expertly.core.untrusted import GGUF_HEADER
from expertly.store.checkpoint import TensorRef

SUFFIX = ".gguf"

_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class GgufFiles:
    """A model's GGUF file, or all of its parts. `metadata` is the first file's; of an array it has only the length."""

    path: Path  # the first
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorRef]  # by GGUF's names; dtype is GGUF's name of the type
    headers: Mapping[str, bytes]  # by file name

    @classmethod
    def open(cls, path: Path) -> GgufFiles:
        """Open a file, or any part of a split model. Raises CheckpointError naming the file and the field."""
        match = _SPLIT.search(path.name)
        if match is None:
            return cls(path, *_read(path, {}))
        stem, num = path.name[: match.start()], int(match[2])
        metadata: dict[str, Any] = {}
        tensors: dict[str, TensorRef] = {}
        headers: dict[str, bytes] = {}
        for number in range(num):
            part = path.with_name(f"{stem}-{number + 1:05d}-of-{num:05d}{SUFFIX}")
            if not part.is_file():
                raise CheckpointError(f"{part}: missing: the model is split into {num} files")
            said, of_part, header = _read(part, tensors)
            if said.get("split.no", number) != number or said.get("split.count", num) != num:
                raise CheckpointError(
                    f"{part}: split.no={said.get('split.no')!r}, split.count="
                    f"{said.get('split.count')!r}: disagree with its name"
                )
            metadata = metadata or dict(said)
            tensors |= of_part
            headers |= header
        return cls(path.with_name(f"{stem}-00001-of-{num:05d}{SUFFIX}"), metadata, tensors, headers)


def _read(path: Path, others: Mapping[str, TensorRef]) -> tuple[dict[str, Any], dict[str, TensorRef], dict[str, bytes]]:
    try:
        with path.open("rb") as file:
            header = _Header(path, file)
            metadata = header.metadata()
            tensors = header.tensors(metadata.get("general.alignment", 32))
            file.seek(0)
            raw = file.read(header.at)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    again = next((name for name in tensors if name in others), None)
    if again is not None:
        raise CheckpointError(f"{path}: tensor {again!r} is also in {others[again].path.name}")
    return metadata, tensors, {path.name: raw}


class _Header:
    """Parses a header from front to back."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file, self.at = path, file, 0
        self._size = os.fstat(file.fileno()).st_size
        self._end = min(self._size, GGUF_HEADER.nbytes)
        if self._take(4) != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file: it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            raise CheckpointError(f"{path}: version={version}: accepted: {', '.join(map(str, _VERSIONS))}")
        self._num_tensors, self._num_fields = self._count("tensor_count", 24), self._count("metadata_kv_count", 13)

    def metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(self._num_fields):
            key = self._string("a metadata key")
            found[key] = self._value(key, self._number("I"))
        return found

    def tensors(self, alignment: object) -> dict[str, TensorRef]:
        """Raises CheckpointError where a tensor's type or sizes are impossible, or it lies beyond the file."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        path = self._path
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise CheckpointError(f"{path}: general.alignment={alignment!r:.80}: must be a power of two up to 1048576")
        entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for _ in range(self._num_tensors):
            name = self._string("a tensor's name")
            num_dimensions = self._number("I")
            if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
                raise CheckpointError(f"{path}: tensor {name!r:.80}: {num_dimensions} dimensions: must be 1 to 4")
            shape = tuple(reversed([self._number("Q") for _ in range(num_dimensions)]))
            kind, offset = self._number("I"), self._number("Q")
            if name in entries:
                raise CheckpointError(f"{path}: tensor {name!r:.80}: is named twice")
            try:
                known = GGMLQuantizationType(kind)
            except ValueError:
                raise CheckpointError(
                    f"{path}: tensor {name!r:.80}: type={kind}: unknown to the package gguf"
                ) from None
            block, block_nbytes = GGML_QUANT_SIZES[known]
            if any(not 0 < one < 1 << 40 for one in shape) or shape[-1] % block:
                raise CheckpointError(
                    f"{path}: tensor {name!r:.80}: shape={list(shape)}: must be whole blocks of {block} in {known.name}"
                )
            entries[name] = known.name, shape, offset, math.prod(shape) // block * block_nbytes
        begin, tensors = -(-self.at // alignment) * alignment, {}
        for name, (dtype, shape, offset, nbytes) in entries.items():
            if offset % alignment or begin + offset + nbytes > self._size:
                raise CheckpointError(
                    f"{path}: tensor {name!r:.80}: offset={offset}: its {nbytes} bytes must begin at a multiple of "
                    f"{alignment} and end in the file, which has {self._size} bytes: truncated?"
                )
            tensors[name] = TensorRef(path, dtype, shape, begin + offset, nbytes)
        return tensors

    def _value(self, key: str, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string(key)
        element = self._number("I") if kind == _ARRAY else kind
        if element not in _NUMBERS and element != _STRING:
            raise CheckpointError(f"{self._path}: {key}: type={element}: no number, string or list of these")
        width = struct.calcsize(_NUMBERS[element]) if element in _NUMBERS else 8
        count = self._count(key, width)
        if element in _NUMBERS:
            self._take(count * width)
        else:
            for _ in range(count):
                self._take(self._count(key, 1))
        return count

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _count(self, what: str, least_nbytes: int) -> int:
        """The number of entries that follow, each of at least `least_nbytes`."""
        count: int = self._number("Q")
        if count * least_nbytes > self._end - self.at:
            raise CheckpointError(f"{self._path}: {what:.80}: {count} entries, more than the file holds: truncated?")
        return count

    def _string(self, what: str) -> str:
        raw = self._take(self._count(what, 1))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{self._path}: {what:.80}: {raw[:40]!r}: is no UTF-8") from None

    def _take(self, nbytes: int) -> bytes:
        raw = self._file.read(nbytes) if nbytes <= self._end - self.at else b""
        if len(raw) != nbytes:
            raise CheckpointError(f"{self._path}: truncated: its header goes on behind byte {self.at}")
        self.at += nbytes
        return raw
