"""Makes traces of npz files of chosen experts, as published with routing studies: one token a row, sequence after
sequence.

Arrays: `experts` [N, L, K] ids, `seq_len` [R] tokens of each sequence (adding up to N), and optionally `weights` [N, L,
K] and `token_index` [N]. Beside the file there may be `probs_u8.npz` with `probs_x255` [N, L, K] (the weights of the
chosen experts x 255) and `sequences.json`, a list with `category` and `prompt` of each sequence. Each sequence becomes
a request and each token one decode iteration.

Files are hostile input: nothing is unpickled or trusted.
"""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from expertly.core.errors import TraceError
from expertly.core.geometry import DenseShape
from expertly.core.untrusted import Bounds, read_as
from expertly_lab.trace.reader import TOKEN_VECTOR_SIZE
from expertly_lab.trace.schema import MAX_EXPERTS, TOKEN_VECTORS, Array, FieldInfo, TraceLayer, ValueChecks, trace_field
from expertly_lab.trace.writer import whole_trace

PROBS_NAME = "probs_u8.npz"
SEQUENCES_NAME = "sequences.json"

MAX_NBYTES = 4 << 30
"""Of an array, which is read whole."""

_BLOCK_ROWS = 8192
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError, NotImplementedError, RuntimeError),
    *(OverflowError, MemoryError, TypeError),
)
"""The errors of zipfile and NumPy for a file that is not what it should be (encryption, a method, a header)."""


@dataclass(frozen=True, slots=True)
class _Npz:
    """An npz file of which arrays are taken by name."""

    path: Path
    names: tuple[str, ...]

    @classmethod
    def open(cls, path: Path) -> _Npz:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise TraceError(f"{path}: must be an npz file")
        with _damage(str(path), "must be an npz file"), zipfile.ZipFile(path) as file:
            return cls(path, tuple(name.removesuffix(".npy") for name in file.namelist()))

    def where(self, name: str) -> str:
        return f"{self.path}: array {name!r}"

    def array(self, name: str, num_dimensions: int, kinds: str) -> Array:
        """An array with so many dimensions, of a dtype of one of `kinds` (NumPy's letters)."""
        beginning = self.where(name)
        if name not in self.names:
            has = ", ".join(map(repr, self.names)) or "no arrays"
            raise TraceError(f"{beginning}: missing; the file has {has}")
        with _damage(beginning, "damaged, or pickled objects, which are never loaded"):
            with zipfile.ZipFile(self.path) as file:
                nbytes = file.getinfo(f"{name}.npy").file_size
            if nbytes > MAX_NBYTES:
                raise TraceError(f"{beginning}: {nbytes} bytes; at most {MAX_NBYTES} are accepted")
            with np.load(self.path, allow_pickle=False) as arrays:
                values: Array = arrays[name]
        if values.dtype.kind not in kinds:
            accepted = " or ".join({"u": "unsigned", "i": "whole", "f": "floating-point"}[kind] for kind in kinds)
            raise TraceError(f"{beginning}: dtype {values.dtype}; must be {accepted} numbers")
        if values.ndim != num_dimensions:
            raise TraceError(f"{beginning}: shape {list(values.shape)}; must have {num_dimensions} dimensions")
        return values


@contextlib.contextmanager
def _damage(beginning: str, accepted: str) -> Iterator[None]:
    """Turns the errors of zipfile and NumPy on a damaged file into a TraceError."""
    try:
        yield
    except _DAMAGE as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TraceError(f"{beginning}: {accepted} ({reason:.200})") from None


class _Columns:
    """The arrays of rows that a source has. Raises TraceError where they do not fit each other."""

    def __init__(self, file: _Npz) -> None:
        self.file = file
        self.experts = experts = file.array("experts", 3, "ui")
        beside = file.path.parent / PROBS_NAME
        self.weights: Array | None = None
        weights_of, self.weights_scale = file.where("weights"), 1.0
        if "weights" in file.names:
            self.weights = file.array("weights", 3, "f")
        elif beside.is_file():
            probs = _Npz.open(beside)
            weights_of, self.weights_scale = probs.where("probs_x255"), 255.0
            self.weights = probs.array("probs_x255", 3, "u")
        self.tokens = file.array("token_index", 1, "ui") if "token_index" in file.names else None
        if 0 in experts.shape[1:]:
            beginning = file.where("experts")
            raise TraceError(f"{beginning}: shape {list(experts.shape)}; must be [tokens, layers, top-k]")
        for beginning, values, shape, whose in (
            (weights_of, self.weights, experts.shape, "as the experts'"),
            (file.where("token_index"), self.tokens, experts.shape[:1], "one a token"),
        ):
            if values is not None and values.shape != shape:
                raise TraceError(f"{beginning}: shape {list(values.shape)}; must be {list(shape)}, {whose}")
        if len(experts) and not (experts.min() >= 0 and experts.max() < MAX_EXPERTS):
            ids = f"ids from {experts.min()} to {experts.max()}"
            raise TraceError(f"{file.where('experts')}: {ids}; must be from 0 to {MAX_EXPERTS - 1}")
        if self.weights is not None and not (is_finite := np.isfinite(self.weights).all(axis=(1, 2))).all():
            raise TraceError(f"{weights_of}: row {int(np.argmin(is_finite))}: must be finite")
        if self.tokens is not None and not ((self.tokens >= 0) & (self.tokens < 1 << 31)).all():
            raise TraceError(f"{file.where('token_index')}: must be token ids, from 0 to {(1 << 31) - 1}")

    def blocks(self, checks: ValueChecks) -> Iterator[dict[str, Array]]:
        """Rows of a trace. Raises TraceError naming array and row of an impossible value."""
        for first in range(0, len(self.experts), _BLOCK_ROWS):
            rows = slice(first, first + _BLOCK_ROWS)
            experts = self.experts[rows].astype(np.uint16)
            if (problem := checks.problem("experts", experts, 0)) is not None:
                raise TraceError(f"{self.file.where('experts')}: row {first + problem[0]}: {problem[1]}")
            weights = np.full(experts.shape, 1 / experts.shape[2], np.float16)
            if self.weights is not None:
                weights = self.weights[rows].astype(np.float32) / np.float32(self.weights_scale)
            tokens = np.full(len(experts), -1, np.int32) if self.tokens is None else self.tokens[rows]
            is_prefill = np.zeros(len(experts), bool)
            yield {"experts": experts, "weights": weights, "token": tokens, "is_prefill": is_prefill}


def import_npz(
    source: Path,
    folder: Path,
    *,
    model: str,
    layers: tuple[TraceLayer, ...] | None = None,
    dense: DenseShape | None = None,
    **origin: str,
) -> None:
    """Write the trace of `source` to the new or empty `folder`, all of it or nothing. `layers` must fit what the source
    says; where they are not given, there are as many experts as the largest id + 1, rounded up to a power of two.
    `origin`: `created` and `command` of the trace. Raises TraceError naming what is wrong.
    """
    file = _Npz.open(source)
    columns = _Columns(file)
    num_rows, num_layers, top_k = columns.experts.shape
    is_guessed = layers is None
    if layers is None:
        largest = int(columns.experts.max()) if num_rows else 0
        guessed = min(max(1 << largest.bit_length(), top_k), MAX_EXPERTS)
        layers = (TraceLayer(guessed, top_k),) * num_layers
    else:
        _check_geometry(columns, layers)
    lengths = _sequence_lengths(file, num_rows)
    entries = _sequences(source.parent / SEQUENCES_NAME, len(lengths))
    fields = _fields(columns, layers, is_guessed)
    requests = np.repeat(np.arange(len(lengths)), lengths)
    with whole_trace(folder, model=model, layers=layers, fields=fields, dense=dense, **origin) as writer:
        for entry in entries:
            writer.begin_request(entry.category, entry.prompt)
        for rows in columns.blocks(ValueChecks(layers)):
            first, num = writer.num_rows, len(rows["experts"])
            writer.extend(rows | {"request": requests[first : first + num]}, np.ones(num, np.int64))


def _check_geometry(columns: _Columns, layers: Sequence[TraceLayer]) -> None:
    beginning, (_, num_layers, top_k) = columns.file.where("experts"), columns.experts.shape
    largest = max(layer.top_k for layer in layers)
    if len(layers) != num_layers:
        raise TraceError(f"{beginning}: {num_layers} layers, but the geometry has {len(layers)}")
    if largest != top_k:
        raise TraceError(f"{beginning}: top-{top_k} routing, but the geometry chooses {largest}")


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


def _sequence_lengths(file: _Npz, num_rows: int) -> npt.NDArray[np.int64]:
    lengths, beginning = file.array("seq_len", 1, "ui"), file.where("seq_len")
    if len(lengths) and lengths.min() < 0:
        raise TraceError(f"{beginning}: {lengths.min()}: must be from 0")
    if (total := sum(lengths.tolist())) != num_rows:
        raise TraceError(f"{beginning}: the lengths add up to {total}, but there are {num_rows} tokens")
    return lengths.astype(np.int64)


@dataclass(frozen=True, slots=True)
class _SequenceEntry:
    category: str | None = None
    prompt: str | None = None


def _sequences(path: Path, num_sequences: int) -> tuple[_SequenceEntry, ...]:
    if not path.is_file():
        return (_SequenceEntry(),) * num_sequences
    entries: tuple[_SequenceEntry, ...] = read_as(tuple[_SequenceEntry, ...], path, TraceError, bounds=Bounds(1 << 30))
    if len(entries) != num_sequences:
        raise TraceError(f"{path}: {len(entries)}; must be a list of {num_sequences} objects, one a sequence")
    return entries
