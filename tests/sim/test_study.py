"""Systems x budgets: which runs there are, over which budgets, and what is said of them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from expertly.core.errors import BudgetError, ConfigError, HardwareError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.lab import synth
from expertly.scheduler.presets import SYSTEMS
from expertly.sim.hardware import Hardware
from expertly.sim.schedule import Selection
from expertly.sim.study import Memory
from expertly.trace.reader import Trace
from tests.sim.drive import make_study, make_trace, random_passes, results, sized, toy
from tests.sim.test_chrome import measured

LAYERS = sized(3, 8, 2)


def small(folder: Path, **settings: int) -> Trace:
    return make_trace(folder / "trace", random_passes(0, LAYERS, 12, **settings), LAYERS)


def test_budgets_are_the_engines() -> None:
    geometry = Geometry(LAYERS, 2)
    segment = 24
    whole = Memory("50%").budget(geometry)
    assert whole.pool_slots() == [24] and whole.ring_slots == (4,)
    assert Memory(f"{10 * segment}").budget(geometry).pool_slots() == [10]
    kept = Memory("3/layer", 3).budget(geometry)
    assert (kept.layer_shares, kept.kept_slots, kept.ring_slots) == ((6, 6, 6), (18,), (4,))
    assert kept.memory_nbytes == 22 * segment


def test_every_layer_keeps_so_many_whatever_its_size() -> None:
    geometry = Geometry((LayerGeometry(8, 2, 2, 12, 2, 1), LayerGeometry(4, 1, 2, 24, 2, 1)))
    budget = Memory("3/layer", 3).budget(geometry)
    assert budget.layer_shares == (3, 3) and budget.kept_slots == (3, 3) and budget.ring_slots == (2, 1)
    with pytest.raises(BudgetError, match=r"experts_per_layer=5: must be from 0 to the 4 experts of a layer"):
        Memory("5/layer", 5).budget(geometry)


def test_a_budget_that_cannot_be_is_refused_before_anything_runs(tmp_path: Path) -> None:
    study = make_study(small(tmp_path))
    rows = study.results(["lru"], [Memory("50%"), Memory("1%")])
    with pytest.raises(
        BudgetError, match=r"memory='1%': below the ring .* the least is 8\.34% of the experts \(96 bytes"
    ):
        next(rows)
    assert Memory("8.34%").budget(study.geometry).kept_slots == (0,)
    with pytest.raises(ConfigError, match="system='no'"):
        next(study.results(["no"], [Memory("50%")]))


def test_what_was_measured_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="its \\[compute\\] was measured for toy"):
        make_study(small(tmp_path), measured())
    bare = [type(one)(one.num_experts, one.top_k) for one in small(tmp_path / "sizes").manifest.layers]
    trace = make_trace(tmp_path / "bare", random_passes(0, LAYERS, 5), bare)
    assert results(make_study(trace, measured()), ["lru"], "50%")["lru"]["hit_rate"] is not None, "no times, no matter"


def test_prompts_alone_have_a_ttft_and_nothing_of_decode(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "trace", random_passes(0, LAYERS, 0, prompt=9), LAYERS)
    for name, row in results(make_study(trace), ["lru"], "50%").items():
        assert row["ttft_s"] > 0 and row["stall_share"] is not None and row["requests"] == 1, name
        assert row["tpot_s"] is row["floor_tpot_s"] is row["hit_rate"] is row["byte_hit_rate"] is None


def test_resident_runs_once_for_all_budgets(tmp_path: Path) -> None:
    told: list[str] = []
    study = make_study(small(tmp_path), progress=lambda what, done, total: told.append(f"{what} of {total}"))
    rows = list(study.results(["lru"], [Memory("30%"), Memory("60%")]))
    residents = [row for row in rows if row["system"] == "resident"]
    assert [row.pop("memory") for row in residents] == ["30%", "60%"] and residents[0] == residents[1]
    assert told == [
        *(f"{name}, 30% of 12" for name in ("lru", "belady", "belady-global", "oracle")), "resident of 12",
        *(f"{name}, 60% of 12" for name in ("lru", "belady", "belady-global", "oracle")),
    ]  # fmt: skip


def test_without_sizes_what_is_loaded_ahead_is_there_at_once(tmp_path: Path) -> None:
    bare = [type(one)(one.num_experts, one.top_k) for one in small(tmp_path).manifest.layers]
    trace = make_trace(tmp_path / "bare", random_passes(0, LAYERS, 60), bare)
    rows = results(make_study(trace, Hardware.read("laptop-nvme")), ["modelled-lookahead"], "40%")
    assert rows["oracle"]["timeliness"] == rows["modelled-lookahead"]["timeliness"] == 1.0


def test_runs_do_not_depend_on_what_ran_before(tmp_path: Path) -> None:
    trace = small(tmp_path, prompt=4)
    together = results(make_study(trace, segments=2), ["random", "lcp", "static"], "40%")
    for name in (*together, "random"):
        assert results(make_study(trace, segments=2), [name], "40%")[name] == together[name]


def test_each_requests_hit_rate_is_of_its_own_decode(tmp_path: Path) -> None:
    same = [[[0, 1]] * 3]
    passes = [(0, False, same)] * 3 + [(1, True, same), (1, False, same), (2, True, same)]
    row = results(make_study(make_trace(tmp_path / "trace", passes, LAYERS, num_requests=3)), ["lru"], "70%")["lru"]
    assert row["hit_rate_by_request"] == [2 / 3, 1.0, None], "cold for one token of three, warm, and a prompt alone"
    assert row["hit_rate"] == 3 / 4


def test_one_row_alone_is_that_of_all_results(tmp_path: Path) -> None:
    trace = small(tmp_path, prompt=4)
    together = results(make_study(trace), ["lru"], "40%")["lru"]
    alone = make_study(trace).row(SYSTEMS["lru"], Memory("40%"))
    assert alone.pop("floor_tpot_s") is None and together.pop("floor_tpot_s") is not None
    assert alone == together


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    """Of what Python and NumPy allocate; one more shard takes no more."""
    made = synth.zipf(2, 16, 2, 6000, keep=0.3)
    synth.write_workload(tmp_path / "trace", made, model="made up")
    trace = Trace.open(tmp_path / "trace")
    peaks = []
    for num_tokens in (600, 1000, 6000):  # the first run fills caches
        study = make_study(trace, toy(), selection=Selection(num_tokens=num_tokens))
        tracemalloc.start()
        study.simulate(SYSTEMS["belady"], Memory("30%").budget(study.geometry))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < peaks[1] + 2e6, peaks  # every iteration kept would take 4e6 more
