"""Iterations of a trace: their demands, as the engine makes them of the same rows, and what a predictor sees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.core.messages import RouterRan, group_by_expert
from expertly.core.observation import Want, scores_of_choices
from expertly_lab.sim import training as training_module
from expertly_lab.sim import workload as workload_module
from expertly_lab.sim.training import histories
from expertly_lab.sim.workload import RowRange, TraceWorkload, normalised_scores
from expertly_lab.trace.reader import Trace, token_vectors
from expertly_lab.trace.schema import TOKEN_VECTORS, trace_field
from expertly_lab.trace.writer import TraceWriter
from lab.tests.sim.drive import make_trace, random_passes, sized
from lab.tests.trace.builders import LAYERS as TOY_LAYERS
from lab.tests.trace.builders import random_rows

LAYERS = (*sized(1, 9, 2), *sized(2, 40, 6))


def whole(trace: Trace) -> TraceWorkload:
    return TraceWorkload(trace, [RowRange(None, 0, trace.num_rows)])


@pytest.mark.parametrize(("block", "gaps"), [(1, 0.4), (7, 0.0), (512, 0.4)])
def test_demands_are_those_of_the_rows(
    block: int, gaps: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload_module, "_BLOCK_ROWS", block)
    passes = random_passes(1, LAYERS, 12, prompt=9, num_requests=3, gaps=gaps)
    trace = make_trace(tmp_path / "trace", passes, LAYERS, num_requests=3, rows_per_shard=20)
    experts = trace.rows("experts", 0, trace.num_rows)
    is_prefill = trace.rows("is_prefill", 0, trace.num_rows)
    row = 0
    for number, (iteration, values) in enumerate(zip(whole(trace).iterations(), passes, strict=True)):
        request, prefill, rows = values
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
    actual = [
        (each.index, each.requests, each.num_tokens, each.first_row, each.trace_row, each.arrival_ns)
        for each in workload.iterations()
    ]
    assert actual == [
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
    with pytest.raises(ConfigError, match="no tokens to simulate"):
        TraceWorkload(trace, [])


# -- what a predictor sees of a trace ----------


WIDE = (*sized(1, 9, 2), *sized(2, 20, 3))
EVERYTHING: frozenset[Want] = frozenset({"embedding", "experts", "scores", "lookahead"})


def mixed_trace(folder: Path, *, is_full: bool) -> Trace:
    """Prompts, single tokens, and batches of two requests; some layers do not run for some rows."""
    passes = random_passes(1, WIDE, 8, prompt=9, num_requests=2, gaps=0.3)
    rows = [row for _, _, of_pass in random_passes(2, WIDE, 12) for row in of_pass]
    passes += [([2, 3, 3], [False, True, True], rows[i : i + 3]) for i in range(0, 12, 3)]
    return make_trace(folder, passes, WIDE, num_requests=4, rows_per_shard=20, is_full=is_full)


@pytest.mark.parametrize(("block", "is_full"), [(1, True), (7, False), (512, True)])
def test_an_iteration_shows_its_rows(
    block: int, is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload_module, "_BLOCK_ROWS", block)
    trace = mixed_trace(tmp_path / "trace", is_full=is_full)
    fields = {name: trace.rows(name, 0, trace.num_rows) for name in trace.manifest.fields}
    num_rows = 0
    for iteration in whole(trace).iterations():
        rows = slice(iteration.trace_row, iteration.trace_row + iteration.num_tokens)
        num_rows += iteration.num_tokens
        began = iteration.began(EVERYTHING)
        np.testing.assert_array_equal(began.requests, fields["request"][rows])
        np.testing.assert_array_equal(began.is_prefill, fields["is_prefill"][rows])
        assert began.requests.dtype == np.int64
        if is_full:
            assert began.embedding is not None and began.embedding.dtype == np.float32
            np.testing.assert_array_equal(began.embedding, fields["embedding"][rows])
        else:
            assert began.embedding is None
        for router in iteration.layers:
            layer, shape = router.layer, WIDE[router.layer]
            routed = iteration.routed(router, EVERYTHING)
            assert routed.router is router
            experts = fields["experts"][rows, layer, : shape.top_k]
            np.testing.assert_array_equal(routed.experts, experts)
            assert routed.scores is not None and routed.scores.dtype == np.float32
            if is_full:
                np.testing.assert_array_equal(routed.scores, fields["probs"][rows, layer, : shape.num_experts])
                np.testing.assert_array_equal(routed.lookahead, fields["lookahead"][rows, layer])
            else:
                weights = fields["weights"][rows, layer, : shape.top_k]
                np.testing.assert_array_equal(routed.scores, scores_of_choices(experts, weights, shape.num_experts))
                assert routed.lookahead is None
            with pytest.raises(ValueError, match="read-only"):
                routed.scores[:] = 0
    assert num_rows == trace.num_rows


def test_only_wanted_fields_are_read_once_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = mixed_trace(tmp_path / "trace", is_full=True)
    read: list[str] = []
    rows = Trace.rows
    monkeypatch.setattr(Trace, "rows", lambda self, field, *place: read.append(field) or rows(self, field, *place))
    iterations = list(whole(trace).iterations())
    for iteration in iterations:
        assert iteration.began({"experts"}).embedding is None
        for router in iteration.layers:
            routed = iteration.routed(router, {"experts"})
            assert routed.experts is not None and routed.scores is routed.lookahead is None
    assert set(read) == {"request", "iteration", "is_prefill", "experts"}
    read.clear()
    for iteration in iterations:
        iteration.began(EVERYTHING)
        for router in iteration.layers:
            iteration.routed(router, EVERYTHING)
    num_blocks = len({id(iteration.rows) for iteration in iterations})
    assert sorted(read) == sorted(["embedding", "probs", "lookahead"] * num_blocks)


@pytest.mark.parametrize(("block", "is_full"), [(5, True), (5, False), (1024, True)])
def test_histories_are_the_rows_of_the_spans_in_their_order(
    block: int, is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_module, "_BLOCK_ROWS", block)
    trace = mixed_trace(tmp_path / "trace", is_full=is_full)
    spans = [RowRange(1, 17, 17), RowRange(0, 0, 17)]
    result = list(histories(trace, spans, EVERYTHING))
    order = np.r_[17:34, 0:17]
    fields = {name: trace.rows(name, 0, trace.num_rows)[order] for name in trace.manifest.fields}
    np.testing.assert_array_equal(np.concatenate([each.requests for each in result]), fields["request"])
    np.testing.assert_array_equal(np.concatenate([each.is_prefill for each in result]), fields["is_prefill"])
    np.testing.assert_array_equal(np.concatenate([each.experts for each in result]), fields["experts"])
    scores = np.concatenate([each.scores for each in result])
    assert scores.shape == (34, 3, 20) and scores.dtype == np.float32
    assert not scores[:, 0, 9:].any(), "layer 0 has fewer experts than others"
    if is_full:
        np.testing.assert_array_equal(scores, fields["probs"])
        np.testing.assert_array_equal(np.concatenate([each.embedding for each in result]), fields["embedding"])
    else:
        for layer, shape in enumerate(WIDE):
            chosen = fields["experts"][:, layer], fields["weights"][:, layer]
            np.testing.assert_array_equal(
                scores[:, layer, : shape.num_experts], scores_of_choices(*chosen, shape.num_experts)
            )
        assert all(each.embedding is None for each in result)
    assert all(each.embedding is None for each in histories(trace, spans, {"scores"}))


def test_embeddings_that_a_trace_makes_up_and_scores_that_are_not_normalised(tmp_path: Path) -> None:
    fields = [
        trace_field("probs", TOY_LAYERS),
        trace_field("embedding", TOY_LAYERS, hidden_size=16, is_real=False, note="made up", generator=TOKEN_VECTORS),
    ]
    rows = random_rows(6, 3, fields[:1])
    with TraceWriter(tmp_path / "trace", model="toy", layers=TOY_LAYERS, fields=fields) as writer:
        writer.begin_request()
        writer.append(rows)
    (iteration,) = TraceWorkload(Trace.open(tmp_path / "trace"), [RowRange(None, 0, 6)]).iterations()
    began = iteration.began({"embedding"})
    np.testing.assert_array_equal(began.embedding, token_vectors(rows["token"], 16).astype(np.float32))
    routed = iteration.routed(RouterRan(1, [], [], [], 6), {"scores"})
    values = rows["probs"][:, 1, :6].astype(np.float32)
    assert routed.scores is not None
    np.testing.assert_allclose(routed.scores, values / values.sum(axis=1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("num_experts", [8, 256])
def test_scores_that_were_normalised_keep_their_16_bits(num_experts: int) -> None:
    logits = np.random.default_rng(1).standard_normal((50, num_experts)) * 4
    exact = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    recorded = exact.astype(np.float16)
    np.testing.assert_array_equal(normalised_scores(recorded), recorded.astype(np.float32))


def test_other_scores_are_normalised_row_by_row() -> None:
    recorded = np.array([[0.5, 0.5], [3.0, 1.0], [0.0, 0.0], [-1.0, 0.25]], np.float16)
    np.testing.assert_array_equal(normalised_scores(recorded), [[0.5, 0.5], [0.75, 0.25], [0, 0], [0, 1]])
