"""What is written is read back, in whatever spans."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from expertly.core.errors import TraceError
from expertly.core.geometry import DenseShape, LayerGeometry
from expertly_lab.trace.reader import Trace, token_vectors
from expertly_lab.trace.schema import TOKEN_VECTORS, TraceLayer, trace_field
from expertly_lab.trace.writer import TraceWriter
from lab.tests.trace.builders import FULL, LAYERS, assert_holds, iterations, joined, open_writer, write_trace

SIZES = [5, 1, 1, 3, 9, 1, 1, 1, 1, 20, 2, 1]


@pytest.mark.parametrize(("rows_per_shard", "fields"), [(1, ()), (8, ()), (8, FULL), (1000, FULL)])
def test_a_written_trace_is_read_back(tmp_path: Path, rows_per_shard: int, fields) -> None:
    rows = iterations(SIZES, fields)
    trace = Trace.open(write_trace(tmp_path / "trace", rows, rows_per_shard, fields))
    assert trace.is_complete
    assert_holds(trace, rows)
    assert [trace.has(name) for name in ("probs", "lookahead")] == [bool(fields)] * 2
    assert trace.is_real("experts")


def test_all_spans_equal_the_whole(tmp_path: Path) -> None:
    rows = iterations(SIZES)
    trace = Trace.open(write_trace(tmp_path / "trace", rows))
    expected = joined(rows)["experts"]
    for start in range(trace.num_rows + 1):
        for stop in range(start, trace.num_rows + 1):
            np.testing.assert_array_equal(trace.rows("experts", start, stop), expected[start:stop])
    with pytest.raises(TraceError, match="rows 3 to 99: must lie in the 46 rows"):
        trace.rows("experts", 3, 99)
    with pytest.raises(TraceError, match="field 'probs': not in this trace, which has request, "):
        trace.rows("probs", 0, 1)


def test_rows_of_a_shard_are_a_read_only_view_of_the_file(tmp_path: Path) -> None:
    trace = Trace.open(write_trace(tmp_path / "trace", iterations(SIZES)))
    result = trace.rows("weights", 0, 4)
    base = result
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap)
    for values in (result, trace.rows("weights", 0, trace.num_rows)):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 1


@pytest.mark.parametrize("rows_per_shard", [1, 6, 1000])
def test_blocks_cover_everything_and_split_no_iteration(tmp_path: Path, rows_per_shard: int) -> None:
    trace = Trace.open(write_trace(tmp_path / "trace", iterations(SIZES), rows_per_shard))
    for max_rows in (1, 2, 3, 7, 100):
        seen: list[int] = []
        next_row = 0
        for block in trace.blocks(["iteration", "experts"], max_rows=max_rows):
            assert (block.first_row, block.num_rows) == (next_row, len(block.columns["experts"]))
            next_row += block.num_rows
            inside = np.unique(block.columns["iteration"]).tolist()
            assert not set(inside) & set(seen)
            assert block.num_rows <= max_rows or len(inside) == 1
            seen += inside
        assert seen == list(range(len(SIZES))) and next_row == trace.num_rows
    blocks = list(trace.blocks(["token"], 5, 19, max_rows=4))
    assert (blocks[0].first_row, sum(block.num_rows for block in blocks)) == (5, 14)
    assert list(trace.blocks(["token"], 5, 5)) == []


def test_requests_know_their_rows(tmp_path: Path) -> None:
    with open_writer(tmp_path / "trace") as writer:
        first = writer.begin_request("code", "def f", 2)
        writer.append(iterations([4])[0])
        writer.append(iterations([1])[0])
        second, third = writer.begin_request("math"), writer.begin_request(None, "\ud800 lone", 7)
        writer.append(iterations([3])[0] | {"request": np.array([second, second, third])})
        writer.append(iterations([2])[0] | {"request": np.array([third, second])})
        never = writer.begin_request()
    requests = Trace.open(tmp_path / "trace").requests
    assert [(request.first_row, request.num_rows, request.has_own_iterations) for request in requests] == [
        (0, 5, True),
        (5, 3, False),
        (7, 2, False),
        (0, 0, True),
    ]
    assert [request.number for request in requests] == [first, second, third, never]
    assert (requests[0].category, requests[0].prompt, requests[0].num_prompt_tokens) == ("code", "def f", 2)
    assert requests[2].prompt == "\ud800 lone"


def test_many_iterations_at_once_are_the_same_as_one_by_one(tmp_path: Path) -> None:
    rows = iterations(SIZES)
    write_trace(tmp_path / "one", rows)
    with open_writer(tmp_path / "many") as writer:
        writer.begin_request("test", "hello", 3)
        together = {name: values for name, values in joined(rows).items() if name != "iteration"}
        writer.extend(together, SIZES)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "many").iterdir())
    assert all((tmp_path / "one" / n).read_bytes() == (tmp_path / "many" / n).read_bytes() for n in names)


def test_shards_are_ordinary_safetensors(tmp_path: Path) -> None:
    rows = iterations([3])
    result = load_file(write_trace(tmp_path / "trace", rows) / "rows-00000.safetensors")
    np.testing.assert_array_equal(result["experts"], rows[0]["experts"])
    assert result["iteration"].tolist() == [0, 0, 0] and result["request"].dtype == np.int32


def test_the_manifest_keeps_what_is_known_of_the_model(tmp_path: Path) -> None:
    sizes = LayerGeometry(8, 2, 64, 32, 3, 2)
    layers = (TraceLayer.of(sizes), TraceLayer(8, 2))
    fields = [trace_field("token", layers, is_real=False, note="none")]
    dense = DenseShape(10, 20)
    with TraceWriter(tmp_path, model="m", layers=layers, fields=fields, dense=dense, created="now", command="c"):
        pass
    trace = Trace.open(tmp_path)
    manifest = trace.manifest
    assert (manifest.model, manifest.dense, manifest.created, manifest.command) == ("m", dense, "now", "c")
    assert [layer.geometry() for layer in manifest.layers] == [sizes, None]
    assert not trace.is_real("token") and manifest.fields["token"].note == "none" and not trace.is_real("probs")
    assert (trace.num_rows, trace.num_iterations, trace.requests) == (0, 0, [])
    assert list(trace.blocks(["experts"])) == []


def test_vectors_stand_for_token_ids(tmp_path: Path) -> None:
    field = trace_field("embedding", LAYERS, hidden_size=64, is_real=False, generator=TOKEN_VECTORS)
    rows = iterations([6, 1])
    rows[1]["token"][:] = rows[0]["token"][2]
    trace = Trace.open(write_trace(tmp_path / "trace", rows, fields=[field]))
    vectors = trace.rows("embedding", 0, 7)
    assert vectors.shape == (7, 64) and vectors.dtype == np.float16
    np.testing.assert_allclose(np.linalg.norm(vectors.astype(np.float64), axis=1), 1, atol=2e-3)
    similar = vectors.astype(np.float64) @ vectors.astype(np.float64).T
    assert similar[2, 6] > 0.99 and np.abs(np.triu(similar[:6, :6], 1)).max() < 0.6
    assert vectors[2, :3].tolist() == trace.rows("embedding", 6, 7)[0, :3].tolist()
    assert not trace.is_real("embedding")
    # The same on every machine.
    result = token_vectors(np.array([0, 17], np.int32), 64)[:, :3].astype(np.float64)
    np.testing.assert_allclose(result, [[0.6172, 0.0242, -0.0197], [0.2769, 0.1306, 0.1321]], atol=1e-3)


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    def peak_nbytes(num_rows: int) -> int:
        rows = {name: np.repeat(values, num_rows, axis=0) for name, values in iterations([1])[0].items()}
        folder = tmp_path / str(num_rows)
        with open_writer(folder, 2048) as writer:
            writer.begin_request()
            writer.extend(rows, np.ones(num_rows, int))
        del rows
        trace = Trace.open(folder)
        tracemalloc.start()
        for _ in trace.blocks(["experts", "weights", "token"], max_rows=1024):
            pass
        assert len(trace.requests) == 1
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_nbytes(20_000) < 1.2 * peak_nbytes(5_000) + 100_000
