"""Iterations of a trace, as demands: the same that the engine makes of the same rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.core.messages import group_by_expert
from expertly.sim import workload as workload_module
from expertly.sim.workload import RowRange, TraceWorkload
from expertly.trace.reader import Trace
from tests.sim.drive import make_trace, random_passes, sized

LAYERS = (*sized(1, 9, 2), *sized(2, 40, 6))


def whole(trace: Trace) -> TraceWorkload:
    return TraceWorkload(trace, [RowRange(None, 0, trace.num_rows)])


@pytest.mark.parametrize("gaps", [0.0, 0.4])
@pytest.mark.parametrize("block", [1, 7, 512])
def test_demands_are_those_of_the_rows(
    block: int, gaps: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload_module, "_BLOCK_ROWS", block)
    passes = random_passes(1, LAYERS, 12, prompt=9, num_requests=3, gaps=gaps)
    trace = make_trace(tmp_path / "trace", passes, LAYERS, num_requests=3, rows_per_shard=20)
    experts = trace.rows("experts", 0, trace.num_rows)
    is_prefill = trace.rows("is_prefill", 0, trace.num_rows)
    row = 0
    for number, (iteration, given) in enumerate(zip(whole(trace).iterations(), passes, strict=True)):
        request, prefill, rows = given
        assert (iteration.index, iteration.first_row, iteration.trace_row) == (number, row, row)
        assert (iteration.requests, iteration.num_tokens) == ((request,), len(rows))
        assert iteration.is_prefill is prefill and iteration.prefilling == ((request,) if prefill else ())
        expected = []
        for layer, shape in enumerate(LAYERS):
            of_layer = experts[row : row + len(rows), layer, : shape.top_k]
            demand, _ = group_by_expert(layer, of_layer, shape.num_experts, is_prefill[row : row + len(rows)])
            expected += [demand] if demand.experts else []
        assert iteration.layers == expected
        assert len(expected) == len(LAYERS) or gaps
        row += len(rows)
    assert row == trace.num_rows


def test_a_batch_of_both_phases_says_whose_prompts_it_holds(tmp_path: Path) -> None:
    layers = sized(1, 4, 1)
    rows = [[[0]], [[1]], [[2]], [[1]]]
    passes = [([4, 1, 1, 3], [False, True, True, False], rows)]
    trace = make_trace(tmp_path / "trace", passes, layers, num_requests=5)
    (iteration,) = whole(trace).iterations()
    assert iteration.requests == (4, 1, 3) and iteration.prefilling == (1,) and iteration.is_prefill
    (demand,) = iteration.layers
    assert (demand.experts, demand.num_tokens, demand.batch_tokens) == ([0, 1, 2], [1, 2, 1], 4)
    assert demand.is_decode == [True, True, False], "expert 1 serves both: it counts as decode"


def test_spans_are_served_in_their_order_and_may_end_within_an_iteration(tmp_path: Path) -> None:
    passes = random_passes(2, LAYERS, 3, prompt=5, num_requests=2)
    trace = make_trace(tmp_path / "trace", passes, LAYERS, num_requests=2)
    spans = [RowRange(1, 8, 8, arrival_ns=70), RowRange(0, 0, 3, arrival_ns=90)]
    workload = TraceWorkload(trace, spans)
    found = [
        (one.index, one.requests, one.num_tokens, one.first_row, one.trace_row, one.arrival_ns)
        for one in workload.iterations()
    ]
    assert found == [
        (0, (1,), 5, 0, 8, 70),
        (1, (1,), 1, 5, 13, 70),
        (2, (1,), 1, 6, 14, 70),
        (3, (1,), 1, 7, 15, 70),
        (4, (0,), 3, 8, 0, 90),
    ]
    assert workload.num_rows == 11
    (cut,) = list(TraceWorkload(trace, spans[1:]).iterations())
    expected, _ = group_by_expert(0, trace.rows("experts", 0, 3)[:, 0, :2], 9, np.ones(3, bool))
    assert cut.layers[0] == expected


def test_nothing_to_simulate_is_an_error(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "trace", random_passes(2, LAYERS, 3), LAYERS)
    with pytest.raises(ConfigError, match="no tokens to simulate"):
        TraceWorkload(trace, [])
