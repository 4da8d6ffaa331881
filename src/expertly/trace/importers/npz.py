"""npz files of chosen experts, as published with routing studies: one token a row, sequence after sequence.

Arrays: `experts` [N, L, K] ids, `seq_len` [R] tokens of each sequence (adding up to N), and where there are any
`weights` [N, L, K] and `token_index` [N]. Beside the file may lie `probs_u8.npz` with `probs_x255` [N, L, K] (the
weights of the chosen experts x 255) and `sequences.json`, a list with `category` and `prompt` of each sequence. Each
sequence becomes a request and each token one decode iteration.

Arrays are read a block of rows at a time and as hostile input: nothing is unpickled or believed.
"""

from __future__ import annotations

import contextlib
import json
import math
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import TraceError
from expertly.trace.importers.base import ImportOptions
from expertly.trace.reader import TOKEN_VECTOR_SIZE
from expertly.trace.schema import (
    MAX_EXPERTS,
    TOKEN_VECTORS,
    Array,
    FieldInfo,
    TraceLayer,
    ValueChecks,
    trace_field,
)
from expertly.trace.writer import whole_trace

PROBS_NAME = "probs_u8.npz"
SEQUENCES_NAME = "sequences.json"

_BLOCK_ROWS = 8192
_MAX_WHOLE_NBYTES = 1 << 28
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    OSError,
    ValueError,
    NotImplementedError,
    RuntimeError,
    OverflowError,
)
"""What zipfile and NumPy raise for a file that is not what it should be (a lock, a method, a header)."""


class ArrayStream:
    """One array, read from its first row to its last, once."""

    def __init__(self, where: str, file: IO[bytes], nbytes: int) -> None:
        self.where = where
        self._file = file
        with _damage(where):
            version = np.lib.format.read_magic(file)
            if version not in ((1, 0), (2, 0)):
                raise TraceError(f"{where}: npy version {version}; accepted: 1.0, 2.0")
            read_header = (
                np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            )
            self.shape, is_fortran, self.dtype = read_header(file)
            self.num_rows = self.shape[0] if self.shape else 0
            header_nbytes = file.tell()
        if self.dtype.kind not in "biuf":
            raise TraceError(f"{where}: dtype {self.dtype}; must be numbers")
        if is_fortran and len(self.shape) > 1:
            raise TraceError(f"{where}: stored column by column (Fortran order); store it in C order")
        needed = math.prod(self.shape) * self.dtype.itemsize
        if min(self.shape, default=0) < 0 or header_nbytes + needed != nbytes:
            raise TraceError(
                f"{where}: {nbytes - header_nbytes} bytes, but {list(self.shape)} of {self.dtype} needs {needed}"
            )
        self._row_nbytes = math.prod(self.shape[1:]) * self.dtype.itemsize

    def read(self, num_rows: int) -> Array:
        """The next rows, fewer at the end."""
        nbytes = num_rows * self._row_nbytes
        with _damage(self.where):
            data = self._file.read(nbytes)
        if self._row_nbytes == 0 or len(data) % self._row_nbytes:
            raise TraceError(f"{self.where}: truncated")
        return np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:])

    def read_all(self) -> Array:
        if self.num_rows * self._row_nbytes > _MAX_WHOLE_NBYTES:
            raise TraceError(
                f"{self.where}: {self.num_rows * self._row_nbytes} bytes; at most {_MAX_WHOLE_NBYTES} are accepted"
            )
        values = self.read(self.num_rows) if self.num_rows else np.empty(self.shape, self.dtype)
        if len(values) != self.num_rows:
            raise TraceError(f"{self.where}: truncated")
        return values


class ArrayFile(contextlib.AbstractContextManager["ArrayFile"]):
    """An npz file. Raises TraceError naming the file, and the array where it is about one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = contextlib.ExitStack()
        with _damage(str(path), "must be an npz file"):
            self._zip = self._stack.enter_context(zipfile.ZipFile(path))
        self.names = [name.removesuffix(".npy") for name in self._zip.namelist()]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def open(self, name: str, num_dimensions: int, kinds: str) -> ArrayStream:
        """An array that must have that many dimensions and a dtype of one of `kinds` (NumPy's letters)."""
        where = f"{self.path}: array {name!r}"
        if name not in self.names:
            raise TraceError(f"{where}: missing; the file has {', '.join(map(repr, self.names)) or 'no arrays'}")
        with _damage(where):
            info = self._zip.getinfo(f"{name}.npy")
            stream = ArrayStream(where, self._stack.enter_context(self._zip.open(info)), info.file_size)
        if len(stream.shape) != num_dimensions:
            raise TraceError(f"{where}: shape {list(stream.shape)}; must have {num_dimensions} dimensions")
        if stream.dtype.kind not in kinds:
            accepted = " or ".join({"u": "unsigned", "i": "whole", "f": "floating-point"}[kind] for kind in kinds)
            raise TraceError(f"{where}: dtype {stream.dtype}; must be {accepted} numbers")
        return stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


@contextlib.contextmanager
def _damage(where: str, accepted: str = "damaged, or pickled objects, which are never loaded") -> Iterator[None]:
    """Turn what a damaged file makes zipfile and NumPy raise into a TraceError."""
    try:
        yield
    except KeyError:
        raise TraceError(f"{where}: {accepted}") from None
    except _DAMAGE as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TraceError(f"{where}: {accepted} ({reason:.200})") from None


@dataclass(frozen=True, slots=True)
class _Columns:
    """The streams of rows that a source has."""

    experts: ArrayStream
    weights: ArrayStream | None
    weights_scale: float
    tokens: ArrayStream | None

    def blocks(self) -> Iterator[dict[str, Array]]:
        num_rows, shape = self.experts.num_rows, self.experts.shape[1:]
        for start in range(0, num_rows, _BLOCK_ROWS):
            count = min(_BLOCK_ROWS, num_rows - start)
            weights = np.full((count, *shape), 1 / shape[1], np.float16)
            if self.weights is not None:
                weights = _exactly(self.weights, count).astype(np.float32) / np.float32(self.weights_scale)
            tokens = np.full(count, -1, np.int32) if self.tokens is None else _exactly(self.tokens, count)
            yield {"experts": _exactly(self.experts, count), "weights": weights, "token": tokens}


def import_npz(source: Path, folder: Path, options: ImportOptions) -> None:
    """Where `options` say no number of experts it is the largest id + 1, rounded up to a power of two."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(ArrayFile(source))
        columns = _open_columns(file, stack)
        where = columns.experts.where
        _, num_layers, top_k = columns.experts.shape
        is_guessed = options.layers is None and options.num_experts is None
        guess = _guess_num_experts(source) if is_guessed else 0
        layers = options.layers_of(where, num_layers, top_k, guess)
        lengths = _sequence_lengths(file, columns.experts.num_rows)
        entries = _sequences(source.parent / SEQUENCES_NAME, len(lengths))
        writer = stack.enter_context(
            whole_trace(
                folder,
                model=options.model,
                layers=layers,
                fields=_fields(columns, layers, is_guessed),
                dense=options.dense,
                created=options.created,
                command=options.command,
            )
        )
        for entry in entries:
            writer.begin_request(entry.get("category"), entry.get("prompt"))
        ends = np.cumsum(lengths)
        checks = ValueChecks(layers)
        for rows in columns.blocks():
            first, count = writer.num_rows, len(rows["experts"])
            _check_block(columns, rows, checks, first)
            request = np.searchsorted(ends, np.arange(first, first + count), "right")
            writer.extend({**rows, "request": request, "is_prefill": np.zeros(count, bool)}, np.ones(count, np.int64))


def _open_columns(file: ArrayFile, stack: contextlib.ExitStack) -> _Columns:
    experts = file.open("experts", 3, "ui")
    if 0 in experts.shape[1:]:
        raise TraceError(f"{experts.where}: shape {list(experts.shape)}; must be [tokens, layers, top-k]")
    weights, scale = None, 1.0
    beside = file.path.parent / PROBS_NAME
    if "weights" in file:
        weights = file.open("weights", 3, "f")
    elif beside.is_file():
        weights, scale = stack.enter_context(ArrayFile(beside)).open("probs_x255", 3, "u"), 255.0
    tokens = file.open("token_index", 1, "ui") if "token_index" in file else None
    if weights is not None and weights.shape != experts.shape:
        raise TraceError(
            f"{weights.where}: shape {list(weights.shape)}; must be {list(experts.shape)}, as the experts'"
        )
    if tokens is not None and tokens.num_rows != experts.num_rows:
        raise TraceError(f"{tokens.where}: shape {list(tokens.shape)}; must be [{experts.num_rows}], one a token")
    return _Columns(experts, weights, scale, tokens)


def _fields(columns: _Columns, layers: tuple[TraceLayer, ...], is_guessed: bool) -> list[FieldInfo]:
    guessed = "number of experts not known: the largest id + 1, rounded up to a power of two"
    phases = "not recorded: each token stands for a decode step"
    if columns.weights is None:
        weights = trace_field("weights", layers, is_real=False, note="not recorded: all equal")
    else:
        weights = trace_field("weights", layers, note="rounded to 1/255" if columns.weights_scale != 1 else "")
    fields = [
        trace_field("experts", layers, note=guessed if is_guessed else ""),
        weights,
        trace_field("is_prefill", layers, is_real=False, note=phases),
    ]
    if columns.tokens is None:
        return [*fields, trace_field("token", layers, is_real=False, note="not recorded: -1")]
    embedding = trace_field(
        "embedding",
        layers,
        hidden_size=TOKEN_VECTOR_SIZE,
        is_real=False,
        note="not recorded: a fixed random vector for each token id",
        generator=TOKEN_VECTORS,
    )
    return [*fields, trace_field("token", layers, note="numbered by the source"), embedding]


def _guess_num_experts(source: Path) -> int:
    largest = 0
    with ArrayFile(source) as file:
        experts = file.open("experts", 3, "ui")
        while len(block := experts.read(_BLOCK_ROWS)):
            if block.min() < 0 or block.max() >= MAX_EXPERTS:
                raise TraceError(
                    f"{experts.where}: ids from {block.min()} to {block.max()}; must be from 0 to {MAX_EXPERTS - 1}"
                )
            largest = max(largest, int(block.max()))
    return min(max(1 << largest.bit_length(), experts.shape[2]), MAX_EXPERTS)


def _sequence_lengths(file: ArrayFile, num_rows: int) -> npt.NDArray[np.int64]:
    stream = file.open("seq_len", 1, "ui")
    lengths = stream.read_all()
    total = sum(lengths.tolist())
    if len(lengths) and lengths.min() < 0:
        raise TraceError(f"{stream.where}: {lengths.min()}: must be from 0")
    if total != num_rows:
        raise TraceError(f"{stream.where}: the lengths add up to {total}, but there are {num_rows} tokens")
    return lengths.astype(np.int64)


def _sequences(path: Path, num_sequences: int) -> list[dict[str, Any]]:
    if not path.is_file():
        return [{}] * num_sequences
    try:
        entries = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not JSON ({error})") from None
    if not isinstance(entries, list) or len(entries) != num_sequences:
        found = len(entries) if isinstance(entries, list) else type(entries).__name__
        raise TraceError(f"{path}: {found}; must be a list of {num_sequences} objects, one a sequence")
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise TraceError(f"{path}: [{index}]={entry!r:.80}: must be an object")
        for name in ("category", "prompt"):
            if not isinstance(entry.get(name), str | None):
                raise TraceError(f"{path}: [{index}].{name}={entry[name]!r:.80}: must be a string or null")
    return entries


def _check_block(columns: _Columns, rows: dict[str, Array], checks: ValueChecks, first: int) -> None:
    experts = rows["experts"]
    where = columns.experts.where
    is_wrong = (experts < 0) | (experts >= MAX_EXPERTS)
    if is_wrong.any():
        row = first + int(np.argmax(is_wrong.any(axis=(1, 2))))
        raise TraceError(f"{where}: row {row}: ids must be from 0 to {MAX_EXPERTS - 1}")
    rows["experts"] = experts = experts.astype(np.uint16)
    problem = checks.problem("experts", experts, 0)
    if problem is not None:
        raise TraceError(f"{where}: row {first + problem[0]}: {problem[1]}")
    if columns.weights is not None and not np.isfinite(rows["weights"]).all():
        row = first + int(np.argmin(np.isfinite(rows["weights"]).all(axis=(1, 2))))
        raise TraceError(f"{columns.weights.where}: row {row}: must be finite")
    if columns.tokens is not None and not ((rows["token"] >= 0) & (rows["token"] < 1 << 31)).all():
        raise TraceError(f"{columns.tokens.where}: must be token ids, from 0 to {(1 << 31) - 1}")


def _exactly(stream: ArrayStream, num_rows: int) -> Array:
    values = stream.read(num_rows)
    if len(values) != num_rows:
        raise TraceError(f"{stream.where}: truncated")
    return values
