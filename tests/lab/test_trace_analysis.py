"""Statistics equal those worked out by hand, or by a loop over single tokens."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from expertly.lab.trace_analysis import ReuseMeter, analyse, entropy
from expertly.trace.reader import Trace
from expertly.trace.schema import NO_EXPERT, TraceLayer, trace_field
from expertly.trace.writer import TraceWriter
from tests.trace.builders import FULL, LAYERS, iterations, open_writer


def write(folder: Path, experts, weights, requests=None, probs=None) -> Trace:
    """One layer of four experts; each token an iteration."""
    layers = (TraceLayer(4, len(experts[0])),)
    fields = [] if probs is None else [trace_field("probs", layers)]
    with TraceWriter(folder, model="x", layers=layers, fields=fields) as writer:
        rows = {
            "request": requests or [0] * len(experts),
            "token": np.zeros(len(experts), int),
            "is_prefill": np.zeros(len(experts), bool),
            "experts": np.array(experts)[:, None],
            "weights": np.array(weights, np.float16)[:, None],
        }
        if probs is not None:
            rows["probs"] = np.array(probs, np.float16)[:, None]
        for _ in range(max(rows["request"]) + 1):
            writer.begin_request()
        writer.extend(rows, [1] * len(experts))
    return Trace.open(folder)


def test_entropy_in_bits() -> None:
    found = entropy(np.array([[0.25] * 4, [1, 0, 0, 0], [2, 2, 0, 0], [0, 0, 0, 0], [0.5, 0.25, 0.125, 0.125]]))
    assert found.tolist() == [2, 0, 1, 0, 1.75]


def test_a_token_is_certain_while_its_request_is_not(tmp_path: Path) -> None:
    """Four tokens that choose one expert each: nothing to guess at a token, everything over the request."""
    trace = write(tmp_path / "a", [[0], [1], [2], [3]], [[0.5]] * 4)
    layer = analyse(trace).layers[0]
    assert (layer.token_entropy_bits, layer.request_entropy_bits, layer.max_entropy_bits) == (0, 2, 2)
    assert layer.entropy_growth_bits == {1: 0, 2: 1, 4: 2}


def test_weights_are_normalised_and_requests_averaged(tmp_path: Path) -> None:
    experts = [[0, 1], [0, 1], [2, 3]]
    trace = write(tmp_path / "a", experts, [[3, 3], [0.2, 0.2], [1, 0]], [0, 1, 0])
    layer = analyse(trace).layers[0]
    assert layer.token_entropy_bits == pytest.approx((1 + 1 + 0) / 3, abs=1e-6)
    first = 1.5  # 0.5, 0.5 and 1: a quarter, a quarter, a half
    assert layer.request_entropy_bits == pytest.approx((first + 1) / 2, abs=1e-6)
    assert layer.entropy_growth_bits == pytest.approx({1: 1, 2: first}, abs=1e-6)


def test_with_probabilities_all_experts_count(tmp_path: Path) -> None:
    probs = [[0.25] * 4, [1, 0, 0, 0]]
    analysis = analyse(write(tmp_path / "a", [[0], [0]], [[1], [1]], probs=probs))
    assert analysis.is_full
    assert analysis.layers[0].token_entropy_bits == 1
    assert analysis.layers[0].request_entropy_bits == pytest.approx(entropy(np.array([1.25, 0.25, 0.25, 0.25])))


def test_popularity_and_reuse_by_hand(tmp_path: Path) -> None:
    layer = analyse(write(tmp_path / "a", [[0], [0], [1], [0], [2], [2], [2], [1]], [[1]] * 8)).layers[0]
    assert (layer.num_demands, layer.most_popular_expert, layer.most_popular_share) == (8, 0, 3 / 8)
    assert layer.top_shares == {10: 3 / 8, 25: 3 / 8, 50: 6 / 8}
    assert layer.first_use_share == 3 / 8
    within = {distance: layer.reuse_within[distance] for distance in (1, 2, 4, 8)}
    assert within == {1: 3 / 8, 2: 4 / 8, 4: 4 / 8, 8: 5 / 8}  # distances 1, 2, 1, 1, 5
    assert layer.reuse_percentiles == {50: 1, 90: 5, 99: 5}


def test_reuse_over_blocks_equals_a_loop() -> None:
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((3000, 2, 40)) * np.arange(1, 41) ** 2, axis=-1)[:, :, :3].astype(np.uint16)
    experts[rng.random(experts.shape) < 0.1] = NO_EXPERT
    meter = ReuseMeter(2, 40)
    for block in np.split(experts, [1, 2, 500, 1700]):
        meter.add(block)
    last: dict[tuple[int, int], int] = {}
    counts: dict[tuple[int, int], int] = defaultdict(int)
    num_first = [0, 0]
    for token, row in enumerate(experts):
        for layer in range(2):
            for expert in row[layer][row[layer] != NO_EXPERT].tolist():
                if (layer, expert) in last:
                    edge = int(meter.edges[np.argmax(meter.edges >= token - last[layer, expert])])
                    counts[layer, edge] += 1
                else:
                    num_first[layer] += 1
                last[layer, expert] = token
    found = {(layer, int(meter.edges[i])): int(meter.counts[layer, i]) for layer, i in np.argwhere(meter.counts)}
    assert found == counts
    assert meter.num_first.tolist() == num_first
    assert meter.num_demands.sum() == (experts != NO_EXPERT).sum()


def test_bins_are_exact_at_first_and_hold_powers_of_two() -> None:
    edges = ReuseMeter(1, 1).edges
    assert edges[:20].tolist() == list(range(1, 21))
    assert {1 << power for power in range(40)} <= set(edges.tolist())
    assert (np.diff(edges) <= 1 + edges[:-1] * 0.045).all()


@pytest.mark.parametrize("fields", [(), FULL], ids=["small", "full"])
def test_blocks_do_not_change_the_answer(tmp_path: Path, fields, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = iterations([5, 1, 1, 3, 9, 1, 1, 4, 2, 2], fields)
    with open_writer(tmp_path / "trace", 6, fields) as writer:
        for _ in range(3):
            writer.begin_request()
        for number, one in enumerate(rows):
            writer.append(one | {"request": (np.arange(len(one["token"])) + number) % 3})
    trace = Trace.open(tmp_path / "trace")
    whole = analyse(trace)
    monkeypatch.setattr("expertly.lab.trace_analysis._BLOCK_NUMBERS", 30)
    small = analyse(trace)
    for one, other in zip([whole.mean, *whole.layers], [small.mean, *small.layers], strict=True):
        assert one.token_entropy_bits == pytest.approx(other.token_entropy_bits)
        assert one.request_entropy_bits == pytest.approx(other.request_entropy_bits)
        assert one.entropy_growth_bits == pytest.approx(other.entropy_growth_bits)
        assert (one.reuse_within, one.reuse_percentiles) == (other.reuse_within, other.reuse_percentiles)
    assert (whole.num_prefill_rows, whole.num_decode_rows, whole.num_prefill_iterations) == (25, 4, 6)
    assert whole.reuse.num_demands.shape == (len(LAYERS), 8) and whole.reuse.num_demands[1, 6:].sum() == 0


def test_layers_that_never_ran_and_empty_traces(tmp_path: Path) -> None:
    experts = np.full((4, len(LAYERS), 3), NO_EXPERT)
    with open_writer(tmp_path / "never") as writer:
        writer.begin_request()
        writer.append({"experts": experts, "weights": np.zeros((4, 3, 3)), "token": [0] * 4, "is_prefill": [True] * 4})
    with open_writer(tmp_path / "empty"):
        pass
    for name in ("never", "empty"):
        mean = analyse(Trace.open(tmp_path / name)).mean
        assert (mean.num_demands, mean.token_entropy_bits, mean.request_entropy_bits) == (0, None, None)
        assert (mean.most_popular_share, mean.reuse_percentiles[50], mean.first_use_share) == (None, None, None)
