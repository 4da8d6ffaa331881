"""Systems that predict, in the simulator: what they are shown, what they have learned, and what their time costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertly.policies.predictor.fmoe import FMoE
from expertly.scheduler.presets import get_system
from expertly.sim.hardware import PredictorCosts
from expertly.sim.schedule import Selection
from expertly.sim.study import Memory
from expertly.trace.reader import Trace
from tests.sim.drive import INFINITE, Pass, make_study, make_trace, random_passes, results, sized, toy

LAYERS = sized(4, 12, 2)
NO_TIME = PredictorCosts(0, float("inf"), float("inf"))
SYSTEMS = (
    *("fmoe", "fmoe:eviction=lru:semantic=no", "lru:prediction=lookahead", "lru:prediction=counts:distance=2"),
    *("moe-infinity", "moe-infinity:distance=3:admission=best"),
)


def random_trace(folder: Path, *, num_passes: int = 40) -> Trace:
    passes = random_passes(8, LAYERS, num_passes, prompt=5, num_requests=3)
    return make_trace(folder / "trace", passes, LAYERS, num_requests=3, is_full=True)


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


@pytest.mark.parametrize("kind", [random_trace, mixed_trace])
def test_a_predictor_that_takes_no_time_is_one_within_the_pass(kind: Any, tmp_path: Path) -> None:
    trace = kind(tmp_path)
    inline = results(make_study(trace, matcher="inline", segments=2), SYSTEMS, "40%")
    virtual = results(make_study(trace, toy(predictor=NO_TIME), segments=2), SYSTEMS, "40%")
    assert inline == virtual
    for name in (get_system(spec).name for spec in SYSTEMS):
        assert inline[name]["prefetched_bytes"] > 0, name
        assert inline[name]["predictions_late"] == inline[name]["contexts_dropped"] == 0


def test_a_predictor_slower_than_its_passes_is_of_no_use_and_no_harm(tmp_path: Path) -> None:
    trace = random_trace(tmp_path)
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


def test_the_slower_the_predictor_the_later_it_is(tmp_path: Path) -> None:
    trace = random_trace(tmp_path)
    served = []
    for call_ns in (0, 100, 300, 3000):
        hardware = toy(link=INFINITE, predictor=PredictorCosts(call_ns=call_ns))
        row = results(make_study(trace, hardware), ["lru:prediction=lookahead"], "40%")["lru:prediction=lookahead"]
        served.append((row["coverage"] or 0, -row["predictions_late"] - row["contexts_dropped"]))
    assert served == sorted(served, reverse=True), "less of use, more in vain"
    assert served[0][0] > 0.5 and served[-1][0] == 0


def test_a_lookahead_that_is_right_leaves_the_first_layer_to_miss(tmp_path: Path) -> None:
    passes = random_passes(1, LAYERS, 60)
    trace = make_trace(tmp_path / "trace", passes, LAYERS, is_full=True)
    name = "lru:prediction=lookahead"
    study = make_study(trace, toy(link=INFINITE), matcher="inline")
    row = results(study, [name], "50%")[name]
    assert row["prediction_accuracy"] == row["recall"] == row["accuracy"] == row["timeliness"] == 1.0
    counters = study.simulate(get_system(name), Memory("50%").budget(study.geometry)).scheduler.counters
    assert all(layer.decode.misses == 0 for layer in counters[1:]) and counters[0].decode.misses > 0


def test_maps_of_the_training_part_foretell_what_repeats(tmp_path: Path) -> None:
    trace = repeating_trace(tmp_path)
    name = "fmoe:select=top-k"
    study = make_study(trace, toy(link=INFINITE), matcher="inline", selection=Selection(split=(3, 1), seed=1))
    row = results(study, [name], "50%")[name]
    assert row["history"] == "filled from 3 requests" and row["requests"] == 1 and row["tokens"] == 10
    assert row["recall"] > 0.99, "the ten iterations are in the store"
    assert row["predictor"]["maps"] == 3 * 10 + 10
    assert row["predictor"]["semantic_score"] == pytest.approx(1, abs=1e-3)
    only_first = make_study(trace, toy(link=INFINITE), matcher="inline", selection=Selection(num_requests=1))
    empty = results(only_first, [name], "50%")[name]
    assert empty["history"] == "empty" and empty["predictor"]["maps"] == 10
    assert empty["recall"] < 0.9 and empty["coverage"] < row["coverage"]


def test_what_is_learned_is_learned_once_and_no_run_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = random_trace(tmp_path)
    learned: list[int] = []
    learn = FMoE.learn
    monkeypatch.setattr(
        FMoE, "learn", lambda self, history: learned.append(len(history.requests)) or learn(self, history)
    )
    study = make_study(trace, selection=Selection(split=(2, 1)))
    memories = [Memory("30%"), Memory("60%")]
    together = list(study.results(["fmoe", "fmoe:eviction=lru"], memories))
    assert sum(learned) == 2 * 45, "two systems, two budgets, one predictor"
    list(study.results(["fmoe:distance=1"], memories[:1]))
    assert sum(learned) == 2 * 2 * 45, "another distance is another store"
    again = list(make_study(trace, selection=Selection(split=(2, 1))).results(["fmoe"], memories[1:]))
    assert again[0] == next(row for row in together if (row["system"], row["memory"]) == ("fmoe", "60%"))


def test_rows_say_how_they_predicted(tmp_path: Path) -> None:
    study = make_study(random_trace(tmp_path), toy(predictor=NO_TIME))
    rows = results(study, ["lru", "fmoe:distance=2", "lru:prediction=popularity"], "40%")
    for name in ("lru", "belady", "resident"):
        row = rows[name]
        assert row["predictor"] is row["history"] is row["predictions_late"] is row["contexts_dropped"] is None
        assert row["prefetched_bytes"] == row["wasted_bytes"] == 0
    fmoe = rows["fmoe:distance=2"]
    assert fmoe["history"] == rows["lru:prediction=popularity"]["history"] == "empty"
    assert fmoe["predictor"]["trajectory_searches"] > 0 and fmoe["predictor"]["maps"] == 3 * 45
    assert -1 <= fmoe["similarity_correlation_trajectory"] <= 1 and -1 <= fmoe["similarity_correlation_semantic"] <= 1
    assert 0 <= fmoe["recall"] <= 1 and set(fmoe["accuracy_by_distance"]) == {"1", "2"}
    assert 0 < fmoe["wasted_bytes"] < fmoe["prefetched_bytes"] < fmoe["bytes_loaded"]


@pytest.mark.parametrize("segments", [1, 2])
def test_bytes_loaded_ahead_for_nothing_are_those_of_experts_that_were_not_needed(
    segments: int, tmp_path: Path
) -> None:
    """With a link that takes no time whatever is begun arrives: whole experts."""
    study = make_study(random_trace(tmp_path), toy(link=INFINITE), matcher="inline", segments=segments)
    counters = study.simulate(get_system("fmoe"), Memory("40%").budget(study.geometry)).scheduler.counters
    for layer in counters:
        for phase in (layer.prefill, layer.decode):
            wasted = (phase.prefetched - phase.prefetched_needed) * LAYERS[0].expert_nbytes
            assert phase.wasted_nbytes <= wasted and (segments > 1 or phase.wasted_nbytes == wasted)
    assert sum(layer.decode.wasted_nbytes for layer in counters) > 0


def test_a_trace_that_lacks_what_a_predictor_looks_at(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "trace", random_passes(8, LAYERS, 40), LAYERS)
    rows = results(make_study(trace), ["lru:prediction=lookahead", "fmoe"], "40%")
    assert "needs lookahead, which this trace lacks" in rows["lru:prediction=lookahead"]["skipped"]
    fmoe = rows["fmoe"]
    assert fmoe["skipped"] is None and fmoe["predictor"]["semantic_searches"] == 0
    assert fmoe["predictor"]["trajectory_searches"] > 0 and fmoe["similarity_correlation_semantic"] is None


def test_one_system_in_two_spellings_is_one_row(tmp_path: Path) -> None:
    study = make_study(random_trace(tmp_path, num_passes=5))
    names = ["fmoe:semantic=no:distance=2", "fmoe:distance=2:semantic=false", "belady"]
    found = [row["system"] for row in study.results(names, [Memory("40%")])]
    assert found == ["fmoe:distance=2:semantic=no", "belady", "belady-global", "oracle", "resident"]


def test_predictors_that_are_told_the_future_take_no_time(tmp_path: Path) -> None:
    """What they say is made from where the simulation is."""
    trace = random_trace(tmp_path)
    names = ["oracle", "modelled-lookahead"]
    slow = results(make_study(trace, toy(predictor=PredictorCosts(call_ns=10**6))), names, "40%")
    fast = results(make_study(trace, toy(predictor=NO_TIME)), names, "40%")
    assert slow == fast and slow["oracle"]["contexts_dropped"] == 0


def test_a_batch_is_predicted_for_all_of_its_requests(tmp_path: Path) -> None:
    trace = mixed_trace(tmp_path)
    names = ["fmoe", "fmoe:eviction=lru:select=top-k", "lru:prediction=counts", "lru:prediction=lookahead"]
    rows = results(make_study(trace, toy(link=INFINITE), matcher="inline"), names, "60%")
    for name in names:
        assert rows[name]["requests"] == 6 and rows[name]["coverage"] > 0, name
        assert rows[name]["bytes_loaded"] >= rows["belady-global"]["bytes_loaded"]
    assert rows["fmoe"]["predictor"]["maps"] == trace.num_rows, "a map a row"
    assert rows["lru:prediction=lookahead"]["recall"] == 1.0, "the union of what the rows' routers will choose"


def test_maps_are_the_rows_that_were_simulated(tmp_path: Path) -> None:
    trace = random_trace(tmp_path)
    study = make_study(trace, selection=Selection(num_tokens=50), matcher="inline")
    simulator = study.simulate(get_system("fmoe"), Memory("40%").budget(study.geometry))
    assert isinstance(simulator.predictor, FMoE)
    store = simulator.predictor.learned
    experts = trace.rows("experts", 0, 50)
    assert store.num_maps == 50
    np.testing.assert_array_equal(np.sort(store.requests[:50]), trace.rows("request", 0, 50))
    expected = np.stack([np.bincount(experts[:45, layer].ravel(), minlength=12) for layer in range(4)])
    np.testing.assert_array_equal(store.request_counts(0), expected)
