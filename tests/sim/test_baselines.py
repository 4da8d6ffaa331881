"""The systems that others are compared with, on traces small enough to know what they must do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from expertly.scheduler.presets import SYSTEMS, get_system
from expertly.sim.study import Memory
from expertly.trace.manifest import write_manifest
from expertly.trace.reader import Trace
from tests.sim.drive import make_study, make_trace, random_passes, results, sized

BASELINES = ("deepspeed-index", "brainstorm", "mixtral-offloading", "moe-infinity-lfu")
LAYERS = sized(4, 8, 2)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    passes = random_passes(0, LAYERS, 60, prompt=5, num_requests=3)
    return make_trace(tmp_path_factory.mktemp("baselines") / "trace", passes, LAYERS, num_requests=3, is_full=True)


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("kept", [0, 1, 3, 8])
@pytest.mark.parametrize("system", BASELINES)
def test_none_starves_a_demand_at_any_budget(trace: Trace, system: str, kept: int, segments: int) -> None:
    """Down to the ring alone, where all that is predicted competes with what is needed for two places."""
    study = make_study(trace, segments=segments, matcher="inline")
    budget = Memory(f"{kept}/layer", kept).budget(study.geometry)
    simulator = study.simulate(get_system(system), budget)
    simulator.scheduler.check()
    decode = [counters.decode for counters in simulator.scheduler.counters]
    assert sum(one.demands for one in decode) == 3 * 60 * 4 * 2, "every token, layer and choice was served"
    assert sum(one.predicted for one in decode) > 0
    if kept == 8:
        hits, demands = sum(one.hits for one in decode), sum(one.demands for one in decode)
        assert hits > 0.8 * demands, "with room for all nothing is lost to guesses"


def test_index_is_right_as_often_as_chance_and_reads_the_most(trace: Trace) -> None:
    rows = results(make_study(trace, matcher="inline"), ("on-demand", *BASELINES), 3)
    index = rows["deepspeed-index"]
    assert index["recall"] == 1 and index["prediction_accuracy"] == pytest.approx(2 / 8), "it names all 8, 2 are needed"
    assert index["bytes_loaded"] == max(row["bytes_loaded"] for row in rows.values())
    assert index["goodpred"] == min(rows[name]["goodpred"] for name in BASELINES)


def test_mixtral_offloading_waits_for_what_it_foresees_and_hits_it(trace: Trace) -> None:
    """The lookahead of this trace is right: all that is foreseen is there, and what it takes is stall, not misses."""
    rows = results(
        make_study(trace, matcher="inline"),
        ("lru", "mixtral-offloading", "mixtral-offloading:transfer=asynchronous"),
        3,
    )
    waits, goes_on = rows["mixtral-offloading"], rows["mixtral-offloading:transfer=asynchronous"]
    assert waits["prediction_accuracy"] == 1 and waits["fetch_rate"] == 1 > goes_on["fetch_rate"]
    assert waits["hit_rate"] > goes_on["hit_rate"] > rows["lru"]["hit_rate"]
    assert waits["tpot_s"] >= goes_on["tpot_s"]


def test_counts_keep_and_load_what_was_asked_for_most(tmp_path: Path) -> None:
    """Each layer needs 0 and 1 nine times of ten: soon they are kept and foretold, and the tenth evicts none."""
    often, seldom = [[0, 1]] * 4, [[[2, 3], [4, 5], [6, 7]][layer % 3] for layer in range(4)]
    passes = [(0, False, [seldom if step % 10 == 9 else often]) for step in range(60)]
    study = make_study(make_trace(tmp_path / "trace", passes, LAYERS), matcher="inline")
    for name in ("brainstorm", "moe-infinity-lfu"):
        simulator = study.simulate(SYSTEMS[name], Memory("3/layer", 3).budget(study.geometry))
        decode = [counters.decode for counters in simulator.scheduler.counters]
        assert sum(one.hits for one in decode) == 54 * 8 - 8, "all but the first time"
        assert simulator.scheduler.caches[0] is simulator.scheduler.caches[3], "one cache over all layers"
        kept = simulator.scheduler.caches[0].kept
        assert {8 * layer + expert for layer in range(4) for expert in (0, 1)} <= set(kept)


# -- which token ids count -------------------------------------------------------------------------------------


def test_token_ids_that_were_made_up_are_no_token_ids(trace: Trace, tmp_path: Path) -> None:
    system = "lru:prediction=token-id"
    assert results(make_study(trace, matcher="inline"), (system,), 3)[system]["skipped"] is None
    passes = random_passes(0, LAYERS, 10)
    bare = make_trace(tmp_path / "bare", passes, LAYERS)
    manifest = bare.manifest
    token = replace(manifest.fields["token"], is_real=False, note="none: -1")
    write_manifest(bare.folder, replace(manifest, fields={**manifest.fields, "token": token}))
    row = results(make_study(Trace.open(bare.folder)), (system,), 3)[system]
    assert row["skipped"] == f"system {system!r} needs what this trace does not really have: token (none: -1)"
    assert row["hit_rate"] is None


# -- GOODPRED by layer and distance ----------------------------------------------------------------------------


def test_rows_tell_goodpred_by_layer_and_distance(trace: Trace) -> None:
    system = "lru:prediction=lookahead:distance=2"
    row = results(make_study(trace, matcher="inline"), (system,), 3)[system]
    assert [one["layer"] for one in row["layers"]] == [0, 1, 2, 3]
    assert row["layers"][0]["goodpred"] is None, "nothing looks ahead to the first layer"
    assert set(row["layers"][1]["goodpred_by_distance"]) == {"1"} and set(row["goodpred_by_distance"]) == {"1", "2"}
    for one in (row, *row["layers"][1:]):
        for k, goodpred in one["goodpred_by_distance"].items():
            assert goodpred == one["accuracy_by_distance"][k] * one["fetch_rate_by_distance"][k]
    assert results(make_study(trace, matcher="inline"), ("lru",), 3)["lru"]["layers"] is None
