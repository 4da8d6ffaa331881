"""Safetensors headers: written, and read as hostile input that is checked before memory is allocated for it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Len, Lt, MaxLen
from typing_extensions import TypedDict

from expertly.core.errors import ExpertlyError
from expertly.core.geometry import PAGE_NBYTES
from expertly.core.untrusted import HEADER, MAX_DIMENSIONS, MAX_NAME, check_value, reading, value_as

_DTYPES_OF_BITS = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E4M3FNUZ F8_E5M2FNUZ F8_E8M0",
    16: "I16 U16 F16 BF16",
    32: "I32 U32 F32",
    64: "C64 F64 I64 U64",
}
BITS = {name: bits for bits, names in _DTYPES_OF_BITS.items() for name in names.split()}
"""Bits of one element, by the name that a safetensors header uses."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written; `dtype` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in its file."""

    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    begin: int  # absolute file offsets
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


_Size = Annotated[int, Ge(0), Lt(1 << 62)]


class _Entry(TypedDict):
    """Of a header."""

    dtype: str
    shape: Annotated[list[_Size], MaxLen(MAX_DIMENSIONS)]
    data_offsets: Annotated[list[_Size], Len(2, 2)]  # from where the file's data begins


def read_safetensors_header(path: Path, failure: type[ExpertlyError]) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, in file order.

    Raises `failure` naming the file, and the tensor in question, if the file cannot be read or is truncated, or its
    header is malformed or wrong: names given twice, unknown dtypes, lengths that are not shape x dtype, tensors that
    overlap, leave bytes unused or reach beyond the file.
    """
    return parse_safetensors_header(path, read_header_bytes(path, failure), failure)


def read_header_bytes(path: Path, failure: type[ExpertlyError]) -> bytes:
    """The raw JSON of the header, whose length has been checked against the file."""
    with reading(path, failure) as file:
        return header_bytes_of(file, path, failure)


def header_bytes_of(file: FileIO, path: Path, failure: type[ExpertlyError]) -> bytes:
    """`read_header_bytes` for an open file at its beginning. Raises OSError where reading fails."""
    size, prefix = os.fstat(file.fileno()).st_size, file.read(8)
    nbytes = int.from_bytes(prefix, "little")
    if nbytes > HEADER.nbytes:
        most = f"more than the {HEADER.nbytes} bytes accepted; damaged, or not a safetensors file"
        raise failure(f"{path}: header length {nbytes}: {most}")
    raw = file.read(nbytes)
    if len(prefix) < 8 or len(raw) < nbytes:
        raise failure(f"{path}: truncated: header length {nbytes}, but the file has {size} bytes")
    return raw


def parse_safetensors_header(
    path: Path, raw: bytes, failure: type[ExpertlyError], file_nbytes: int | None = None
) -> dict[str, TensorInfo]:
    """`read_safetensors_header` for the `raw` that `read_header_bytes` returned. `file_nbytes`: given where the file
    that was read may no longer be the one at `path`.
    """
    entries = _parse(path, raw, failure)
    entries.pop("__metadata__", None)
    start, size = 8 + len(raw), path.stat().st_size if file_nbytes is None else file_nbytes
    tensors = {}
    for name, entry in value_as(dict[str, _Entry], entries, f"{path}: header", failure).items():
        if len(name) > MAX_NAME or not name.isprintable():
            said = f"a name of {len(name)} characters; accepted: {MAX_NAME} that can be printed"
            raise failure(f"{path}: tensor {name[:80]!r}: {said}")
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if dtype not in BITS:
            accepted = ", ".join(BITS)
            raise failure(f"{path}: tensor {name!r}: dtype={dtype!r:.80}: unknown; accepted: {accepted}")
        num_bits = 0 if 0 in shape else math.prod(shape) * BITS[dtype]  # of 64 sizes at most: no long computation
        if (end - begin) * 8 != num_bits:
            needed = f"shape {shape!s:.80} of {dtype} needs {num_bits / 8 if num_bits < 1 << 70 else math.inf:g}"
            held = f"data_offsets={[begin, end]} hold {end - begin} bytes"
            raise failure(f"{path}: tensor {name!r}: {held}, but {needed}")
        tensors[name] = TensorInfo(dtype, tuple(shape), start + begin, start + end)
    ordered = sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    expected, previous = start, "the header"
    for name, info in ordered:
        problem = ""
        if info.end > size:
            problem = f"reach beyond the {size - start} data bytes of the file (truncated?)"
        elif info.begin != expected:
            problem = f"{'overlaps' if info.begin < expected else 'leaves unused bytes after'} {previous}"
        if problem:
            offsets = [info.begin - start, info.end - start]
            raise failure(f"{path}: tensor {name!r}: data_offsets {offsets}: {problem}")
        expected, previous = info.end, f"tensor {name!r}"
    if expected != size:
        raise failure(f"{path}: {size - expected} bytes at the end belong to no tensor")
    return dict(ordered)


def header_metadata(path: Path, raw: bytes, failure: type[ExpertlyError]) -> dict[str, str]:
    """The metadata of a safetensors header; empty where it has none. Raises `failure`."""
    metadata = _parse(path, raw, failure).get("__metadata__", {})
    return value_as(dict[str, str], metadata, f"{path}: __metadata__", failure)


def safetensors_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """Length and JSON of a safetensors header, padded so that data starts at a multiple of 4096."""
    entries: dict[str, Any] = {}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    about = {"format": "pt"} if metadata is None else dict(metadata)
    raw = json.dumps({"__metadata__": about, **entries}, separators=(",", ":")).encode()
    nbytes = -(-(8 + len(raw)) // PAGE_NBYTES) * PAGE_NBYTES - 8
    return nbytes.to_bytes(8, "little") + raw.ljust(nbytes)


def _parse(path: Path, raw: bytes, failure: type[ExpertlyError]) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for key, value in pairs:
            if key in entries:
                raise failure(f"{path}: header names {key!r:.80} twice")
            entries[key] = value
        return entries

    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise failure(f"{path}: header is not JSON ({error}); damaged, or not a safetensors file") from None
    if not isinstance(entries, dict):
        raise failure(f"{path}: header is a JSON {type(entries).__name__}; must be an object")
    check_value(entries, f"{path}: header", HEADER, failure)
    return entries
