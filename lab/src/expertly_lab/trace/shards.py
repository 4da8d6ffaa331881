"""Rows in safetensors files of whole iterations, mapped with NumPy alone; and arrays in files without a name."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from expertly.core.errors import ConfigError, TraceError
from expertly.core.files import replacing
from expertly.core.headers import TensorSpec, read_safetensors_header, safetensors_header
from expertly_lab.trace.schema import Array, FieldInfo, ShardInfo

_SAFETENSORS_NAMES = {"bool": "BOOL", "int32": "I32", "int64": "I64", "uint16": "U16", "float16": "F16"}


def write_shard(path: Path, fields: Sequence[FieldInfo], blocks: Sequence[Mapping[str, Array]]) -> int:
    """Write the rows of all blocks; the file gets its name once it is on the disk. Returns its size."""
    num_rows = sum(len(block[fields[0].name]) for block in blocks)
    with replacing(path) as file:
        file.write(safetensors_header([_spec(field, num_rows) for field in fields]))
        for field in fields:
            for block in blocks:
                file.write(np.ascontiguousarray(block[field.name]).data)
        return file.tell()


def map_shard(folder: Path, shard: ShardInfo, fields: Sequence[FieldInfo]) -> dict[str, Array]:
    """Each field's rows, mapped and read-only. Raises TraceError naming the file and the field that disagrees."""
    path = folder / shard.file
    if not path.is_file():
        raise TraceError(f"{path}: missing shard: the manifest names it for {shard.num_rows} rows")
    nbytes = path.stat().st_size
    if nbytes != shard.nbytes:
        problem = "truncated" if nbytes < shard.nbytes else "longer than it was"
        raise TraceError(f"{path}: {problem}: {nbytes} bytes, the manifest says {shard.nbytes}")
    tensors = read_safetensors_header(path, TraceError)
    unknown = tensors.keys() - {field.name for field in fields}
    if unknown:
        raise TraceError(f"{path}: field {min(unknown)!r:.80} is not in the manifest")
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be mapped ({error})") from None
    columns: dict[str, Array] = {}
    for field in fields:
        spec, info = _spec(field, shard.num_rows), tensors.get(field.name)
        if info is None:
            raise TraceError(f"{path}: field {field.name!r} is missing")
        if (info.dtype, info.shape) != (spec.dtype, spec.shape):
            raise TraceError(
                f"{path}: field {field.name!r}: {info.dtype} {list(info.shape)}, but the manifest says {spec.dtype} "
                f"{list(spec.shape)}"
            )
        columns[field.name] = np.ndarray(spec.shape, field.dtype, data, info.begin)
    return columns


def scratch(dtype: str, shape: tuple[int, ...], purpose: str) -> Array:
    """An array in the folder for temporary files, mapped into memory: only what is in use takes memory, the rest is
    page cache. The file has no name and goes away with the array. Raises ConfigError naming the `purpose` where the
    disk is full.
    """
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    try:
        with tempfile.TemporaryFile(prefix="expertly-") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)  # else a full disk is a signal where the mapping is written
            return np.memmap(file, dtype, "r+", shape=shape)
    except OSError as error:
        raise ConfigError(
            f"temporary files: {error.strerror}; {purpose} needs {nbytes} bytes in {tempfile.gettempdir()}; set TMPDIR "
            "to a folder that has them, or take fewer tokens"
        ) from None


def _spec(field: FieldInfo, num_rows: int) -> TensorSpec:
    return TensorSpec(field.name, _SAFETENSORS_NAMES[field.dtype], (num_rows, *field.shape))
