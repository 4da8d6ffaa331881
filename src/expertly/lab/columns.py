"""Arrays that hold the rows of one forward pass, and of the next, and grow when one has more rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.trace.schema import NO_EXPERT, FieldInfo

Array = npt.NDArray[Any]


class Columns:
    """A blank [T, ...] array of a trace's field for each pass, in memory that is used again."""

    def __init__(self, fields: Iterable[FieldInfo]) -> None:
        self._arrays: dict[str, Array] = {field.name: np.empty((0, *field.shape), field.dtype) for field in fields}

    def blank(self, name: str, num_rows: int) -> Array:
        """Zeros, or NO_EXPERT in `experts`; good until the next call for the same field."""
        array = self._arrays[name]
        if len(array) < num_rows:
            array = self._arrays[name] = np.empty((num_rows, *array.shape[1:]), array.dtype)
        rows = array[:num_rows]
        rows.fill(NO_EXPERT if name == "experts" else 0)
        return rows
