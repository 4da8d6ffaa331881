"""Writing a trace: appended an iteration at a time, and on the disk a shard at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import TraceError
from expertly.core.files import disk_errors, remove_folder, write_atomic
from expertly.core.geometry import DenseShape
from expertly_lab.trace.manifest import write_manifest
from expertly_lab.trace.schema import (
    DTYPES,
    MANIFEST_NAME,
    REQUESTS_NAME,
    REQUIRED,
    Array,
    FieldInfo,
    ShardInfo,
    TraceLayer,
    TraceManifest,
    ValueChecks,
    trace_field,
)
from expertly_lab.trace.shards import write_shard

_NAMES = re.compile(rf"{re.escape(MANIFEST_NAME)}|{re.escape(REQUESTS_NAME)}|rows-\d{{5,}}\.safetensors|\..*\.tmp")

SHARD_NBYTES = 64 << 20
"""A shard of wide rows has fewer of them than `rows_per_shard`, so that it stays below this; so much is in memory."""

_FLOAT16_MAX = 65504.0


class TraceWriter(contextlib.AbstractContextManager["TraceWriter"]):
    """Writes a trace to `folder`, which must be new or empty.

    `fields`: the optional fields to record, and those of every trace that need a note or are not real (see
    `trace_field`). As a context manager: an exception leaves an incomplete trace with everything appended; a process
    that is killed leaves one that ends with its last shard. Raises TraceError where the folder is in use or cannot be
    written to, or where a field's rows are not what they must be.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str,
        layers: Sequence[TraceLayer],
        fields: Iterable[FieldInfo] = (),
        dense: DenseShape | None = None,
        created: str = "",
        command: str = "",
        rows_per_shard: int = 8192,
    ) -> None:
        named = {field.name: field for field in fields}
        known = {name: named.get(name) or trace_field(name, layers) for name in (*REQUIRED, *named)}
        ordered = {name: known[name] for name in DTYPES if name in known}
        self._manifest = TraceManifest(model, tuple(layers), ordered, dense, created, command)
        self._stored = self._manifest.stored_fields
        self._checks = ValueChecks(layers)
        row_nbytes = sum(np.dtype((field.dtype, field.shape)).itemsize for field in self._stored)
        self._rows_per_shard = max(1, min(rows_per_shard, SHARD_NBYTES // row_nbytes))
        self._folder = folder
        self._requests: list[str] = []  # a line each
        self._blocks: list[dict[str, Array]] = []  # rows of the next shard
        self.num_rows = self.num_iterations = 0  # so far
        self._is_open = True
        with disk_errors(folder, "making the trace", TraceError, ""):
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise TraceError(f"{folder}: not empty; a trace is written to a new or an empty folder")
            folder.mkdir(parents=True, exist_ok=True)
        self._save()

    def begin_request(self, category: str | None = None, prompt: str | None = None, num_prompt_tokens: int = 0) -> int:
        """Announce a request before its first row, and return its number: 0, 1, 2, ..."""
        number = len(self._requests)
        entry = {"request": number, "category": category, "prompt": prompt, "num_prompt_tokens": num_prompt_tokens}
        self._requests.append(json.dumps(entry) + "\n")
        return number

    def append(self, rows: Mapping[str, npt.ArrayLike]) -> None:
        """Add one iteration: every stored field but `iteration`, [T, ...]. No rows add no iteration.

        `request` may be left out where all rows belong to the request that began last.
        """
        num_rows = len(np.asarray(rows["experts"])) if "experts" in rows else 0
        self.extend(rows, [num_rows] if num_rows else [])

    def extend(self, rows: Mapping[str, npt.ArrayLike], rows_per_iteration: Sequence[int] | npt.NDArray[Any]) -> None:
        """Add many iterations at once: rows as in `append`, and how many of them each iteration has."""
        sizes = np.asarray(rows_per_iteration, np.int64)
        if (sizes < 1).any():
            raise TraceError("rows_per_iteration: every iteration must have at least one row")
        stops = np.cumsum(sizes)
        num_rows = int(stops[-1]) if len(stops) else 0
        columns = self._columns(rows, num_rows)
        columns["iteration"] = np.repeat(np.arange(len(sizes)) + self.num_iterations, sizes)
        start = done = 0
        while start < num_rows:
            room = self._rows_per_shard - (self.num_rows - self._manifest.num_rows)
            last = min(int(np.searchsorted(stops, start + room)), len(sizes) - 1)  # an iteration is never split
            stop = int(stops[last])
            self._blocks.append({name: values[start:stop].copy() for name, values in columns.items()})
            self.num_rows += stop - start
            self.num_iterations += last + 1 - done
            start, done = stop, last + 1
            if self.num_rows - self._manifest.num_rows >= self._rows_per_shard:
                self._save()

    def close(self, is_complete: bool = True) -> None:
        """Finish the trace. Idempotent."""
        if self._is_open:
            self._save(is_complete)
            self._is_open = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.nullcontext() if error is None else contextlib.suppress(TraceError):
            self.close(is_complete=error is None)

    def _columns(self, rows: Mapping[str, npt.ArrayLike], num_rows: int) -> dict[str, Array]:
        names = [field.name for field in self._stored if field.name != "iteration"]
        unknown = [name for name in rows if name not in names]
        if unknown:
            raise TraceError(f"field {unknown[0]!r:.80}: not among the declared {', '.join(names)}")
        columns = {}
        rows = {"request": np.full(num_rows, len(self._requests) - 1, np.int32)} | dict(rows)
        for name in names:
            if name not in rows:
                raise TraceError(f"field {name!r}: missing from the rows; it was declared")
            columns[name] = _converted(self._manifest.fields[name], np.asarray(rows[name]), num_rows)
            problem = self._checks.problem(name, columns[name], len(self._requests))
            if problem is not None:
                raise TraceError(f"field {name!r}: row {self.num_rows + problem[0]}: {problem[1]}")
        return columns

    def _save(self, is_complete: bool = False) -> None:
        """Write the requests, the rows that are in no shard yet, and the manifest that says so."""
        manifest = self._manifest
        with disk_errors(self._folder, "writing the trace", TraceError, ""):
            write_atomic(self._folder / REQUESTS_NAME, "".join(self._requests).encode())
            if self._blocks:
                name = f"rows-{len(manifest.shards):05d}.safetensors"
                nbytes = write_shard(self._folder / name, self._stored, self._blocks)
                nums = self.num_rows - manifest.num_rows, self.num_iterations - manifest.num_iterations
                shard = ShardInfo(name, nums[0], nbytes, manifest.num_rows, manifest.num_iterations, nums[1])
                manifest = dataclasses.replace(manifest, shards=(*manifest.shards, shard))
            manifest = dataclasses.replace(manifest, is_complete=is_complete)
            write_manifest(self._folder, manifest)
        self._manifest, self._blocks = manifest, []


@contextlib.contextmanager
def whole_trace(folder: Path, **arguments: Any) -> Iterator[TraceWriter]:
    """A TraceWriter with these arguments; its trace is removed if an exception comes before its end."""
    writer = TraceWriter(folder, **arguments)
    try:
        with writer:
            yield writer
    except BaseException:
        with contextlib.suppress(OSError):
            remove_trace(folder)
        raise


def remove_trace(folder: Path) -> None:
    """Delete a trace's files, and the folder if nothing else is in it. Raises OSError, also for a link."""
    if os.path.lexists(folder):
        remove_folder(folder, lambda name: _NAMES.fullmatch(name) is not None, last=MANIFEST_NAME)


def _converted(field: FieldInfo, values: Array, num_rows: int) -> Array:
    """`values` as the field's dtype: floats saturate, whole numbers must fit."""
    if values.shape != (num_rows, *field.shape):
        raise TraceError(f"field {field.name!r}: shape {list(values.shape)}; must be {[num_rows, *field.shape]}")
    dtype = np.dtype(field.dtype)
    if values.dtype == dtype:
        return values
    if dtype.kind == "f" and values.dtype.kind in "fiu":
        return np.clip(values, -_FLOAT16_MAX, _FLOAT16_MAX).astype(dtype)
    if dtype.kind in "iu" and values.dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if len(values) and not (limits.min <= values.min() and values.max() <= limits.max):
            raise TraceError(
                f"field {field.name!r}: values from {values.min()} to {values.max()}; {dtype} holds {limits.min} to "
                f"{limits.max}"
            )
        return values.astype(dtype)
    raise TraceError(f"field {field.name!r}: dtype {values.dtype}; must be {dtype}")
