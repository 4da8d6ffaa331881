"""Shards: safetensors files of rows, one tensor a field, written and mapped with NumPy alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from expertly.core.errors import TraceError
from expertly.core.headers import TensorSpec, read_safetensors_header, safetensors_header
from expertly.trace.checks import Array
from expertly.trace.schema import FieldInfo, ShardInfo

CODES = {"bool": "BOOL", "int32": "I32", "int64": "I64", "uint16": "U16", "float16": "F16"}
"""NumPy's name to safetensors' name, for every dtype that a field can have."""

_BLOCK_ROWS = 4096


def shard_name(index: int) -> str:
    return f"rows-{index:05d}.safetensors"


def write_shard(path: Path, fields: Sequence[FieldInfo], rows: Mapping[str, Array]) -> int:
    """Write all rows, in little memory, and give the file its name when it is whole. Returns its size."""
    num_rows = len(rows[fields[0].name])
    header = safetensors_header([_spec(field, num_rows) for field in fields])
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(header)
            for field in fields:
                for start in range(0, num_rows, _BLOCK_ROWS):
                    file.write(np.ascontiguousarray(rows[field.name][start : start + _BLOCK_ROWS]).data)
            file.flush()
            os.fsync(file.fileno())
            nbytes = file.tell()
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return nbytes


def map_shard(folder: Path, shard: ShardInfo, fields: Sequence[FieldInfo]) -> dict[str, Array]:
    """Each field's rows, mapped and read-only. Raises TraceError naming the file and the field that disagrees."""
    path = folder / shard.file
    if not path.is_file():
        raise TraceError(f"{path}: missing shard: the manifest names it for {shard.num_rows} rows")
    nbytes = path.stat().st_size
    if nbytes != shard.nbytes:
        what = "truncated" if nbytes < shard.nbytes else "longer than it was"
        raise TraceError(f"{path}: {what}: {nbytes} bytes, the manifest says {shard.nbytes}")
    found = read_safetensors_header(path, TraceError)
    for name in found:
        if name not in {field.name for field in fields}:
            raise TraceError(f"{path}: field {name!r:.80} is not in the manifest")
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be mapped ({error})") from None
    columns: dict[str, Array] = {}
    for field in fields:
        spec, info = _spec(field, shard.num_rows), found.get(field.name)
        if info is None:
            raise TraceError(f"{path}: field {field.name!r} is missing")
        if (info.dtype, info.shape) != (spec.dtype, spec.shape):
            raise TraceError(
                f"{path}: field {field.name!r}: {info.dtype} {list(info.shape)}, but the manifest says {spec.dtype} "
                f"{list(spec.shape)}"
            )
        columns[field.name] = np.ndarray(spec.shape, field.dtype, data, info.begin)
    return columns


def _spec(field: FieldInfo, num_rows: int) -> TensorSpec:
    return TensorSpec(field.name, CODES[field.dtype], (num_rows, *field.shape))
