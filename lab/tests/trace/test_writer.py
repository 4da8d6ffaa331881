"""What a writer refuses, and what it leaves."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from expertly.core.errors import ConfigError, TraceError
from expertly_lab.trace import writer as writer_module
from expertly_lab.trace.reader import Trace
from expertly_lab.trace.schema import TraceLayer, trace_field
from expertly_lab.trace.writer import TraceWriter, whole_trace
from lab.tests.trace.builders import FULL, LAYERS, assert_holds, iterations, open_writer, random_rows


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TraceError, match=f"{tmp_path}: not empty"):
        open_writer(tmp_path)
    with pytest.raises(TraceError, match="not empty"):
        open_writer(tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


BAD_ROWS = {
    "missing": ({"weights": None}, "field 'weights': missing from the rows"),
    "unknown": ({"probs": np.zeros((2, 3, 8))}, "field 'probs': not among the declared request, "),
    "shape": ({"token": np.zeros(3, int)}, r"field 'token': shape \[3\]; must be \[2\]"),
    "layers": ({"weights": np.zeros((2, 2, 3))}, r"field 'weights': shape \[2, 2, 3\]; must be \[2, 3, 3\]"),
    "too large": ({"token": np.array([0, 1 << 40])}, "field 'token': values from 0 to 1099511627776; int32 holds"),
    "negative": ({"experts": np.full((2, 3, 3), -1)}, "field 'experts': values from -1 to -1; uint16 holds"),
    "no expert": ({"experts": np.full((2, 3, 3), 8)}, "field 'experts': row 3: expert 8 of layer 0: must be below"),
    "dtype": ({"is_prefill": np.zeros(2)}, "field 'is_prefill': dtype float64; must be bool"),
    "NaN": ({"weights": np.full((2, 3, 3), np.nan)}, "field 'weights': row 3: nan: must be finite"),
    "request": ({"request": np.array([0, 1])}, "field 'request': row 4: 1: must be one of the 1 requests"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_refused_and_change_nothing(tmp_path: Path, case: str) -> None:
    change, message = BAD_ROWS[case]
    rows = iterations([3, 2])
    with open_writer(tmp_path / "trace") as writer:
        writer.begin_request()
        writer.append(rows[0])
        bad = {name: values for name, values in (rows[1] | change).items() if values is not None}
        with pytest.raises(TraceError, match=message):
            writer.append(bad)
        writer.append(rows[1])
    assert_holds(Trace.open(tmp_path / "trace"), rows)


def test_no_rows_are_no_iteration_and_rows_need_a_request(tmp_path: Path) -> None:
    with open_writer(tmp_path / "trace") as writer:
        with pytest.raises(TraceError, match="field 'request': row 0: -1"):
            writer.append(random_rows(1, 0))
        writer.begin_request()
        writer.append(random_rows(0, 0))
        writer.append(random_rows(2, 1))
        assert (writer.num_iterations, writer.num_rows) == (1, 2)
    assert_holds(Trace.open(tmp_path / "trace"), [random_rows(2, 1)])


def test_wider_numbers_are_taken_and_floats_saturate(tmp_path: Path) -> None:
    rows = random_rows(2, 0)
    wide = {"experts": rows["experts"].astype(np.int64), "weights": np.full((2, 3, 3), 1e9), "token": [7, 8]}
    with open_writer(tmp_path / "trace") as writer:
        writer.begin_request()
        writer.append(rows | wide)
    trace = Trace.open(tmp_path / "trace")
    np.testing.assert_array_equal(trace.rows("experts", 0, 2), rows["experts"])
    assert trace.rows("weights", 0, 2).min() == 65504
    assert trace.rows("token", 0, 2).tolist() == [7, 8]


def test_impossible_layers_and_unknown_fields_are_refused(tmp_path: Path) -> None:
    for numbers, message in (
        ((8, 9), "top_k=9: must be from 1 to 8"),
        ((8, 2, 16, 16, 5, 2), "num_matrices=5: must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            TraceLayer(*numbers)
    with pytest.raises(TraceError, match="0 layers; must be from 1"):
        TraceWriter(tmp_path / "trace", model="x", layers=[])
    assert not (tmp_path / "trace").exists()
    with pytest.raises(TraceError, match=r"field 'logits': unknown; accepted: request, .*lookahead"):
        trace_field("logits", LAYERS)
    with pytest.raises(TraceError, match=r"field 'embedding': shape \[0\]"):
        trace_field("embedding", LAYERS)


def test_a_full_disk_is_said_and_costs_no_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = iterations([2, 2, 2])

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_writer(tmp_path / "trace", 4) as writer:
        writer.begin_request()
        writer.append(rows[0])
        with monkeypatch.context() as patch:
            patch.setattr(writer_module, "write_shard", full)
            with pytest.raises(TraceError, match=r"writing the trace failed: the disk is full"):
                writer.append(rows[1])
        writer.append(rows[2])
    assert_holds(Trace.open(tmp_path / "trace"), rows)


def test_a_whole_trace_is_there_or_not(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    with pytest.raises(ZeroDivisionError), whole_trace(folder, model="x", layers=LAYERS) as writer:
        writer.begin_request()
        writer.append(random_rows(2, 0))
        raise ZeroDivisionError
    assert not folder.exists()
    with whole_trace(folder, model="x", layers=LAYERS) as writer:
        writer.begin_request()
        writer.append(random_rows(2, 0))
    assert Trace.open(folder).is_complete


def test_shards_of_wide_rows_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "SHARD_NBYTES", 4000)
    rows = iterations([1] * 30, FULL)
    with open_writer(tmp_path / "trace", 1000, FULL) as writer:
        writer.begin_request()
        for row in rows:
            writer.append(row)
    trace = Trace.open(tmp_path / "trace")
    assert_holds(trace, rows)
    assert len(trace.manifest.shards) >= 2
    assert all(shard.nbytes <= 4000 + 4096 for shard in trace.manifest.shards)
