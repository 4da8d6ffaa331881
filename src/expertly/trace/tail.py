"""The tail of a recording that is under way: fixed-size records, one a row, appended an iteration at a time.

A record is the row's stored fields and how many rows of its iteration follow it, so that a tail which ends anywhere
opens up to its last complete iteration. The writer never changes a tail, it starts a new file: who has the old one
mapped keeps its bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import TraceError
from expertly.trace.schema import FieldInfo

ROWS_LEFT = "rows_left"

Records = npt.NDArray[np.void]


def record_dtype(fields: Sequence[FieldInfo]) -> np.dtype[Any]:
    return np.dtype([*((field.name, field.dtype, field.shape) for field in fields), (ROWS_LEFT, "int32")])


def read_tail(path: Path, dtype: np.dtype[Any], next_iteration: int) -> Records:
    """The records of `path` that follow the shards, up to the last complete iteration; mapped, not read.

    Shards end before `next_iteration`. Records of earlier iterations are left over from a writer that was killed
    after it had made a shard of them. A tail that is not there is empty. Raises TraceError if it cannot be read.
    """
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
    """How many records, from the first, make up iterations that count up from `next_iteration` and are complete."""
    if len(iterations) == 0 or iterations[0] != next_iteration:
        return 0
    left = rows_left.astype(np.int64)
    is_next = (iterations[1:] == iterations[:-1]) & (left[1:] == left[:-1] - 1) & (left[:-1] > 0)
    is_next |= (iterations[1:] == iterations[:-1] + 1) & (left[:-1] == 0) & (left[1:] >= 0)
    num_sound = len(left) if is_next.all() else int(np.argmin(is_next)) + 1
    ends = np.flatnonzero(left[:num_sound] == 0)
    return int(ends[-1]) + 1 if len(ends) else 0
