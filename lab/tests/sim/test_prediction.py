"""Systems that predict: what they are shown, what they have learned, and what their time costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertly.policies.fmoe import FMoE
from expertly.scheduler.systems import get_system
from expertly_lab.sim.schedule import Selection
from expertly_lab.sim.study import Memory
from expertly_lab.trace.manifest import write_manifest
from expertly_lab.trace.reader import Trace
from expertly_lab.trace.schema import OPTIONAL
from expertly_lab.trace.writer import TraceWriter
from lab.tests.sim.drive import (
    INFINITE,
    MAX_DISTANCE,
    Pass,
    make_study,
    make_trace,
    random_passes,
    random_trace,
    results,
    sized,
    toy,
)

LAYERS = sized(4, 12, 2)
THREE: dict[str, Any] = {"prompt": 5, "num_requests": 3, "is_full": True}
TWO = THREE | {"num_requests": 2}


def repeating_trace(folder: Path, num_requests: int = 4) -> Trace:
    """Every request runs through the same ten iterations."""
    ten = random_passes(5, LAYERS, 10)
    passes: list[Pass] = [(request, False, rows) for request in range(num_requests) for _, _, rows in ten]
    return make_trace(folder / "trace", passes, LAYERS, num_requests=num_requests, is_full=True)


def test_maps_of_the_training_part_foretell_what_repeats(tmp_path: Path) -> None:
    trace = repeating_trace(tmp_path)
    name = "fmoe:select=top-k"
    study = make_study(trace, toy(link=INFINITE), selection=Selection(split=(3, 1), seed=1))
    row = results(study, [name], "50%")[name]
    assert row["history"] == "filled from 3 requests" and row["requests"] == 1 and row["tokens"] == 10
    assert row["recall"] > 0.99, "the ten iterations are in the store"
    assert row["predictor"]["maps"] == 3 * 10 + 10
    assert row["predictor"]["semantic_score"] == pytest.approx(1, abs=1e-3)
    only_first = make_study(trace, toy(link=INFINITE), selection=Selection(num_requests=1))
    empty = results(only_first, [name], "50%")[name]
    assert empty["history"] == "empty" and empty["predictor"]["maps"] == 10
    assert empty["recall"] < 0.9 and empty["coverage"] < row["coverage"]


def test_what_is_learned_is_learned_once_and_no_run_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = random_trace(tmp_path / "trace", LAYERS, 8, 40, **THREE)
    learned: list[int] = []
    learn = FMoE.learn
    monkeypatch.setattr(
        FMoE, "learn", lambda self, history: learned.append(len(history.requests)) or learn(self, history)
    )
    study = make_study(trace, selection=Selection(split=(2, 1)))
    memories = [Memory("30%"), Memory("60%")]
    systems = [get_system(name) for name in ("fmoe", "fmoe:eviction=lru")]
    together = [study.row(system, memory) for memory in memories for system in systems]
    assert sum(learned) == 2 * 45, "two systems, two budgets, one predictor"
    study.row(get_system("fmoe:distance=1"), memories[0])
    assert sum(learned) == 2 * 2 * 45, "another distance is another store"
    again = make_study(trace, selection=Selection(split=(2, 1))).row(get_system("fmoe"), memories[1])
    assert again == next(row for row in together if (row["system"], row["memory"]) == ("fmoe", "60%"))


def test_rows_say_how_they_predicted(tmp_path: Path) -> None:
    study = make_study(random_trace(tmp_path / "trace", LAYERS, 8, 40, **THREE), toy())
    rows = results(study, ["lru", "fmoe:distance=2", "lru:prediction=popularity", "belady", "resident"], "40%")
    for name in ("lru", "belady", "resident"):
        row = rows[name]
        assert row["predictor"] is row["history"] is None
        assert row["prefetched_bytes"] == row["wasted_bytes"] == 0 and row["layers"] is None
    fmoe = rows["fmoe:distance=2"]
    assert fmoe["history"] == rows["lru:prediction=popularity"]["history"] == "empty"
    assert fmoe["predictor"]["trajectory_searches"] > 0 and fmoe["predictor"]["maps"] == 3 * 45
    assert 0 <= fmoe["recall"] <= 1
    assert [each["layer"] for each in fmoe["layers"]] == [0, 1, 2, 3] and 0 <= fmoe["layers"][2]["goodpred"] <= 1
    assert 0 < fmoe["wasted_bytes"] < fmoe["prefetched_bytes"] < fmoe["bytes_loaded"]


def test_a_trace_that_lacks_what_a_predictor_looks_at(tmp_path: Path) -> None:
    rows = results(
        make_study(random_trace(tmp_path / "trace", LAYERS, 8, 40)), ["lru:prediction=lookahead", "fmoe"], "40%"
    )
    assert "needs lookahead, which this trace lacks" in rows["lru:prediction=lookahead"]["skipped"]
    fmoe = rows["fmoe"]
    assert fmoe["skipped"] is None and fmoe["predictor"]["semantic_searches"] == 0
    assert fmoe["predictor"]["trajectory_searches"] > 0


# -- the next token's first layers, simulated ----------


ON = "lru:prediction=lookahead"
NEXT_TOKEN = f"{ON}:next_token=yes"


def knowing(trace: Trace, folder: Path) -> Trace:
    """The same rows, with a lookahead that knows the next row's first layers, too."""
    manifest = trace.manifest
    fields = {name: trace.rows(name, 0, trace.num_rows) for name in manifest.fields}
    lookahead, num_layers = fields["lookahead"].copy(), len(manifest.layers)
    for distance in range(1, MAX_DISTANCE + 1):
        for first in range(distance):
            lookahead[:-1, num_layers - distance + first, distance - 1] = fields["probs"][1:, first]
    fields["lookahead"] = lookahead
    optional = [field for name, field in manifest.fields.items() if name in OPTIONAL]
    with TraceWriter(folder, model="toy", layers=manifest.layers, fields=optional) as writer:
        for _ in trace.requests:
            writer.begin_request()
        for number in np.unique(fields["iteration"]):
            rows = fields["iteration"] == number
            writer.append({name: values[rows] for name, values in fields.items() if name != "iteration"})
    return Trace.open(folder)


@pytest.mark.parametrize(
    "system", [NEXT_TOKEN, "lru:prediction=lookahead:distance=2:next_token=yes", "lru:prediction=speculative:width=2"]
)
def test_a_lookahead_that_is_right_past_the_last_layer_leaves_nothing_to_miss(system: str, tmp_path: Path) -> None:
    trace = knowing(random_trace(tmp_path / "full", LAYERS, 3, 60, **TWO), tmp_path / "knowing")
    study = make_study(trace, toy(link=INFINITE))
    counters = study.simulate(get_system(system), Memory("60%").budget(study.geometry)).scheduler.counters
    for counted in counters[:2]:
        right, total = counted.decode.predicted_needed, counted.decode.predicted
        assert right == total >= 2 * 59 * 2, "of each token of both requests"
    assert sum(counted.decode.misses for counted in counters[1:]) == 0
    assert counters[0].decode.misses <= 4, "of the first tokens: what a prompt predicts evicts nothing"
    assert counters[0].prefill.predicted == 2, "the second prompt came instead of the first request's next token"


def test_an_older_trace_knows_nothing_past_the_last_layer(tmp_path: Path) -> None:
    trace = random_trace(tmp_path / "full", LAYERS, 3, 60, **TWO)
    study = make_study(trace, toy(link=INFINITE))
    rows = results(study, [NEXT_TOKEN, ON], "60%")
    row = rows[ON]
    assert row["prediction_accuracy"] == row["recall"] == row["accuracy"] == row["timeliness"] == 1.0
    assert rows[NEXT_TOKEN] | {"system": ON} == row
    counters = study.simulate(get_system(ON), Memory("60%").budget(study.geometry)).scheduler.counters
    assert all(layer.decode.misses == 0 for layer in counters[1:]) and counters[0].decode.misses > 0


SMALL = sized(4, 8, 2)
BASELINES = ("deepspeed-index", "brainstorm", "mixtral-offloading", "moe-infinity-lfu")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return random_trace(tmp_path_factory.mktemp("baselines") / "trace", SMALL, 0, 30, **THREE)


def test_index_is_right_as_often_as_chance_and_reads_the_most(trace: Trace) -> None:
    rows = results(make_study(trace), ("on-demand", *BASELINES), 3)
    index = rows["deepspeed-index"]
    assert index["recall"] == 1 and index["prediction_accuracy"] == pytest.approx(2 / 8), "it names all 8, 2 are needed"
    assert index["bytes_loaded"] == max(row["bytes_loaded"] for row in rows.values())
    assert index["goodpred"] == min(rows[name]["goodpred"] for name in BASELINES)


def test_mixtral_offloading_waits_for_what_it_predicts_and_hits_it(trace: Trace) -> None:
    """The lookahead of this trace is right: all that is predicted is there, and what it takes is stall, not misses."""
    rows = results(make_study(trace), ("lru", "mixtral-offloading", "mixtral-offloading:loop=overlapped"), 3)
    waits, goes_on = rows["mixtral-offloading"], rows["mixtral-offloading:loop=overlapped"]
    assert waits["prediction_accuracy"] == 1 and waits["fetch_rate"] == 1 > goes_on["fetch_rate"]
    assert waits["hit_rate"] > goes_on["hit_rate"] > rows["lru"]["hit_rate"]
    assert waits["tpot_s"] >= goes_on["tpot_s"]


def test_counts_keep_and_load_what_was_asked_for_most(tmp_path: Path) -> None:
    """Each layer needs 0 and 1 nine times of ten: soon they are kept and predicted, and the tenth evicts none."""
    often, seldom = [[0, 1]] * 4, [[[2, 3], [4, 5], [6, 7]][layer % 3] for layer in range(4)]
    passes = [(0, False, [seldom if step % 10 == 9 else often]) for step in range(60)]
    study = make_study(make_trace(tmp_path / "trace", passes, SMALL))
    for name in ("brainstorm", "moe-infinity-lfu"):
        simulator = study.simulate(get_system(name), Memory("3/layer", 3).budget(study.geometry))
        decode = [counters.decode for counters in simulator.scheduler.counters]
        assert sum(each.hits for each in decode) == 54 * 8 - 8, "all but the first time"
        assert simulator.scheduler.cache.partitions[0] is simulator.scheduler.cache.partitions[3], (
            "one cache over all layers"
        )
        kept_of = simulator.scheduler.cache.kept_of
        assert all(kept_of(8 * layer + expert) for layer in range(4) for expert in (0, 1))


def test_a_lookahead_that_was_made_up_is_none(tmp_path: Path) -> None:
    trace = random_trace(tmp_path / "full", SMALL, 0, 10, is_full=True)
    system, manifest = "lru:prediction=lookahead", trace.manifest
    assert results(make_study(trace), (system,), 3)[system]["skipped"] is None
    lookahead = replace(manifest.fields["lookahead"], is_real=False, note="guessed")
    write_manifest(trace.folder, replace(manifest, fields={**manifest.fields, "lookahead": lookahead}))
    row = results(make_study(Trace.open(trace.folder)), (system,), 3)[system]
    assert row["skipped"] == f"system {system!r} needs what this trace does not really have: lookahead (guessed)"
    assert row["hit_rate"] is None
