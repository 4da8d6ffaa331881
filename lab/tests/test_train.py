"""Training learns what there is to learn, ends when no more helps, and says how good it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from expertly.core.errors import ConfigError, TraceError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import RouterRan
from expertly.core.observation import Routed
from expertly.policies.known import Known
from expertly.policies.promoe import Learned
from expertly_lab.accuracy import means
from expertly_lab.dataset import Dataset, needed
from expertly_lab.sim.schedule import Selection, make_schedule
from expertly_lab.trace.reader import Trace
from expertly_lab.trace.schema import TraceLayer
from expertly_lab.train import TrainingStudy, TrainOptions, study, train
from lab.tests.planted import LAYERS, planted_trace

OPTIONS = TrainOptions((1, 2), hidden=32, epochs=12, batch=64, learning_rate=5e-3)
SPLIT = (7, 3)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return planted_trace(tmp_path_factory.mktemp("planted") / "trace")


@pytest.fixture(scope="module")
def found(trace: Trace) -> TrainingStudy:
    return study(trace, SPLIT, OPTIONS)


def test_it_learns_what_popularity_and_token_ids_do_not_know(found: TrainingStudy) -> None:
    assert [(accuracy.distance, accuracy.source, accuracy.layer) for accuracy in found.accuracies] == [
        *((1, 0, 1), (1, 1, 2), (1, 2, 3)),
        *((2, 0, 1), (2, 0, 2), (2, 1, 3)),
    ]
    for accuracy in found.accuracies:
        assert accuracy.learned is not None and accuracy.token_id is not None and accuracy.lookahead is not None
        assert accuracy.learned > 0.6 and accuracy.learned > accuracy.token_id + 0.15, accuracy
        assert accuracy.learned > accuracy.lookahead, accuracy
    assert means(found.accuracies)[1]["layers"] == 3
    assert found.num_requests == {"training": 16, "stopping": 1, "test": 7}
    assert found.num_rows == {"training": 16 * 60, "stopping": 60, "test": 7 * 50}, "tested on decode"


def test_networks_of_two_layers_alone_have_no_other_path_and_learn_too(trace: Trace, found: TrainingStudy) -> None:
    plain = study(trace, SPLIT, replace(OPTIONS, plain=True, hidden=48))
    assert all(not mlp.direct.any() and mlp.hidden.any() for mlp in plain.trained.weights.mlps.values())
    assert any(mlp.direct.any() for mlp in found.trained.weights.mlps.values())
    assert all(
        accuracy.learned > accuracy.token_id + 0.1
        for accuracy in plain.accuracies
        if accuracy.learned and accuracy.token_id
    )


def test_what_is_said_of_it_is_what_the_predictor_does(found: TrainingStudy, trace: Trace) -> None:
    """Recounted with the predictor itself, a row at a time, over the decode rows of the requests kept back."""
    layers = tuple(LayerGeometry(layer.num_experts, layer.top_k, 2, 4, 2, 1) for layer in LAYERS)
    predictor = Learned(Geometry(layers), 2, known=Known(items=(found.trained.weights,)))
    right, named = np.zeros(4), np.zeros(4)
    for span in make_schedule(trace, Selection(split=SPLIT)).test:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        inputs, experts = (trace.rows(name, rows.start, rows.stop) for name in ("router_inputs", "experts"))
        for row in range(10, span.num_rows):
            for layer in range(4):
                seen = inputs[row, layer][None].astype(np.float32)
                for said in predictor.router_ran(Routed(RouterRan(layer, [], [], [], 1), inputs=seen)):
                    right[said.layer] += len(set(said.experts) & set(experts[row, said.layer].tolist()))
                    named[said.layer] += len(said.experts)
    expected = [accuracy.learned for accuracy in found.accuracies if accuracy.distance == 2]
    np.testing.assert_allclose(right[1:] / named[1:], expected, atol=1e-3)


def test_equal_seeds_give_equal_weights(trace: Trace) -> None:
    options = replace(OPTIONS, distances=(1,), epochs=2)
    far = study(trace, SPLIT, replace(options, distances=(8, 3, 5), epochs=1)).trained.weights
    assert far.distances == (3,) and sorted(far.mlps) == [(0, 1), (0, 2), (0, 3)], "past the last layer are all layers"
    each, same, other = (study(trace, SPLIT, replace(options, seed=seed)).trained.weights for seed in (0, 0, 1))
    for pair, mlp in each.mlps.items():
        np.testing.assert_array_equal(mlp.hidden, same.mlps[pair].hidden)
        np.testing.assert_array_equal(mlp.direct, same.mlps[pair].direct)
    assert (each.mlps[0, 1].hidden != other.mlps[0, 1].hidden).any()


def test_it_ends_when_nothing_gets_better(tmp_path: Path) -> None:
    """Of choices that follow from nothing there is nothing to learn: far fewer epochs than it might take."""
    trace = planted_trace(tmp_path / "trace", 6, 30, fields=("router_inputs",))
    data = Dataset(trace, make_schedule(trace, Selection(split=(5, 1))).training)
    inputs = data._columns["router_inputs"]
    inputs[:] = np.random.default_rng(1).standard_normal(inputs.shape)
    rows = np.arange(data.num_rows)
    seen = []
    options = replace(OPTIONS, epochs=500, patience=3)
    trained = train(data, rows[:120], rows[120:], options, lambda text, done, total: seen.append((text, done, total)))
    assert max(trained.epochs.values()) < 100
    assert seen[-1] == ("training", 5, 5)


def test_a_trace_without_scores_learns_from_the_choices(tmp_path: Path) -> None:
    trace = planted_trace(tmp_path / "trace", fields=("router_inputs",))
    row = means(study(trace, SPLIT, replace(OPTIONS, distances=(1,))).accuracies)[1]
    assert row["learned"] > 0.6 and row["lookahead"] is None


def test_of_two_stacks_each_is_predicted_from_its_own_first_layer(tmp_path: Path) -> None:
    """As of an encoder and a decoder: rows of a prompt run two layers, the others the other two."""
    layers = (TraceLayer(6, 2),) * 4
    trace = planted_trace(
        tmp_path / "trace", 12, 40, layers=layers, ran=lambda row, layer: (layer < 2) == (row < 20), num_prompt=20
    )
    result = study(trace, SPLIT, replace(OPTIONS, distances=(1, 3), epochs=3))
    weights = result.trained.weights
    assert weights.starts == (0, 0, 2, 2)
    assert sorted(weights.mlps) == [(0, 1), (2, 3)]
    assert [accuracy.layer for accuracy in result.accuracies if accuracy.learned is None] == [1, 1], (
        "the encoder runs in no decode row"
    )


def test_needed_leaves_out_what_is_no_choice() -> None:
    result = needed(np.array([[1, 0xFFFF], [3, 0]]), 4)
    assert result.tolist() == [[False, True, False, False], [True, False, False, True]]


def test_a_layer_that_never_runs_is_named(tmp_path: Path) -> None:
    trace = planted_trace(tmp_path / "trace", 6, 12, ran=lambda row, layer: layer != 2)
    with pytest.raises(TraceError, match="layer 2 runs in none of the rows"):
        study(trace, SPLIT, OPTIONS)
    trace = planted_trace(tmp_path / "short", 2, 12)
    with pytest.raises(ConfigError, match="split=1:1: leaves one request to learn from"):
        study(trace, (1, 1), OPTIONS)
