"""Where the rows of a trace are: in shards, and in the tail of a recording that is not finished.

A shard is a safetensors file of whole iterations, one tensor a field, written and mapped with NumPy alone. The tail is
a file of fixed-size records, one a row, appended an iteration at a time. A record holds the row's stored fields and how
many rows of its iteration follow it, so that a tail that was cut anywhere opens up to its last complete iteration. The
writer never changes a tail but starts a new file, so that whoever has mapped the old one keeps its bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import TraceError
from expertly.core.files import replacing
from expertly.core.headers import TensorSpec, read_safetensors_header, safetensors_header
from expertly.trace.schema import Array, FieldInfo, ShardInfo

Records = npt.NDArray[np.void]

TAIL_NAME = "tail.bin"
ROWS_LEFT = "rows_left"

_SAFETENSORS_NAMES = {"bool": "BOOL", "int32": "I32", "int64": "I64", "uint16": "U16", "float16": "F16"}
_BLOCK_ROWS = 4096


def shard_name(index: int) -> str:
    return f"rows-{index:05d}.safetensors"


def write_shard(path: Path, fields: Sequence[FieldInfo], rows: Mapping[str, Array]) -> int:
    """Write all rows, in little memory; the file gets its name once it is on the disk. Returns its size."""
    num_rows = len(rows[fields[0].name])
    with replacing(path) as file:
        file.write(safetensors_header([_spec(field, num_rows) for field in fields]))
        for field in fields:
            for start in range(0, num_rows, _BLOCK_ROWS):
                file.write(np.ascontiguousarray(rows[field.name][start : start + _BLOCK_ROWS]).data)
        return file.tell()


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
    unknown = found.keys() - {field.name for field in fields}
    if unknown:
        raise TraceError(f"{path}: field {min(unknown)!r:.80} is not in the manifest")
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


def record_dtype(fields: Sequence[FieldInfo]) -> np.dtype[Any]:
    return np.dtype([*((field.name, field.dtype, field.shape) for field in fields), (ROWS_LEFT, "int32")])


def read_tail(folder: Path, dtype: np.dtype[Any], next_iteration: int) -> Records:
    """The records that follow the shards, up to the last complete iteration; mapped, not read. No file is an empty
    tail.

    `next_iteration` is the one after the last in a shard. Records of earlier iterations are left over from a writer
    that was killed after it had put them in a shard. Raises TraceError if the tail cannot be read.
    """
    path = folder / TAIL_NAME
    nothing: Records = np.empty(0, dtype)
    try:
        with path.open("rb") as file:
            num_records = file.seek(0, 2) // dtype.itemsize
            if num_records == 0:
                return nothing
            mapped = mmap.mmap(file.fileno(), num_records * dtype.itemsize, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        return nothing
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be read ({error})") from None
    records: Records = np.frombuffer(mapped, dtype)
    iterations = records["iteration"].astype(np.int64)
    is_new = iterations >= next_iteration
    first = int(np.argmax(is_new)) if is_new.any() else num_records
    return records[first : first + _num_complete(iterations[first:], records[ROWS_LEFT][first:], next_iteration)]


def _num_complete(iterations: npt.NDArray[np.int64], rows_left: npt.NDArray[np.int32], next_iteration: int) -> int:
    """How many records, from the first, form complete iterations that count up from `next_iteration`."""
    if len(iterations) == 0 or iterations[0] != next_iteration:
        return 0
    left = rows_left.astype(np.int64)
    is_next = (iterations[1:] == iterations[:-1]) & (left[1:] == left[:-1] - 1) & (left[:-1] > 0)
    is_next |= (iterations[1:] == iterations[:-1] + 1) & (left[:-1] == 0) & (left[1:] >= 0)
    num_sound = len(left) if is_next.all() else int(np.argmin(is_next)) + 1
    ends = np.flatnonzero(left[:num_sound] == 0)
    return int(ends[-1]) + 1 if len(ends) else 0


def _spec(field: FieldInfo, num_rows: int) -> TensorSpec:
    return TensorSpec(field.name, _SAFETENSORS_NAMES[field.dtype], (num_rows, *field.shape))
