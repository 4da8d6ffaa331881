"""Makes traces of npz files of chosen experts, as published with routing studies: one token a row, sequence after
sequence.

Arrays: `experts` [N, L, K] ids, `seq_len` [R] tokens of each sequence (adding up to N), and optionally `weights` [N, L,
K] and `token_index` [N]. Beside the file there may be `probs_u8.npz` with `probs_x255` [N, L, K] (the weights of the
chosen experts x 255) and `sequences.json`, a list with `category` and `prompt` of each sequence. Each sequence becomes
a request and each token one decode iteration.

Arrays are read a block of rows at a time and as hostile input: nothing is unpickled or trusted.
"""

from __future__ import annotations

import contextlib
import json
import math
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import TraceError
from expertly.core.geometry import DenseShape
from expertly.trace.reader import TOKEN_VECTOR_SIZE
from expertly.trace.schema import MAX_EXPERTS, TOKEN_VECTORS, Array, FieldInfo, TraceLayer, ValueChecks, trace_field
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
    KeyError,
    NotImplementedError,
    RuntimeError,
    OverflowError,
)
"""The errors of zipfile and NumPy for a file that is not what it should be (encryption, a method, a header)."""


@contextlib.contextmanager
def _damage(where: str, accepted: str = "damaged, or pickled objects, which are never loaded") -> Iterator[None]:
    """Turns the errors of zipfile and NumPy on a damaged file into a TraceError."""
    try:
        yield
    except _DAMAGE as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TraceError(f"{where}: {accepted} ({reason:.200})") from None


class ArrayStream:
    """One array of a dtype of one of `kinds` (NumPy's letters), read from its first row to its last, once."""

    def __init__(self, where: str, file: IO[bytes], nbytes: int, kinds: str) -> None:
        self.where = where
        self._file = file
        with _damage(where):
            version = np.lib.format.read_magic(file)
            if version == (1, 0):
                self.shape, is_fortran, self.dtype = np.lib.format.read_array_header_1_0(file)
            elif version == (2, 0):
                self.shape, is_fortran, self.dtype = np.lib.format.read_array_header_2_0(file)
            else:
                raise TraceError(f"{where}: npy version {version}; accepted: 1.0, 2.0")
            header_nbytes = file.tell()
        self.num_rows = self.shape[0] if self.shape else 0
        if self.dtype.kind not in kinds:
            accepted = " or ".join({"u": "unsigned", "i": "whole", "f": "floating-point"}[kind] for kind in kinds)
            raise TraceError(f"{where}: dtype {self.dtype}; must be {accepted} numbers")
        if is_fortran and len(self.shape) > 1:
            raise TraceError(f"{where}: stored column by column (Fortran order); store it in C order")
        needed = math.prod(self.shape) * self.dtype.itemsize
        if min(self.shape, default=0) < 0 or header_nbytes + needed != nbytes:
            raise TraceError(
                f"{where}: {nbytes - header_nbytes} bytes, but {list(self.shape)} of {self.dtype} needs {needed}"
            )

    def read(self, num_rows: int) -> Array:
        """The next rows, all of them."""
        nbytes = num_rows * math.prod(self.shape[1:]) * self.dtype.itemsize
        with _damage(self.where):
            data = self._file.read(nbytes)
        if len(data) != nbytes:
            raise TraceError(f"{self.where}: truncated")
        return np.frombuffer(data, self.dtype).reshape(num_rows, *self.shape[1:])

    def blocks(self) -> Iterator[Array]:
        """All rows, some at a time."""
        for start in range(0, self.num_rows, _BLOCK_ROWS):
            yield self.read(min(_BLOCK_ROWS, self.num_rows - start))


def _open_npz(path: Path) -> zipfile.ZipFile:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise TraceError(f"{path}: must be an npz file")
    with _damage(str(path), "must be an npz file"):
        return zipfile.ZipFile(path)


def _open_array(file: zipfile.ZipFile, name: str, num_dimensions: int, kinds: str) -> ArrayStream:
    """An array, which must have so many dimensions; see ArrayStream."""
    where = f"{file.filename}: array {name!r}"
    names = [one.removesuffix(".npy") for one in file.namelist()]
    if name not in names:
        raise TraceError(f"{where}: missing; the file has {', '.join(map(repr, names)) or 'no arrays'}")
    with _damage(where):
        stream = ArrayStream(where, file.open(f"{name}.npy"), file.getinfo(f"{name}.npy").file_size, kinds)
    if len(stream.shape) != num_dimensions:
        raise TraceError(f"{where}: shape {list(stream.shape)}; must have {num_dimensions} dimensions")
    return stream


class _Columns:
    """The arrays of rows that a source has. Raises TraceError where they do not fit each other."""

    def __init__(self, file: zipfile.ZipFile, beside: zipfile.ZipFile | None) -> None:
        names = file.namelist()
        self.experts = experts = _open_array(file, "experts", 3, "ui")
        self.weights, self.weights_scale = None, 1.0
        if "weights.npy" in names:
            self.weights = _open_array(file, "weights", 3, "f")
        elif beside is not None:
            self.weights, self.weights_scale = _open_array(beside, "probs_x255", 3, "u"), 255.0
        self.tokens = _open_array(file, "token_index", 1, "ui") if "token_index.npy" in names else None
        if 0 in experts.shape[1:]:
            raise TraceError(f"{experts.where}: shape {list(experts.shape)}; must be [tokens, layers, top-k]")
        for stream, shape, whose in (
            (self.weights, experts.shape, "as the experts'"),
            (self.tokens, experts.shape[:1], "one a token"),
        ):
            if stream is not None and stream.shape != shape:
                raise TraceError(f"{stream.where}: shape {list(stream.shape)}; must be {list(shape)}, {whose}")

    def blocks(self, checks: ValueChecks) -> Iterator[dict[str, Array]]:
        """Rows of a trace. Raises TraceError naming array and row of an impossible value."""
        first = 0
        for ids in self.experts.blocks():
            num_rows = len(ids)
            _check_ids(self.experts, ids)
            experts = ids.astype(np.uint16)
            if (problem := checks.problem("experts", experts, 0)) is not None:
                raise TraceError(f"{self.experts.where}: row {first + problem[0]}: {problem[1]}")
            weights = np.full(experts.shape, 1 / experts.shape[2], np.float16)
            if self.weights is not None:
                weights = self.weights.read(num_rows).astype(np.float32) / np.float32(self.weights_scale)
                is_finite = np.isfinite(weights).all(axis=(1, 2))
                if not is_finite.all():
                    raise TraceError(f"{self.weights.where}: row {first + int(np.argmin(is_finite))}: must be finite")
            tokens = np.full(num_rows, -1, np.int32)
            if self.tokens is not None:
                tokens = self.tokens.read(num_rows)
                if not ((tokens >= 0) & (tokens < 1 << 31)).all():
                    raise TraceError(f"{self.tokens.where}: must be token ids, from 0 to {(1 << 31) - 1}")
            yield {"experts": experts, "weights": weights, "token": tokens, "is_prefill": np.zeros(num_rows, bool)}
            first += num_rows


def import_npz(
    source: Path,
    folder: Path,
    *,
    model: str,
    layers: tuple[TraceLayer, ...] | None = None,
    dense: DenseShape | None = None,
    num_experts: int | None = None,
    **origin: str,
) -> None:
    """Write the trace of `source` to the new or empty `folder`, all of it or nothing. `layers` must fit what the source
    says; where neither they nor `num_experts` are given, it is the largest id + 1, rounded up to a power of two.
    `origin`: `created` and `command` of the trace. Raises TraceError naming what is wrong.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_open_npz(source))
        beside = source.parent / PROBS_NAME
        columns = _Columns(file, stack.enter_context(_open_npz(beside)) if beside.is_file() else None)
        num_rows, num_layers, top_k = columns.experts.shape
        is_guessed = layers is None and num_experts is None
        if layers is None:
            layers = (TraceLayer(num_experts or _guess_num_experts(source), top_k),) * num_layers
        else:
            _check_geometry(columns.experts, layers, num_experts)
        lengths = _sequence_lengths(file, num_rows)
        entries = _sequences(source.parent / SEQUENCES_NAME, len(lengths))
        fields = _fields(columns, layers, is_guessed)
        writer = stack.enter_context(
            whole_trace(folder, model=model, layers=layers, fields=fields, dense=dense, **origin)
        )
        for entry in entries:
            writer.begin_request(entry.get("category"), entry.get("prompt"))
        requests = np.repeat(np.arange(len(lengths)), lengths)
        for rows in columns.blocks(ValueChecks(layers)):
            first, num = writer.num_rows, len(rows["experts"])
            writer.extend(rows | {"request": requests[first : first + num]}, np.ones(num, np.int64))


def _check_geometry(experts: ArrayStream, layers: Sequence[TraceLayer], num_experts: int | None) -> None:
    _, num_layers, top_k = experts.shape
    largest = max(layer.top_k for layer in layers)
    if len(layers) != num_layers:
        raise TraceError(f"{experts.where}: {num_layers} layers, but the geometry has {len(layers)}")
    if largest != top_k:
        raise TraceError(f"{experts.where}: top-{top_k} routing, but the geometry chooses {largest}")
    for layer in layers:
        if num_experts not in (None, layer.num_experts):
            raise TraceError(f"num_experts={num_experts}: but the geometry has {layer.num_experts}")


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
    with _open_npz(source) as file:
        experts = _open_array(file, "experts", 3, "ui")
        largest = max((_check_ids(experts, ids) for ids in experts.blocks()), default=0)
    return min(max(1 << largest.bit_length(), experts.shape[2]), MAX_EXPERTS)


def _check_ids(experts: ArrayStream, ids: Array) -> int:
    """Returns the largest id. Raises TraceError where one cannot be an expert's."""
    least, largest = int(ids.min()), int(ids.max())
    if least < 0 or largest >= MAX_EXPERTS:
        raise TraceError(f"{experts.where}: ids from {least} to {largest}; must be from 0 to {MAX_EXPERTS - 1}")
    return largest


def _sequence_lengths(file: zipfile.ZipFile, num_rows: int) -> npt.NDArray[np.int64]:
    stream = _open_array(file, "seq_len", 1, "ui")
    if (nbytes := stream.num_rows * stream.dtype.itemsize) > _MAX_WHOLE_NBYTES:
        raise TraceError(f"{stream.where}: {nbytes} bytes; at most {_MAX_WHOLE_NBYTES} are accepted")
    lengths = stream.read(stream.num_rows)
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
