"""What a simulation must give because it can be worked out without one."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from expertly.scheduler.counters import PhaseCounters
from expertly.scheduler.systems import SYSTEMS
from expertly_lab import synth
from expertly_lab.sim.hardware import Link
from expertly_lab.sim.simulator import Simulator
from expertly_lab.sim.study import Memory, Study
from expertly_lab.trace.reader import Trace
from expertly_lab.trace.schema import TraceLayer
from lab.tests.closed_forms import loop, most_hits_of_loop, working_set
from lab.tests.sim.drive import (
    INFINITE,
    can_run,
    make_study,
    make_trace,
    random_trace,
    results,
    sized,
    toy,
    with_bounds,
)

DEMAND_ONLY = [name for name, each in SYSTEMS.items() if each.prediction == "none" and not each.keeps_everything]
ASYNCHRONOUS = [name for name, system in SYSTEMS.items() if system.prediction != "none"]


def synthetic(folder: Path, workload: synth.SynthWorkload) -> Trace:
    synth.write_workload(folder, workload, model="made up")
    return Trace.open(folder)


def ran(study: Study, system: str, memory: str) -> Simulator:
    return study.simulate(SYSTEMS[system], Memory(memory).budget(study.geometry))


def total(simulator: Simulator) -> PhaseCounters:
    counters = PhaseCounters()
    for layer in simulator.scheduler.counters:
        counters.add(layer.prefill)
        counters.add(layer.decode)
    return counters


def test_times_of_a_hand_computed_trace_are_exact_to_the_nanosecond(tmp_path: Path) -> None:
    """Experts of 40 bytes, 5 slots: 2 for staging and 3 kept. Computing one: 40 ns; loading one occupies the link
    80 ns, 7 pass before an idle link begins, and 10 when it is taken.

    0     pass 0, layer 0: 100 ns of dense; both experts are missing and asked for at 100; they arrive at 100 + 7 + 80
          = 187 and 267, are taken and computed from 187 to 237 and from 267 to 317: 87 + 30 ns stalled.
    317   layer 1: the same from 417 on, until 634; expert 0 of layer 0 went for it. The head takes until 1634.
    1634  pass 1, layer 0 needs 0 and 2: both absent again, as above until 1951; (0, 1) and (1, 0) went.
    1951  layer 1 needs 0 (absent) and 1 (here): asked for at 2051, 1 is computed until 2091 while 0 loads until
          2051 + 7 + 80 = 2138, and is taken and computed until 2188: 47 ns stalled. The head takes until 3188.
    """
    layers = sized(2, 4, 2, width=10)
    passes = [(0, False, [[[0, 1], [0, 1]]]), (0, False, [[[0, 2], [0, 1]]])]
    study = make_study(make_trace(tmp_path / "trace", passes, layers), toy(miss_ns=10))
    row = results(study, ["on-demand"], "62.5%")["on-demand"]
    assert row["tpot_s"] * 1e9 == pytest.approx(3188 / 2, abs=1e-6)
    assert row["stall_share"] == pytest.approx((3 * (87 + 30) + 47) / 3188)
    assert (row["bytes_loaded"], row["hit_rate"], row["ttft_s"]) == (7 * 40, 1 / 8, None)
    assert row["memory_bytes"] == 5 * 40


def test_ttft_of_a_hand_computed_prompt(tmp_path: Path) -> None:
    """Two rows of a prompt choose experts 0 and 1 of one layer of 3; all three kept, none here: 100 dense, 87 until
    the first is there, 40 to compute, 40 until the second, 40, 1000 for the head."""
    layers = sized(1, 3, 1, width=10)
    passes = [(0, True, [[[0]], [[1]]]), (0, False, [[[0]]])]
    study = make_study(make_trace(tmp_path / "trace", passes, layers))
    row = results(study, ["lru"], "100%")["lru"]
    assert row["ttft_s"] * 1e9 == pytest.approx(100 + 87 + 40 + 40 + 40 + 1000)
    assert row["tpot_s"] * 1e9 == pytest.approx(100 + 40 + 1000)
    assert row["hit_rate"] == 1.0, "in decode alone"


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_with_room_for_the_working_set_there_are_cold_misses_only(segments: int, tmp_path: Path) -> None:
    trace = synthetic(tmp_path / "trace", working_set(3, 16, 2, 100, 6))
    study = make_study(trace, segments=segments)
    expected = 3 * (100 * 2 - 6)
    for name, row in results(study, [*DEMAND_ONLY, "belady", "belady-global"], 6).items():
        assert row["hit_rate"] == pytest.approx(expected / (3 * 100 * 2)), name


def test_all_of_the_memory_is_enough_for_every_system(tmp_path: Path) -> None:
    layers = sized(2, 8, 2)
    trace = random_trace(tmp_path / "trace", layers, 3, 60, prompt=5, is_full=True)
    study = make_study(trace)
    experts = trace.rows("experts", 0, trace.num_rows)
    distinct = sum(len(np.unique(experts[:, layer])) for layer in range(2)) * layers[0].expert_nbytes
    rest = ("modelled-lookahead", "pre-gated")  # one predicts wrong, one keeps nothing
    again = {"moepic": layers[0].expert_nbytes}  # begins with halves: what then lies in several places is dropped
    for name, row in results(study, can_run(trace), "100%").items():
        least = 0 if name == "resident" else distinct
        assert least <= row["bytes_loaded"] <= least + again.get(name, 0) or name in rest, name


def test_belady_reaches_the_known_optimum_of_a_loop(tmp_path: Path) -> None:
    workload = loop(2, 16, 2, 120)
    study = make_study(synthetic(tmp_path / "trace", workload))
    for capacity in (4, 8, 12):
        expected = most_hits_of_loop(workload, capacity)
        # The optimum keeps the running token's experts beside nothing; belady streams them through staging slots: it
        # hits as if it had K more.
        rows = results(study, ["lru", "belady"], capacity)
        assert rows["lru"]["hit_rate"] == 0, "a loop is LRU's worst case"
        actual = rows["belady"]["hit_rate"] * 2 * 120 * 2
        assert expected <= actual <= most_hits_of_loop(workload, capacity + 2)


@pytest.mark.parametrize(("seed", "prompt", "segments"), [(0, 0, 1), (1, 0, 4), (2, 4, 2)])
def test_nothing_loads_fewer_bytes_than_global_belady(seed: int, prompt: int, segments: int, tmp_path: Path) -> None:
    layers = sized(3, 12, 2)
    trace = random_trace(tmp_path / "trace", layers, seed, 25, prompt=prompt, num_requests=2, is_full=True)
    study, systems = make_study(trace, segments=segments), can_run(trace)
    assert {"fmoe", "adapmoe", "belady"} <= set(systems)
    for memory in ("10%", "50%"):
        rows = results(study, dict.fromkeys([*systems, "belady-global"]), memory)
        least = rows["belady-global"]["bytes_loaded"]
        for name in set(systems) - {"resident"}:
            assert rows[name]["bytes_loaded"] >= least, (name, memory)


@pytest.mark.parametrize(("workload", "segments"), [("random", 1), ("zipf", 2), ("cyclic", 4), ("random", 4)])
def test_no_demand_only_system_hits_more_than_belady_in_its_scope(workload: str, segments: int, tmp_path: Path) -> None:
    layers = sized(2, 12, 2)
    if workload == "random":
        trace = random_trace(tmp_path / "trace", layers, 5, 120)
    else:
        made = loop(2, 12, 2, 120) if workload == "cyclic" else synth.zipf(2, 12, 2, 120, keep=0.3)
        trace = synthetic(tmp_path / "trace", made)
    study = make_study(trace, segments=segments)
    for memory in ("20%", "50%"):
        rows = results(study, [*DEMAND_ONLY, "belady", "belady-global"], memory)
        for name in DEMAND_ONLY:
            bound = "belady-global" if SYSTEMS[name].scope == "global" else "belady"
            assert rows[name]["byte_hit_rate"] <= rows[bound]["byte_hit_rate"] + 1e-12, (name, memory)


@pytest.mark.parametrize("segments", [1, 2])
def test_oracle_never_stalls_on_an_infinite_link(segments: int, tmp_path: Path) -> None:
    layers = sized(3, 8, 2)
    trace = random_trace(tmp_path / "trace", layers, 7, 80, prompt=6, num_requests=2)
    rows = with_bounds(make_study(trace, toy(link=INFINITE), segments=segments), ["oracle"], "30%")
    assert rows["oracle"]["stall_share"] == 0
    assert rows["oracle"]["tpot_s"] == rows["oracle"]["floor_tpot_s"] == rows["resident"]["tpot_s"]


@pytest.mark.parametrize(("rate", "segments"), [(0.05e9, 1), (0.5e9, 4), (4e9, 2)])
def test_no_system_beats_the_floor(rate: float, segments: int, tmp_path: Path) -> None:
    layers = sized(3, 12, 2)
    trace = random_trace(tmp_path / "trace", layers, 11, 40, is_full=True)
    study = make_study(trace, toy(link=Link(rate, 7)), segments=segments)
    for memory in ("15%", "40%"):
        for name, row in with_bounds(study, can_run(trace), memory).items():
            assert row["tpot_s"] >= row["floor_tpot_s"] > 0, (name, memory)


@pytest.mark.parametrize("prompt", [0, 5])
def test_a_faster_link_never_makes_it_slower(prompt: int, tmp_path: Path) -> None:
    layers = sized(2, 10, 2)
    trace = random_trace(tmp_path / "trace", layers, 4, 30, prompt=prompt, num_requests=2)
    rates = (0.1e9, 0.2e9, 0.4e9, 1.6e9)
    result = [results(make_study(trace, toy(link=Link(r, 40)), segments=2), DEMAND_ONLY, "30%") for r in rates]
    for name in DEMAND_ONLY:
        for slow, fast in pairwise(rows[name] for rows in result):
            assert fast["tpot_s"] <= slow["tpot_s"] and fast["bytes_loaded"] == slow["bytes_loaded"], name
            assert (fast["ttft_s"] or 0) <= (slow["ttft_s"] or 0), name


@pytest.mark.parametrize("segments", [1, 4])
def test_stalls_and_computing_are_all_the_time_there_is(segments: int, tmp_path: Path) -> None:
    layers = sized(2, 10, 2)
    trace = random_trace(tmp_path / "trace", layers, 6, 25, prompt=3)
    study = make_study(trace, segments=segments)
    fast = make_study(trace, toy(link=INFINITE), segments=segments)
    for system in (*DEMAND_ONLY, *ASYNCHRONOUS, "resident"):
        memory = "100%" if system == "resident" else "30%"
        simulator = ran(study, system, memory)
        counters, metrics = total(simulator), simulator.metrics
        if segments == 1:  # then an expert is one span, whatever happens
            experts_ns = counters.demands * layers[0].expert_nbytes  # read once a pass, however many its tokens
            assert metrics.busy_ns - metrics.stall_ns == experts_ns + (1 + 25) * (2 * 100 + 1000), system
        assert ran(fast, system, memory).metrics.stall_ns == 0, system
        assert metrics.stall_ns > 0 or system in ("resident", "oracle"), system


def test_without_sizes_hits_are_those_with_sizes(tmp_path: Path) -> None:
    layers = sized(2, 12, 2)
    bare = [TraceLayer(layer.num_experts, layer.top_k) for layer in layers]
    sized_trace, bare_trace = (
        random_trace(tmp_path / "sized", layers, 9, 40),
        random_trace(tmp_path / "bare", bare, 9, 40),
    )
    for segments in (1, 4):
        known, unknown = (make_study(trace, segments=segments) for trace in (sized_trace, bare_trace))
        with_sizes, without = (results(study, [*DEMAND_ONLY, "belady"], "30%") for study in (known, unknown))
        for name in (*DEMAND_ONLY, "belady"):
            assert without[name]["hit_rate"] == with_sizes[name]["hit_rate"] is not None
            assert without[name]["partial_hit_rate"] == with_sizes[name]["partial_hit_rate"]
            assert without[name]["tpot_s"] is without[name]["bytes_loaded"] is without[name]["memory_bytes"] is None


def test_by_id_loads_take_the_sum_of_loads_and_computing(tmp_path: Path) -> None:
    """Three absent experts: asked for together they are there at 187, 267 and 347, and the last is computed until 387.
    One by one, each takes 87 to load and 40 to compute: 100 + 3 x 127."""
    layers = sized(1, 4, 3, width=10)
    study = make_study(make_trace(tmp_path / "trace", [(0, False, [[[2, 0, 1]]])], layers))
    together, by_id = (results(study, ["lru", "lru:loop=by-id"], "100%")[name] for name in ("lru", "lru:loop=by-id"))
    assert together["tpot_s"] * 1e9 == pytest.approx(387 + 1000)
    assert by_id["tpot_s"] * 1e9 == pytest.approx(100 + 3 * (87 + 40) + 1000)
    assert by_id["stall_share"] == pytest.approx(3 * 87 / 1481)
    assert together["bytes_loaded"] == by_id["bytes_loaded"] == 3 * 40


def test_by_id_an_expert_may_go_for_another_of_its_layer(tmp_path: Path) -> None:
    """Two places hold 2 and 3. Of 0, 1, 2 and 3 the first two take these places, so that all four are loaded."""
    layers = sized(1, 4, 2, width=10)
    trace = make_trace(tmp_path / "trace", [(0, False, [[[2, 3]]]), (0, False, [[[0, 1]], [[2, 3]]])], layers)
    rows = results(make_study(trace), ["lru", "lru:loop=by-id"], 2)
    assert rows["lru"]["bytes_loaded"] == (2 + 2) * 40 and rows["lru:loop=by-id"]["bytes_loaded"] == (2 + 4) * 40
