"""What a trace shows the configurator: H, P and PH of planted routing, by hand and by the statistics themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.lab.routing_rates import RoutingRates, rates_of_trace
from expertly.policies.allocation.moepic import LayerStatistics
from expertly.sim.schedule import Selection, make_schedule
from expertly.trace.reader import Trace
from expertly.trace.schema import TraceLayer, trace_field
from expertly.trace.writer import TraceWriter
from tests.sim.drive import make_trace, random_passes, sized

LAYERS = sized(3, 6, 2)


def rates(trace: Trace, **selection: Any) -> RoutingRates:
    schedule = make_schedule(trace, Selection(**selection))
    return rates_of_trace(trace, schedule.training or schedule.test)


def written(folder: Path, rows: list[tuple[int, int, bool, list[list[int]], list[list[float]]]]) -> Trace:
    """Of (request, iteration, is prefill, experts [L][K], what each layer's lookahead says [L][E]) of each row."""
    layers = [TraceLayer.of(layer) for layer in LAYERS]
    writer = TraceWriter(
        folder / "trace", model="toy", layers=layers, fields=[trace_field("lookahead", layers, max_distance=1)]
    )
    with writer:
        for _ in range(1 + max(row[0] for row in rows)):
            writer.begin_request()
        for number in sorted({row[1] for row in rows}):
            of_pass = [row for row in rows if row[1] == number]
            writer.append(
                {
                    "request": np.array([row[0] for row in of_pass], np.int32),
                    "is_prefill": np.array([row[2] for row in of_pass]),
                    "token": np.full(len(of_pass), -1, np.int32),
                    "experts": np.array([row[3] for row in of_pass], np.uint16),
                    "weights": np.full((len(of_pass), 3, 2), 0.5, np.float16),
                    "lookahead": np.array([row[4] for row in of_pass], np.float16)[:, :, None],
                }
            )
    return Trace.open(folder / "trace")


def scores(*falling: int) -> list[float]:
    """Of 6 experts: these, the highest first."""
    return [0.9 - 0.1 * falling.index(expert) if expert in falling else 0.01 for expert in range(6)]


NOTHING = [0.0] * 6
SAME = [[0, 1], [0, 1], [0, 1]]


def test_needed_experts_by_rank(tmp_path: Path) -> None:
    """One token after the other: H is that of the statistics fed with the same rows."""
    passes = random_passes(1, LAYERS, 40)
    trace = make_trace(tmp_path / "trace", passes, LAYERS)
    found = rates(trace)
    assert (found.num_tokens, found.num_requests, found.predicted_share) == (40, 1, 0.0)
    for layer in range(3):
        by_hand = LayerStatistics(6, half_life=None)
        for _, _, rows in passes:
            by_hand.observe(np.array([rows[0][layer]]))
        assert np.array_equal(found.layers[layer].hits, by_hand.rates().hits)
        assert not found.layers[layer].accuracy.any() and not found.layers[layer].predicted_hits.any()


def test_a_lookahead_that_is_right(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "trace", random_passes(2, LAYERS, 40), LAYERS, is_full=True)
    found = rates(trace)
    assert found.predicted_share == pytest.approx(2 / 3), "this lookahead says nothing of the next token's first layer"
    assert not found.layers[0].accuracy.any()
    for layer in (1, 2):
        assert found.layers[layer].accuracy.tolist() == [1, 1, 0, 0, 0, 0]


def test_the_first_layer_is_foretold_by_the_last_one_of_the_token_before(tmp_path: Path) -> None:
    """Of two requests in turn: each by its own token, the first of them by its prompt's last row."""
    right = {0: scores(0, 1), 1: scores(2, 3)}
    wrong = scores(4, 5)
    rows = [
        (0, 0, True, SAME, [NOTHING, NOTHING, wrong]),
        (0, 0, True, SAME, [NOTHING, NOTHING, right[0]]),
        (1, 1, True, SAME, [NOTHING, NOTHING, right[1]]),
    ]
    for turn in range(4):
        for request in (0, 1):
            experts = [[0, 1], [0, 1], [0, 1]] if request == 0 else [[2, 3], [0, 1], [0, 1]]
            rows.append((request, 2 + 2 * turn + request, False, experts, [NOTHING, NOTHING, right[request]]))
    found = rates(written(tmp_path, rows))
    assert (found.num_tokens, found.num_requests) == (8, 2), "prompts are not decoded"
    assert found.layers[0].accuracy.tolist() == [1, 1, 0, 0, 0, 0]
    assert found.predicted_share == pytest.approx(1 / 3), "the other layers were told nothing"


def test_rows_of_a_batch_are_tokens_of_their_own(tmp_path: Path) -> None:
    """Prompt and decode side by side; each request's lookahead is its own."""
    rows = [(request, 0, True, SAME, [NOTHING, NOTHING, scores(request, 5)]) for request in (0, 1)]
    for number in (1, 2, 3):
        rows += [
            (request, number, False, [[request, 5], [0, 1], [0, 1]], [NOTHING, NOTHING, scores(request, 5)])
            for request in (0, 1)
        ]
        rows.append((2, number, True, [[3, 4]] * 3, [NOTHING] * 3))
    found = rates(written(tmp_path, rows))
    assert found.num_tokens == 6
    assert found.layers[0].accuracy.tolist() == [1, 1, 0, 0, 0, 0]
    by_hand = LayerStatistics(6, half_life=None)
    for _ in range(3):
        by_hand.observe(
            np.array([[0, 5], [1, 5]]), np.array([scores(0, 5), scores(1, 5)], np.float16).astype(np.float32)
        )
    assert np.array_equal(found.layers[0].hits, by_hand.rates().hits)
    assert np.array_equal(found.layers[0].predicted_hits, by_hand.rates().predicted_hits)


def test_a_split_learns_from_its_first_part_alone(tmp_path: Path) -> None:
    passes = random_passes(3, LAYERS, 10, prompt=3, num_requests=10)
    trace = make_trace(tmp_path / "trace", passes, LAYERS, num_requests=10)
    found = rates(trace, split=(7, 3), seed=4)
    assert (found.num_requests, found.num_tokens) == (7, 70)
    assert rates(trace).num_tokens == 100


def test_layers_that_did_not_run_and_missing_choices(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "trace", random_passes(5, LAYERS, 60, gaps=0.4), LAYERS, is_full=True)
    found = rates(trace)
    assert found.num_tokens == 60
    for layer in found.layers:
        assert layer.hits[-1] == pytest.approx(1) and (np.diff(layer.hits) >= 0).all()


def test_prompts_alone_teach_nothing(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "trace", [(0, True, [[[0, 1]] * 3] * 4)], LAYERS)
    with pytest.raises(ConfigError, match="prompts alone; decoded tokens are needed"):
        rates(trace)


def test_it_says_how_far_it_is(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "trace", random_passes(1, LAYERS, 5), LAYERS)
    told: list[tuple[int, int]] = []
    rates_of_trace(trace, make_schedule(trace, Selection()).test, lambda done, total: told.append((done, total)))
    assert told == [(number, 5) for number in range(1, 6)]
