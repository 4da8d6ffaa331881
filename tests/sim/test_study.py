"""Systems x budgets: which runs there are, over which budgets, with which storage, and what is said of them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertly.core.costs import CodecCosts, Link
from expertly.core.errors import BudgetError, ConfigError, HardwareError
from expertly.core.geometry import Geometry
from expertly.core.processes import in_processes
from expertly.lab import synth
from expertly.lab.compare.simulated import TokenTimelines
from expertly.scheduler.presets import SYSTEMS, get_system
from expertly.sim.hardware import Hardware, PredictorCosts
from expertly.sim.schedule import Selection
from expertly.sim.study import Memory
from expertly.trace.reader import Trace
from expertly.trace.schema import TraceLayer
from tests.sim.drive import INFINITE, make_study, make_trace, measured, random_trace, results, sized, toy, with_bounds

LAYERS = sized(3, 8, 2)
BARE = [TraceLayer(one.num_experts, one.top_k) for one in LAYERS]


def small(folder: Path, **settings: int) -> Trace:
    return random_trace(folder / "trace", LAYERS, 0, 12, **settings)


def test_budgets_are_the_engines() -> None:
    geometry = Geometry(LAYERS, 2)
    segment = 24
    whole = Memory("50%").budget(geometry)
    assert whole.pool_slots() == [24] and whole.staging_slots == (4,)
    assert Memory(f"{10 * segment}").budget(geometry).pool_slots() == [10]
    kept = Memory("3/layer", 3).budget(geometry)
    assert (kept.layer_quotas, kept.kept_slots, kept.staging_slots) == ((6, 6, 6), (18,), (4,))
    assert kept.memory_nbytes == 22 * segment


def test_a_budget_that_cannot_be_is_refused_before_anything_runs(tmp_path: Path) -> None:
    study = make_study(small(tmp_path))
    rows = study.results(["lru"], [Memory("50%"), Memory("1%")])
    with pytest.raises(
        BudgetError, match=r"memory='1%': below the staging slots .* the least is 8\.34% of the experts \(96 bytes"
    ):
        next(rows)
    assert Memory("8.34%").budget(study.geometry).kept_slots == (0,)
    with pytest.raises(ConfigError, match="system='no'"):
        next(study.results(["no"], [Memory("50%")]))


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="its \\[compute\\] was measured for toy"):
        make_study(small(tmp_path), measured())
    trace = random_trace(tmp_path / "bare", BARE, 0, 5)
    assert results(make_study(trace, measured()), ["lru"], "50%")["lru"]["hit_rate"] is not None, "no times, no matter"


def test_prompts_alone_have_a_ttft_and_nothing_of_decode(tmp_path: Path) -> None:
    trace = random_trace(tmp_path / "trace", LAYERS, 0, 0, prompt=9)
    for name, row in with_bounds(make_study(trace), ["lru"], "50%").items():
        assert row["ttft_s"] > 0 and row["stall_share"] is not None and row["requests"] == 1, name
        assert row["tpot_s"] is row["floor_tpot_s"] is row["hit_rate"] is row["byte_hit_rate"] is None


def test_resident_runs_once_for_all_budgets(tmp_path: Path) -> None:
    told: list[str] = []
    study = make_study(small(tmp_path), progress=lambda what, done, total: told.append(f"{what} of {total}"))
    rows = [row for rows in study.results(["lru"], [Memory("30%"), Memory("60%")]) for row in rows]
    residents = [row for row in rows if row["system"] == "resident"]
    assert [row.pop("memory") for row in residents] == ["30%", "60%"] and residents[0] == residents[1]
    assert told == [
        *(f"{name}, 30% of 12" for name in ("lru", "belady", "belady-global", "oracle")), "resident of 12",
        *(f"{name}, 60% of 12" for name in ("lru", "belady", "belady-global", "oracle")),
    ]  # fmt: skip


def test_without_sizes_what_is_prefetched_is_there_at_once(tmp_path: Path) -> None:
    trace = random_trace(tmp_path / "bare", BARE, 0, 30)
    rows = results(make_study(trace, Hardware.read("laptop-nvme")), ["modelled-lookahead", "oracle"], "40%")
    assert rows["oracle"]["timeliness"] == rows["modelled-lookahead"]["timeliness"] == 1.0


def test_each_requests_hit_rate_is_of_its_own_decode(tmp_path: Path) -> None:
    same = [[[0, 1]] * 3]
    passes = [(0, False, same)] * 3 + [(1, True, same), (1, False, same), (2, True, same)]
    row = results(make_study(make_trace(tmp_path / "trace", passes, LAYERS, num_requests=3)), ["lru"], "70%")["lru"]
    assert row["hit_rate_by_request"] == [2 / 3, 1.0, None], "cold for one token of three, warm, and a prompt alone"
    assert row["hit_rate"] == 3 / 4


def test_processes_find_the_same_rows(tmp_path: Path) -> None:
    """With what predictors learn from a training part, and the timelines of one token."""
    trace = random_trace(tmp_path / "trace", LAYERS, 0, 60, prompt=4, num_requests=4)
    found = []
    for jobs in (1, 2):
        timelines = TokenTimelines(5, "60%")
        study = make_study(trace, selection=Selection(split=(1, 1)), chrome=timelines)
        rows = list(study.results(["lru", "fmoe:update=no", "lru:segments=2"], [Memory("40%"), Memory("60%")], jobs))
        found.append((rows, study.wants, timelines.of("fmoe:update=no", 1)))
    assert found[0] == found[1]
    assert [len(rows) for rows in found[0][0]] == [11, 11] and "scores" in found[0][1] and found[0][2]


@pytest.mark.parametrize(("worth", "begun"), [(1, [2]), (10**6, [])])
def test_long_studies_share_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worth: int, begun: list[int]
) -> None:
    """As many as there are processors, where simulating takes longer than starting them."""
    noted: list[int] = []

    def noting(jobs: int, *rest: Any) -> Iterator[Any]:
        noted.append(jobs)
        return in_processes(jobs, *rest)

    monkeypatch.setattr("expertly.sim.study.in_processes", noting)
    monkeypatch.setattr("expertly.sim.study.granted_cpus", lambda: 2)
    monkeypatch.setattr("expertly.sim.study.WORTH_PROCESSES", worth)
    rows = list(make_study(small(tmp_path)).results(["lru", "lfu"], [Memory("40%")], None))
    assert noted == begun and {"lru", "lfu"} < {row["system"] for row in rows[0]}


def test_one_row_alone_is_that_of_all_results(tmp_path: Path) -> None:
    trace = small(tmp_path, prompt=4)
    together = with_bounds(make_study(trace), ["lru"], "40%")["lru"]
    alone = make_study(trace).row(SYSTEMS["lru"], Memory("40%"))
    assert alone.pop("floor_tpot_s") is None and together.pop("floor_tpot_s") is not None
    assert alone == together


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    """Of what Python and NumPy allocate; one more shard takes no more."""
    made = synth.zipf(2, 16, 2, 1600, keep=0.3)
    synth.write_workload(tmp_path / "trace", made, model="made up")
    trace = Trace.open(tmp_path / "trace")
    peaks = []
    for num_tokens in (400, 600, 1600):  # the first run fills caches
        study = make_study(trace, toy(), selection=Selection(num_tokens=num_tokens))
        tracemalloc.start()
        study.simulate(SYSTEMS["belady"], Memory("30%").budget(study.geometry))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < peaks[1] + 0.4e6, peaks  # every iteration kept would take 0.8e6 more


# -- whole runs with compressed experts on disk ----------


PLANES = "planes"


def only_loading(link: Link, costs: CodecCosts) -> Hardware:
    """A machine that computes in no time."""
    fast = {"memory_nbytes_per_s": float("inf"), "launch_ns": 0, "layer_ns": 0, "iteration_ns": 0}
    return toy(**fast, link=link, codec=costs)


def loop(folder: Path, num_passes: int = 24) -> Any:
    """Each token needs two experts of each layer, and these again after four tokens: LRU with less room misses all."""
    passes = [(0, False, [[[2 * (i % 4), 2 * (i % 4) + 1]] * 3]) for i in range(num_passes)]
    return make_trace(folder, passes, LAYERS)


def one(trace: Any, hardware: Hardware, codec: str, memory: str, system: str = "lru") -> dict[str, Any]:
    return make_study(trace, hardware, codec=codec).row(SYSTEMS[system], Memory(memory))


def test_a_run_bound_by_the_link_takes_the_ratio_of_the_time(tmp_path: Path) -> None:
    trace, hardware = loop(tmp_path / "trace"), only_loading(Link(0.5e9, 0, 0), CodecCosts(0.5, float("inf"), 1))
    plain, coded = (one(trace, hardware, codec, "40%") for codec in ("none", PLANES))
    assert coded["tpot_s"] == pytest.approx(plain["tpot_s"] / 2) and plain["tpot_s"] * 1e9 == pytest.approx(6 * 96)
    assert coded["bytes_loaded"] == plain["bytes_loaded"] == 24 * 6 * 48
    assert (plain["bytes_read"], coded["bytes_read"]) == (None, 24 * 6 * 24)


def test_decisions_do_not_depend_on_how_experts_are_stored(tmp_path: Path) -> None:
    trace = random_trace(tmp_path / "trace", LAYERS, 1, 40, prompt=3)
    hardware = only_loading(INFINITE, CodecCosts(0.5, float("inf"), 3))
    for system in ("lru", "lfu", "on-demand", "oracle", "belady"):
        plain, coded = (one(trace, hardware, codec, "40%", system) for codec in ("none", PLANES))
        assert {**plain, "bytes_read": 0} == {**coded, "bytes_read": 0}, system
        assert coded["bytes_read"] * 2 == coded["bytes_loaded"], system


def test_a_codec_that_cannot_be_is_refused(tmp_path: Path) -> None:
    trace = loop(tmp_path / "trace")
    with pytest.raises(ConfigError, match=r"^codec='zip': unknown; accepted: none, planes"):
        make_study(trace, codec="zip")
    with pytest.raises(ConfigError, match=r"^codec='planes': on hardware 'toy' all experts lie decoded in host memory"):
        make_study(trace, toy(disk=INFINITE), codec=PLANES)
    with pytest.raises(ConfigError, match="codec='planes': the trace does not know its experts' sizes"):
        replace(make_study(trace), layers=None, codec=PLANES)


@pytest.mark.parametrize(
    ("cost", "name"),
    [
        ("decide_ns", "expertly"),
        ("observe_ns", "moe-infinity"),
        ("observe_light_ns", "brainstorm"),
        ("plan_ns", "moe-infinity-lfu"),
    ],
)
def test_policies_and_predictors_take_their_measured_time_of_every_layer(cost: str, name: str, tmp_path: Path) -> None:
    """What they decide is the same, and so are the times of other systems."""
    layers, num_layers = sized(2, 8, 2), 2
    hardware, trace = replace(measured(), link=INFINITE), random_trace(tmp_path / "trace", layers, 0, 12)
    assert hardware.compute is not None
    slower = replace(hardware, compute=replace(hardware.compute, **{cost: 1000}))
    rows = [
        {one: make_study(trace, machine).row(SYSTEMS[one], Memory("50%")) for one in ("lru", name, "resident")}
        for machine in (hardware, slower)
    ]
    took = {one: rows[1][one]["tpot_s"] - rows[0][one]["tpot_s"] for one in rows[0]}
    assert took == {"lru": 0, name: pytest.approx(num_layers * 1e-6), "resident": 0}
    assert all(rows[0][one]["bytes_loaded"] == rows[1][one]["bytes_loaded"] for one in took)


def test_a_pass_that_waits_is_not_slowed_by_its_predictor_meanwhile(tmp_path: Path) -> None:
    layers, num_layers = sized(2, 8, 2), 2
    trace = random_trace(tmp_path / "trace", layers, 0, 12)

    def took_s(link: Link) -> float:
        tpot_s = []
        for observe_ns in (0, 1000):
            machine = replace(measured(), link=link, predictor=PredictorCosts(1))
            assert machine.compute is not None
            machine = replace(machine, compute=replace(machine.compute, observe_ns=observe_ns))
            tpot_s.append(make_study(trace, machine).row(SYSTEMS["moe-infinity"], Memory("50%"))["tpot_s"])
        return tpot_s[1] - tpot_s[0]

    assert took_s(INFINITE) == pytest.approx(num_layers * 1e-6)
    assert 0 < took_s(Link(1e6, 0, 0)) < num_layers * 0.7e-6, "of layers that load nothing"


def test_what_a_predictor_takes_of_a_layer_leaves_it_time_to_predict(tmp_path: Path) -> None:
    """A half of it is over when the layer ends: later, nothing is prefetched for the next one."""
    layers = sized(2, 8, 2)
    machine, trace = replace(measured(), link=INFINITE), random_trace(tmp_path / "trace", layers, 0, 12)
    assert machine.compute is not None

    def prefetched_nbytes(call_ns: int, observe_ns: int) -> int:
        compute = replace(machine.compute, observe_ns=observe_ns)
        study = make_study(trace, replace(machine, compute=compute, predictor=PredictorCosts(call_ns)))
        return int(study.row(SYSTEMS["deepspeed-index"], Memory("50%"))["prefetched_bytes"])

    at_once = prefetched_nbytes(1, 0)
    assert prefetched_nbytes(10**6, 10**7) == at_once > 0 == prefetched_nbytes(10**6, 0)
    assert prefetched_nbytes(10**6, 19 * 10**5) == 0, "half of it is less than a prediction takes"


def test_a_pass_that_predicts_itself_waits_for_no_thread(tmp_path: Path) -> None:
    """A synchronous system's predictor; the other's thread takes `call_ns` all the same."""
    layers = sized(2, 8, 2)
    machine, trace = replace(measured(), link=INFINITE), random_trace(tmp_path / "trace", layers, 0, 12)

    def tpot_s(name: str, costs: PredictorCosts) -> float:
        row = make_study(trace, replace(machine, predictor=costs)).row(get_system(name), Memory("50%"))
        return float(row["tpot_s"])

    thread, inline = PredictorCosts(9000), PredictorCosts(9000, inline_ns=1000)
    assert tpot_s("moe-infinity-lfu", thread) - tpot_s("moe-infinity-lfu", inline) > 2 * 7e-6
    assert tpot_s("brainstorm", thread) == tpot_s("brainstorm", inline)
    light = replace(thread, inline_ns=10**9, inline_light_ns=1000)
    assert tpot_s("moe-infinity-lfu", light) == tpot_s("moe-infinity-lfu", inline), "it goes by counts alone"
    assert tpot_s("moe-infinity:transfer=synchronous", light) > 1


@pytest.mark.parametrize(("name", "is_light"), [("brainstorm", True), ("moe-infinity", False)])
def test_what_predicts_by_counts_alone_takes_a_time_of_its_own(name: str, is_light: bool, tmp_path: Path) -> None:
    layers, slow = sized(2, 8, 2), 10**9
    machine, trace = replace(measured(), link=INFINITE), random_trace(tmp_path / "trace", layers, 0, 12)
    for costs, is_late in (
        (PredictorCosts(1, light_ns=slow), is_light),
        (PredictorCosts(slow, light_ns=1), not is_light),
    ):
        row = make_study(trace, replace(machine, predictor=costs)).row(SYSTEMS[name], Memory("50%"))
        assert (row["predictions_late"] + row["contexts_dropped"] > 0) == is_late
