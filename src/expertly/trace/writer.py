"""Writing a trace: appended an iteration at a time, readable up to the last complete one whenever it stops."""

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
from expertly.core.files import create, disk_errors, remove_folder
from expertly.core.geometry import DenseShape
from expertly.trace.manifest import write_manifest
from expertly.trace.schema import (
    DTYPES,
    MANIFEST_NAME,
    REQUESTS_NAME,
    REQUIRED,
    SCORINGS,
    Array,
    FieldInfo,
    ShardInfo,
    TraceLayer,
    TraceManifest,
    ValueChecks,
    check_layers,
    trace_field,
)
from expertly.trace.shards import ROWS_LEFT, TAIL_NAME, read_tail, record_dtype, shard_name, write_shard

_NAMES = re.compile(
    rf"{re.escape(MANIFEST_NAME)}|{re.escape(REQUESTS_NAME)}|rows-\d{{5,}}\.safetensors|tail\.bin|\..*\.tmp"
)

SHARD_NBYTES = 256 << 20
"""A shard of wide rows has fewer of them than `rows_per_shard`, so that it stays below this."""

_FLOAT16_MAX = 65504.0


class TraceWriter(contextlib.AbstractContextManager["TraceWriter"]):
    """Writes a trace to `folder`, which must be new or empty.

    `fields`: the optional fields to record, and those of every trace that need a note or are not real (see
    `trace_field`). Rows are in the file system when `append` returns: a process that is killed loses nothing; a machine
    that loses power keeps what is in shards. As a context manager: an exception leaves an incomplete trace with
    everything appended. Raises TraceError where the folder is in use or cannot be written to, or where a field's rows
    are not what they must be.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str,
        layers: Sequence[TraceLayer],
        fields: Iterable[FieldInfo] = (),
        dense: DenseShape | None = None,
        scoring: str = "unknown",
        created: str = "",
        command: str = "",
        rows_per_shard: int = 8192,
    ) -> None:
        check_layers(layers)
        if scoring not in SCORINGS:
            raise TraceError(f"scoring={scoring!r}: accepted: {', '.join(SCORINGS)}")
        given = {field.name: field for field in fields}
        known = {name: given.get(name) or trace_field(name, layers) for name in (*REQUIRED, *given)}
        ordered = {name: known[name] for name in DTYPES if name in known}
        self._manifest = TraceManifest(model, tuple(layers), ordered, dense, scoring, created, command)
        self._stored = self._manifest.stored_fields
        self._dtype = record_dtype(self._stored)
        self._checks = ValueChecks(layers)
        self._rows_per_shard = max(1, min(rows_per_shard, SHARD_NBYTES // self._dtype.itemsize))
        self._folder = folder
        self._num_requests = self.num_rows = self.num_iterations = 0  # so far
        self._tail = self._requests = -1
        with self._disk_errors("making the trace"):
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise TraceError(f"{folder}: not empty; a trace is written to a new or an empty folder")
            folder.mkdir(parents=True, exist_ok=True)
            self._requests = _open_appending(folder / REQUESTS_NAME)
            self._start_tail()
            write_manifest(folder, self._manifest)

    def begin_request(self, category: str | None = None, prompt: str | None = None, num_prompt_tokens: int = 0) -> int:
        """Announce a request before its first row, and return its number: 0, 1, 2, ..."""
        number = self._num_requests
        entry = {"request": number, "category": category, "prompt": prompt, "num_prompt_tokens": num_prompt_tokens}
        with self._disk_errors("writing the requests"):
            _write_all(self._requests, (json.dumps(entry) + "\n").encode())
        self._num_requests += 1
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
        records = self._records(rows, int(stops[-1]) if len(stops) else 0)
        records["iteration"] = np.repeat(np.arange(len(sizes)) + self.num_iterations, sizes)
        records[ROWS_LEFT] = np.repeat(stops, sizes) - 1 - np.arange(len(records))
        start = done = 0
        while start < len(records):
            room = self._rows_per_shard - (self.num_rows - self._manifest.num_rows)
            last = min(int(np.searchsorted(stops, start + room)), len(sizes) - 1)  # an iteration is never split
            stop = int(stops[last])
            with self._disk_errors("appending to the tail"):
                _write_all(self._tail, records[start:stop].view(np.uint8).data)
            self.num_rows += stop - start
            self.num_iterations += last + 1 - done
            start, done = stop, last + 1
            if self.num_rows - self._manifest.num_rows >= self._rows_per_shard:
                self._finish_shard()

    def close(self) -> None:
        """Finish the trace. Idempotent."""
        if self._tail < 0:
            return
        self._finish_shard()
        self._manifest = dataclasses.replace(self._manifest, is_complete=True)
        with self._disk_errors("finishing the trace"):
            os.fsync(self._requests)
            write_manifest(self._folder, self._manifest)
            (self._folder / TAIL_NAME).unlink()
        self._release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        self._release()

    def _records(self, rows: Mapping[str, npt.ArrayLike], num_rows: int) -> npt.NDArray[Any]:
        names = [field.name for field in self._stored if field.name != "iteration"]
        unknown = [name for name in rows if name not in names]
        if unknown:
            raise TraceError(f"field {unknown[0]!r:.80}: not among the declared {', '.join(names)}")
        records = np.zeros(num_rows, self._dtype)
        rows = {"request": np.full(num_rows, self._num_requests - 1, np.int32)} | dict(rows)
        for field in self._stored:
            if field.name == "iteration":
                continue
            if field.name not in rows:
                raise TraceError(f"field {field.name!r}: missing from the rows; it was declared")
            values = _converted(field, np.asarray(rows[field.name]), num_rows)
            problem = self._checks.problem(field.name, values, self._num_requests)
            if problem is not None:
                raise TraceError(f"field {field.name!r}: row {self.num_rows + problem[0]}: {problem[1]}")
            records[field.name] = values
        return records

    def _finish_shard(self) -> None:
        """Turn the tail's rows into a shard. After a crash between any two steps the trace opens with the same rows."""
        first = self._manifest
        name = shard_name(len(first.shards))
        with self._disk_errors(f"writing {name}"):
            records = read_tail(self._folder, self._dtype, first.num_iterations)
            if len(records) == 0:
                return
            columns = {field.name: records[field.name] for field in self._stored}
            os.fsync(self._requests)
            nbytes = write_shard(self._folder / name, self._stored, columns)
            num_iterations = int(records["iteration"][-1]) + 1 - first.num_iterations
            shard = ShardInfo(name, len(records), nbytes, first.num_rows, first.num_iterations, num_iterations)
            self._manifest = dataclasses.replace(first, shards=(*first.shards, shard))
            write_manifest(self._folder, self._manifest)
            self._start_tail()

    def _start_tail(self) -> None:
        path = self._folder / TAIL_NAME
        temporary = path.with_name(f".{TAIL_NAME}.tmp")
        fd = _open_appending(temporary)
        temporary.replace(path)
        if self._tail >= 0:
            os.close(self._tail)
        self._tail = fd

    def _release(self) -> None:
        for fd in (self._tail, self._requests):
            if fd >= 0:
                os.close(fd)
        self._tail = self._requests = -1

    def _disk_errors(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return disk_errors(self._folder, doing, TraceError, "")


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
    """Delete the files of a trace, and the folder where nothing else is in it. Raises OSError, where the folder is a
    link, too.
    """
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


def _open_appending(path: Path) -> int:
    return create(path, os.O_APPEND)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`, or nothing of it where the disk is full."""
    before = os.fstat(fd).st_size
    left = memoryview(data).cast("B")
    try:
        while left:
            left = left[os.write(fd, left) :]
    except BaseException:
        os.ftruncate(fd, before)
        raise
