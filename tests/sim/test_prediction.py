"""Systems that predict: what they are shown, what they have learned, and what their time costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertly.core.costs import Link
from expertly.policies.predictor.fmoe import FMoE
from expertly.scheduler.presets import get_system
from expertly.sim.hardware import PredictorCosts
from expertly.sim.schedule import Selection
from expertly.sim.study import Memory
from expertly.trace.manifest import write_manifest
from expertly.trace.reader import Trace
from expertly.trace.schema import OPTIONAL
from expertly.trace.writer import TraceWriter
from tests.sim.drive import (
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
NO_TIME = PredictorCosts(0, float("inf"), float("inf"))
PREDICTING = (
    *("fmoe", "fmoe:eviction=lru:semantic=no", "lru:prediction=lookahead", "lru:prediction=counts:distance=2"),
    *("moe-infinity", "moe-infinity:distance=3:admission=best"),
)


def repeating_trace(folder: Path, num_requests: int = 4) -> Trace:
    """Every request runs through the same ten iterations."""
    ten = random_passes(5, LAYERS, 10)
    passes: list[Pass] = [(request, False, rows) for request in range(num_requests) for _, _, rows in ten]
    return make_trace(folder / "trace", passes, LAYERS, num_requests=num_requests, is_full=True)


def mixed_trace(folder: Path) -> Trace:
    """Batches whose requests come and go, prompts and answers in one pass."""
    rows = iter([row for _, _, of_pass in random_passes(4, LAYERS, 400) for row in of_pass])
    passes: list[Pass] = []
    for begin in range(25):
        running = [request for request in range(6) if 4 * request <= begin < 4 * request + 8]
        requests = [request for request in running for _ in range(1 if 4 * request < begin else 3)]
        passes.append((requests, [4 * request == begin for request in requests], [next(rows) for _ in requests]))
    return make_trace(folder / "trace", passes, LAYERS, num_requests=6, is_full=True)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_predictor_that_takes_no_time_is_one_within_the_pass(is_mixed: bool, tmp_path: Path) -> None:
    trace = mixed_trace(tmp_path) if is_mixed else random_trace(tmp_path / "trace", LAYERS, 8, 40, **THREE)
    inline = results(make_study(trace, predicting="inline", segments=2), PREDICTING, "40%")
    virtual = results(make_study(trace, toy(predictor=NO_TIME), segments=2), PREDICTING, "40%")
    assert inline == virtual
    for name in PREDICTING:
        assert inline[name]["prefetched_bytes"] > 0, name
        assert inline[name]["predictions_late"] == inline[name]["contexts_dropped"] == 0


def test_a_predictor_slower_than_its_passes_is_of_no_use_and_no_harm(tmp_path: Path) -> None:
    trace = random_trace(tmp_path / "trace", LAYERS, 8, 40, **THREE)
    slow = toy(predictor=PredictorCosts(call_ns=5_000))
    names = ["on-demand", "on-demand:prediction=fmoe", "on-demand:prediction=counts", "on-demand:prediction=lookahead"]
    rows = results(make_study(trace, slow), names, "40%")
    without = rows["on-demand"]
    for name in names[1:]:
        row = rows[name]
        assert row["contexts_dropped"] > 100
        if name.endswith("fmoe"):
            assert 10 < row["predictor"]["maps"] < 30, "of what it got to, it saw whole passes"
            assert row["predictor"]["left_out"] == 0
        else:
            assert row["predictions_late"] > 0
        for key in ("hit_rate", "tpot_s", "ttft_s", "stall_share", "bytes_loaded"):
            assert row[key] == without[key], (name, key)
        assert row["prefetched_bytes"] == 0 and row["prediction_accuracy"] is None


def test_maps_of_the_training_part_foretell_what_repeats(tmp_path: Path) -> None:
    trace = repeating_trace(tmp_path)
    name = "fmoe:select=top-k"
    study = make_study(trace, toy(link=INFINITE), predicting="inline", selection=Selection(split=(3, 1), seed=1))
    row = results(study, [name], "50%")[name]
    assert row["history"] == "filled from 3 requests" and row["requests"] == 1 and row["tokens"] == 10
    assert row["recall"] > 0.99, "the ten iterations are in the store"
    assert row["predictor"]["maps"] == 3 * 10 + 10
    assert row["predictor"]["semantic_score"] == pytest.approx(1, abs=1e-3)
    only_first = make_study(trace, toy(link=INFINITE), predicting="inline", selection=Selection(num_requests=1))
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
    study = make_study(random_trace(tmp_path / "trace", LAYERS, 8, 40, **THREE), toy(predictor=NO_TIME))
    rows = results(study, ["lru", "fmoe:distance=2", "lru:prediction=popularity", "belady", "resident"], "40%")
    for name in ("lru", "belady", "resident"):
        row = rows[name]
        assert row["predictor"] is row["history"] is row["predictions_late"] is row["contexts_dropped"] is None
        assert row["prefetched_bytes"] == row["wasted_bytes"] == 0 and row["layers"] is None
    fmoe = rows["fmoe:distance=2"]
    assert fmoe["history"] == rows["lru:prediction=popularity"]["history"] == "empty"
    assert fmoe["predictor"]["trajectory_searches"] > 0 and fmoe["predictor"]["maps"] == 3 * 45
    assert -1 <= fmoe["similarity_correlation_trajectory"] <= 1 and -1 <= fmoe["similarity_correlation_semantic"] <= 1
    assert 0 <= fmoe["recall"] <= 1 and set(fmoe["accuracy_by_distance"]) == {"1", "2"}
    assert [one["layer"] for one in fmoe["layers"]] == [0, 1, 2, 3] and "2" in fmoe["layers"][2]["goodpred_by_distance"]
    assert 0 < fmoe["wasted_bytes"] < fmoe["prefetched_bytes"] < fmoe["bytes_loaded"]


def test_a_trace_that_lacks_what_a_predictor_looks_at(tmp_path: Path) -> None:
    rows = results(
        make_study(random_trace(tmp_path / "trace", LAYERS, 8, 40)), ["lru:prediction=lookahead", "fmoe"], "40%"
    )
    assert "needs lookahead, which this trace lacks" in rows["lru:prediction=lookahead"]["skipped"]
    fmoe = rows["fmoe"]
    assert fmoe["skipped"] is None and fmoe["predictor"]["semantic_searches"] == 0
    assert fmoe["predictor"]["trajectory_searches"] > 0 and fmoe["similarity_correlation_semantic"] is None


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
    study = make_study(trace, toy(link=INFINITE), predicting="inline")
    row = results(study, [system], "60%")[system]
    assert row["predictions_late"] == 0
    counters = study.simulate(get_system(system), Memory("60%").budget(study.geometry)).scheduler.counters
    for counted in counters[:2]:
        right, total = counted.decode.predicted_needed, counted.decode.predicted
        assert right == total >= 2 * 59 * 2, "of each token of both requests"
    assert sum(counted.decode.misses for counted in counters[1:]) == 0
    assert counters[0].decode.misses <= 4, "of the first tokens: what a prompt predicts evicts nothing"
    assert counters[0].prefill.predicted == 2, "the second prompt came instead of the first request's next token"


def test_an_older_trace_knows_nothing_past_the_last_layer(tmp_path: Path) -> None:
    trace = random_trace(tmp_path / "full", LAYERS, 3, 60, **TWO)
    study = make_study(trace, toy(link=INFINITE), predicting="inline")
    rows = results(study, [NEXT_TOKEN, ON], "60%")
    row = rows[ON]
    assert row["prediction_accuracy"] == row["recall"] == row["accuracy"] == row["timeliness"] == 1.0
    assert rows[NEXT_TOKEN] | {"system": ON} == row
    counters = study.simulate(get_system(ON), Memory("60%").budget(study.geometry)).scheduler.counters
    assert all(layer.decode.misses == 0 for layer in counters[1:]) and counters[0].decode.misses > 0


@pytest.mark.parametrize("ahead", ["cache", "staging"])
def test_the_window_limits_how_far_down_the_scores_loading_goes(ahead: str, tmp_path: Path) -> None:
    """With a link that takes its time, few segments in flight are few prefetches; nothing is prefetched twice."""
    trace = knowing(random_trace(tmp_path / "full", LAYERS, 3, 60, **TWO), tmp_path / "knowing")
    study = make_study(trace, toy(), predicting="inline")
    loaded = []
    for window in (1, 8):
        name = f"lru:prediction=speculative:ahead={ahead}:window={window}"
        row = results(study, [name], "80%")[name]
        assert row["recall"] == 1.0 and row["bytes_loaded"] >= row["prefetched_bytes"]
        loaded.append(row["prefetched_bytes"])
    assert loaded == sorted(loaded) and loaded[0] < loaded[-1]


def test_prefetching_in_decode_only_leaves_prompts_alone(tmp_path: Path) -> None:
    study = make_study(random_trace(tmp_path / "full", LAYERS, 3, 60, **TWO), predicting="inline")
    always, in_decode = (row["phases"] for row in results(study, [ON, f"{ON}:prefetching=decode"], "60%").values())
    assert always["prefill"]["prefetched_bytes"] > 0 == in_decode["prefill"]["prefetched_bytes"]
    assert always["decode"]["prefetched_bytes"] > 0 < in_decode["decode"]["prefetched_bytes"]


# -- prefetch filters in the simulator ----------


SMALL = sized(4, 8, 2)
WRONG = "lru:prediction=random:width=4"


@pytest.fixture(scope="module")
def long_trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return random_trace(tmp_path_factory.mktemp("long") / "trace", SMALL, 3, 240, prompt=3, is_full=True)


@pytest.mark.parametrize("nbytes_per_s", [0.05e9, 0.2e9, 2e9])
def test_a_gate_is_about_as_fast_as_the_better_of_all_and_nothing(nbytes_per_s: float, long_trace: Trace) -> None:
    """It prefetches what is right and not what is wrong, and decides the same again."""
    machine = toy(link=Link(nbytes_per_s, 0, 0), layer_ns=200, iteration_ns=100)
    study, gated = make_study(long_trace, machine, predicting="inline"), ":gate=measured"
    rows = results(study, ["lru", ON, WRONG, ON + gated, WRONG + gated], "50%")
    for on in (ON, WRONG):
        row = rows[on + gated]
        if (on, nbytes_per_s) != (WRONG, 0.2e9):  # 1.05: what wrong prefetches evict is missed in later steps, too
            assert row["tpot_s"] < 1.03 * min(rows["lru"]["tpot_s"], rows[on]["tpot_s"])
        assert rows["lru"]["gate"] is rows[on]["gate"] is None
    if nbytes_per_s == 0.2e9:
        right, wrong = (rows[on + gated]["gate"] for on in (ON, WRONG))
        assert (right["state"], wrong["state"]) == ("on", "off")
        assert right["steps_with"] > 4 * right["steps_without"] and wrong["steps_without"] > 4 * wrong["steps_with"]
        again = make_study(long_trace, machine, predicting="inline")
        assert results(again, [ON + gated], "50%")[ON + gated] == rows[ON + gated]


# -- the systems that others are compared with, on traces small enough to know what they must do ----------


BASELINES = ("deepspeed-index", "brainstorm", "mixtral-offloading", "moe-infinity-lfu")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return random_trace(tmp_path_factory.mktemp("baselines") / "trace", SMALL, 0, 30, **THREE)


def test_index_is_right_as_often_as_chance_and_reads_the_most(trace: Trace) -> None:
    rows = results(make_study(trace, predicting="inline"), ("on-demand", *BASELINES), 3)
    index = rows["deepspeed-index"]
    assert index["recall"] == 1 and index["prediction_accuracy"] == pytest.approx(2 / 8), "it names all 8, 2 are needed"
    assert index["bytes_loaded"] == max(row["bytes_loaded"] for row in rows.values())
    assert index["goodpred"] == min(rows[name]["goodpred"] for name in BASELINES)


def test_mixtral_offloading_waits_for_what_it_predicts_and_hits_it(trace: Trace) -> None:
    """The lookahead of this trace is right: all that is predicted is there, and what it takes is stall, not misses."""
    rows = results(
        make_study(trace, predicting="inline"),
        ("lru", "mixtral-offloading", "mixtral-offloading:transfer=asynchronous"),
        3,
    )
    waits, goes_on = rows["mixtral-offloading"], rows["mixtral-offloading:transfer=asynchronous"]
    assert waits["prediction_accuracy"] == 1 and waits["fetch_rate"] == 1 > goes_on["fetch_rate"]
    assert waits["hit_rate"] > goes_on["hit_rate"] > rows["lru"]["hit_rate"]
    assert waits["tpot_s"] >= goes_on["tpot_s"]


def test_counts_keep_and_load_what_was_asked_for_most(tmp_path: Path) -> None:
    """Each layer needs 0 and 1 nine times of ten: soon they are kept and predicted, and the tenth evicts none."""
    often, seldom = [[0, 1]] * 4, [[[2, 3], [4, 5], [6, 7]][layer % 3] for layer in range(4)]
    passes = [(0, False, [seldom if step % 10 == 9 else often]) for step in range(60)]
    study = make_study(make_trace(tmp_path / "trace", passes, SMALL), predicting="inline")
    for name in ("brainstorm", "moe-infinity-lfu"):
        simulator = study.simulate(get_system(name), Memory("3/layer", 3).budget(study.geometry))
        decode = [counters.decode for counters in simulator.scheduler.counters]
        assert sum(one.hits for one in decode) == 54 * 8 - 8, "all but the first time"
        assert simulator.scheduler.cache.partitions[0] is simulator.scheduler.cache.partitions[3], (
            "one cache over all layers"
        )
        kept = simulator.scheduler.cache.partitions[0].kept
        assert {8 * layer + expert for layer in range(4) for expert in (0, 1)} <= set(kept)


# -- which token ids count -------------------------------------------------------------------------------------


def test_token_ids_that_were_made_up_are_no_token_ids(trace: Trace, tmp_path: Path) -> None:
    system = "lru:prediction=token-id"
    assert results(make_study(trace, predicting="inline"), (system,), 3)[system]["skipped"] is None
    bare = random_trace(tmp_path / "bare", SMALL, 0, 10)
    manifest = bare.manifest
    token = replace(manifest.fields["token"], is_real=False, note="none: -1")
    write_manifest(bare.folder, replace(manifest, fields={**manifest.fields, "token": token}))
    row = results(make_study(Trace.open(bare.folder)), (system,), 3)[system]
    assert row["skipped"] == f"system {system!r} needs what this trace does not really have: token (none: -1)"
    assert row["hit_rate"] is None
