"""Systems x budgets: which runs there are, over which budgets, with which storage, and what is said of them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from expertly.core.errors import BudgetError, ConfigError
from expertly.core.geometry import Geometry
from expertly.scheduler.systems import SYSTEMS
from expertly_lab import synth
from expertly_lab.sim.hardware import Hardware
from expertly_lab.sim.processes import as_finished
from expertly_lab.sim.schedule import Selection
from expertly_lab.sim.study import Memory
from expertly_lab.trace.reader import Trace
from expertly_lab.trace.schema import TraceLayer
from lab.tests.sim.drive import make_study, make_trace, random_trace, results, sized, toy, with_bounds

LAYERS = sized(3, 8, 2)
BARE = [TraceLayer(layer.num_experts, layer.top_k) for layer in LAYERS]


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


def test_prompts_alone_have_a_ttft_and_nothing_of_decode(tmp_path: Path) -> None:
    trace = random_trace(tmp_path / "trace", LAYERS, 0, 0, prompt=9)
    for name, row in with_bounds(make_study(trace), ["lru"], "50%").items():
        assert row["ttft_s"] > 0 and row["stall_share"] is not None and row["requests"] == 1, name
        assert row["tpot_s"] is row["floor_tpot_s"] is row["hit_rate"] is row["byte_hit_rate"] is None


def test_resident_runs_once_for_all_budgets(tmp_path: Path) -> None:
    message: list[str] = []
    study = make_study(small(tmp_path), progress=lambda text, done, total: message.append(f"{text} of {total}"))
    rows = [row for rows in study.results(["lru"], [Memory("30%"), Memory("60%")]) for row in rows]
    residents = [row for row in rows if row["system"] == "resident"]
    assert [row.pop("memory") for row in residents] == ["30%", "60%"] and residents[0] == residents[1]
    assert message == [
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
    """With what predictors learn from a training part."""
    trace = random_trace(tmp_path / "trace", LAYERS, 0, 60, prompt=4, num_requests=4)
    result = []
    for jobs in (1, 2):
        study = make_study(trace, selection=Selection(split=(1, 1)))
        rows = list(study.results(["lru", "fmoe:capacity=16", "lru:segments=2"], [Memory("40%"), Memory("60%")], jobs))
        result.append((rows, study.wants))
    assert result[0] == result[1]
    assert [len(rows) for rows in result[0][0]] == [11, 11] and "scores" in result[0][1]


@pytest.mark.parametrize(("worth", "begun"), [(1, [2]), (10**6, [])])
def test_long_studies_share_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worth: int, begun: list[int]
) -> None:
    """As many as there are processors, where simulating takes longer than starting them."""
    noted: list[int] = []

    def noting(jobs: int, *rest: Any) -> Iterator[Any]:
        noted.append(jobs)
        return as_finished(jobs, *rest)

    monkeypatch.setattr("expertly_lab.sim.study.as_finished", noting)
    monkeypatch.setattr("expertly_lab.sim.study.granted_cpus", lambda: 2)
    monkeypatch.setattr("expertly_lab.sim.study.WORTH_PROCESSES", worth)
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
