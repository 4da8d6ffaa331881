"""The demands to come, against a scan of everything that follows."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly_lab.baselines.oracle import NEVER
from expertly_lab.sim import future as future_module
from expertly_lab.sim.future import TraceFuture, next_uses
from expertly_lab.sim.workload import RowRange, TraceWorkload
from expertly_lab.trace.reader import Trace
from lab.tests.sim.drive import random_trace, sized

LAYERS = (*sized(1, 9, 2), *sized(2, 12, 3))


def trace_of(folder: Path) -> Trace:
    return random_trace(folder, LAYERS, 0, 15, prompt=7, num_requests=4, gaps=0.3, rows_per_shard=16)


def spans_of(trace: Trace, order: list[int], cut: int = 0) -> list[RowRange]:
    """Requests in that order, each without its last `cut` rows."""
    requests = [trace.requests[number] for number in order]
    return [RowRange(request.number, request.first_row, request.num_rows - cut) for request in requests]


def assert_is_the_scan(workload: TraceWorkload) -> None:
    """Every demand's next use, and what the next layers need, are what a scan of all that follows finds."""
    geometry = Geometry(LAYERS)
    everything = list(workload.iterations())
    needs = [{demand.layer: demand.experts for demand in each.layers} for each in everything]
    future = TraceFuture(workload, geometry, next_uses(workload))
    num_layers, num_seen = len(LAYERS), 0
    for iteration in future.iterations():
        assert iteration == everything[num_seen]
        for demand in iteration.layers:
            future.begin_layer(demand.layer)
            assert future.step == iteration.index * num_layers + demand.layer
            for expert in demand.experts:
                later = (i for i in range(num_seen + 1, len(needs)) if expert in needs[i].get(demand.layer, ()))
                actual = next(later, None)
                expected = NEVER if actual is None else actual * num_layers + demand.layer
                assert future.next_use(geometry.expert_id(demand.layer, expert)) == expected
            for ahead in range(num_layers + 1):
                index, layer = divmod(future.step + ahead, num_layers)
                if index < len(needs):
                    assert future.needs(ahead) == (layer, needs[index].get(layer, []))
                else:
                    assert future.needs(ahead) is None
        num_seen += 1
    assert num_seen == len(everything)


def num_open(folder: Path) -> int:
    """Open files of this process that lie, or lay, in a folder."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith(str(folder)) for link in links if os.path.lexists(link))


@pytest.mark.parametrize("chunk", [1, 5, 4096])
def test_next_uses_and_needs_are_those_of_a_scan(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(future_module, "_CHUNK_ROWS", chunk)  # also within an iteration, and across shards
    trace = trace_of(tmp_path / "trace")
    assert len(trace.manifest.shards) > 2
    assert_is_the_scan(TraceWorkload(trace, [RowRange(None, 0, trace.num_rows)]))
    assert_is_the_scan(TraceWorkload(trace, spans_of(trace, [2, 0, 3, 1])))
    assert_is_the_scan(TraceWorkload(trace, spans_of(trace, [3, 1], cut=4)))
    first = trace.requests[1].first_row  # of a prompt that is cut in the middle
    assert_is_the_scan(TraceWorkload(trace, [RowRange(1, first, 3), RowRange(0, 0, 20), RowRange(1, first + 7, 9)]))


def test_the_scratch_file_has_no_name_and_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of(tmp_path / "trace")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    uses = next_uses(TraceWorkload(trace, [RowRange(None, 0, trace.num_rows)]))
    assert num_open(scratch) == 1 and not list(scratch.iterdir())
    del uses
    gc.collect()
    assert num_open(scratch) == 0


def test_a_missing_folder_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of(tmp_path / "trace")
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(ConfigError, match=r"temporary files: No such file.*belady and oracle needs \d+ bytes.*TMPDIR"):
        next_uses(TraceWorkload(trace, [RowRange(None, 0, trace.num_rows)]))
