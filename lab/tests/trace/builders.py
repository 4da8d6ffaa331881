"""Small traces of known rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly_lab.trace.reader import Trace
from expertly_lab.trace.schema import NO_EXPERT, FieldInfo, TraceLayer, trace_field
from expertly_lab.trace.writer import TraceWriter

LAYERS = (TraceLayer(8, 2), TraceLayer(6, 3), TraceLayer(8, 3))
FULL = (
    trace_field("probs", LAYERS),
    trace_field("embedding", LAYERS, hidden_size=5),
    trace_field("router_inputs", LAYERS, hidden_size=5),
    trace_field("lookahead", LAYERS, max_distance=2),
)

Rows = dict[str, npt.NDArray[Any]]


def random_rows(num_rows: int, seed: int, fields: Sequence[FieldInfo] = ()) -> Rows:
    """One iteration of `LAYERS`; layer 0 chooses two of its three places, layer 1 now and then does not run."""
    rng = np.random.default_rng(seed)
    experts = np.full((num_rows, len(LAYERS), 3), NO_EXPERT, np.uint16)
    for index, layer in enumerate(LAYERS):
        order = np.argsort(rng.random((num_rows, layer.num_experts)), axis=1)
        experts[:, index, : layer.top_k] = order[:, : layer.top_k]
    experts[rng.random(num_rows) < 0.2, 1] = NO_EXPERT
    rows: Rows = {
        "token": rng.integers(0, 50_000, num_rows, np.int32),
        "is_prefill": np.full(num_rows, num_rows > 1),
        "experts": experts,
        "weights": np.where(experts == NO_EXPERT, 0, rng.random(experts.shape)).astype(np.float16),
    }
    return rows | {field.name: rng.random((num_rows, *field.shape)).astype(np.float16) for field in fields}


def iterations(sizes: Sequence[int], fields: Sequence[FieldInfo] = ()) -> list[Rows]:
    return [random_rows(size, seed, fields) for seed, size in enumerate(sizes)]


def open_writer(folder: Path, rows_per_shard: int = 8, fields: Sequence[FieldInfo] = ()) -> TraceWriter:
    return TraceWriter(folder, model="toy", layers=LAYERS, fields=fields, rows_per_shard=rows_per_shard)


def write_trace(folder: Path, rows: Sequence[Rows], rows_per_shard: int = 8, fields: Sequence[FieldInfo] = ()) -> Path:
    """One request whose iterations are `rows`."""
    with open_writer(folder, rows_per_shard, fields) as writer:
        writer.begin_request("test", "hello", 3)
        for row in rows:
            writer.append(row)
    return folder


def write_partial(
    folder: Path, rows: Sequence[Rows], rows_per_shard: int = 8, fields: Sequence[FieldInfo] = ()
) -> Path:
    """The same, of a recording that is interrupted after them."""
    with contextlib.suppress(KeyboardInterrupt), open_writer(folder, rows_per_shard, fields) as writer:
        writer.begin_request("code", "hello", 3)
        for row in rows:
            writer.append(row)
        raise KeyboardInterrupt
    return folder


def joined(rows: Sequence[Rows]) -> Rows:
    """All rows, with the fields that the writer adds."""
    sizes = [len(row["token"]) for row in rows]
    columns = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    return columns | {"iteration": np.repeat(np.arange(len(rows)), sizes)}


def assert_holds(trace: Trace, rows: Sequence[Rows]) -> None:
    """The trace is exactly these iterations."""
    assert trace.num_iterations == len(rows)
    assert trace.num_rows == sum(len(row["token"]) for row in rows)
    for name, expected in joined(rows).items() if rows else ():
        actual = trace.rows(name, 0, trace.num_rows)
        np.testing.assert_array_equal(actual, expected, err_msg=name)


def read_everything(trace: Trace) -> Iterator[Mapping[str, npt.NDArray[Any]]]:
    """What a program would read: the requests, then all fields."""
    assert len(trace.requests) >= 0
    for block in trace.blocks(list(trace.manifest.fields), max_rows=7):
        yield block.columns
