"""Whole runs with compressed experts on disk and in memory: what can be worked out without running them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertly.core.costs import CodecCosts, Link
from expertly.core.errors import BudgetError, ConfigError
from expertly.scheduler.budget import least_nbytes
from expertly.scheduler.compressed_share import choose_share
from expertly.scheduler.presets import SYSTEMS
from expertly.sim.hardware import Hardware
from expertly.sim.study import Memory
from expertly.sim.schedule import Selection
from expertly.sim.storage import Storage
from tests.sim.drive import INFINITE, make_study, make_trace, random_passes, results, sized, toy

LAYERS = sized(3, 8, 2)  # experts of 48 bytes, 1152 in all
HALF = CodecCosts(0.5, 0.5e9, 2)  # an expert is read in 48 ns and decoded in 96, by one of two threads
PLANES = Storage("planes")


def only_loading(link: Link, costs: CodecCosts) -> Hardware:
    """A machine that computes in no time."""
    fast = {"memory_nbytes_per_s": float("inf"), "launch_ns": 0, "layer_ns": 0, "iteration_ns": 0}
    return toy(**fast, link=link, codec=costs)


def loop(folder: Path, num_passes: int = 24) -> Any:
    """Each token needs two experts of each layer, and these again after four tokens: LRU with less room misses all."""
    passes = [(0, False, [[[2 * (i % 4), 2 * (i % 4) + 1]] * 3]) for i in range(num_passes)]
    return make_trace(folder, passes, LAYERS)


def one(trace: Any, hardware: Hardware, storage: Storage, memory: str, system: str = "lru") -> dict[str, Any]:
    return make_study(trace, hardware, storage=storage).row(SYSTEMS[system], Memory(memory))


def test_a_run_bound_by_the_link_takes_the_ratio_of_the_time(tmp_path: Path) -> None:
    trace, hardware = loop(tmp_path / "trace"), only_loading(Link(0.5e9, 0, 0), CodecCosts(0.5, float("inf"), 1))
    plain, coded = (one(trace, hardware, storage, "40%") for storage in (Storage(), PLANES))
    assert coded["tpot_s"] == pytest.approx(plain["tpot_s"] / 2) and plain["tpot_s"] * 1e9 == pytest.approx(6 * 96)
    assert coded["bytes_loaded"] == plain["bytes_loaded"] == 24 * 6 * 48
    assert (plain["bytes_read"], coded["bytes_read"]) == (None, 24 * 6 * 24)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_bound_by_decoding_takes_the_bytes_over_the_rate_of_all_threads(threads: int, tmp_path: Path) -> None:
    trace, hardware = loop(tmp_path / "trace"), only_loading(INFINITE, CodecCosts(0.5, 0.5e9, threads))
    row = one(trace, hardware, PLANES, "40%")
    assert row["tpot_s"] * 1e9 == pytest.approx(6 * 48 / (0.5 * threads))


def test_on_one_processor_computing_and_decoding_take_their_sum(tmp_path: Path) -> None:
    trace = loop(tmp_path / "trace")
    study = make_study(trace, toy(link=INFINITE, codec=CodecCosts(0.5, 0.5e9, 1, threads_beside=0)), storage=PLANES)
    rows = results(study, ["lru"], "40%")
    assert rows["lru"]["tpot_s"] * 1e9 == pytest.approx(rows["resident"]["tpot_s"] * 1e9 + 6 * 48 / 0.5)


def test_where_computing_leaves_a_processor_decoding_goes_on_beside_it(tmp_path: Path) -> None:
    """The second expert of each layer is read 48 ns after the first, and decoded while that one is computed."""
    trace = loop(tmp_path / "trace")
    tpot = []
    for threads_beside in (0, 1, 2):
        hardware = toy(link=Link(0.5e9, 0, 0), codec=CodecCosts(0.5, 0.5e9, 2, threads_beside))
        tpot.append(one(trace, hardware, PLANES, "40%")["tpot_s"] * 1e9)
    assert tpot[0] > tpot[1] + 3 * 20 and tpot[1] == tpot[2]


def test_a_tier_that_holds_everything_reads_each_expert_once(tmp_path: Path) -> None:
    """All experts take 576 bytes compressed; 70 % of 80 % of them is 645."""
    trace, hardware = loop(tmp_path / "trace"), toy(codec=HALF)
    row = one(trace, hardware, Storage("planes", "70%"), "80%")
    assert row["bytes_read"] == 24 * 24 and row["bytes_loaded"] == 24 * 6 * 48
    assert row["compressed"]["share"] == 0.7 and row["compressed"]["hit_rate"] == pytest.approx(1 - 24 / (24 * 6))
    without = one(trace, hardware, PLANES, "80%")
    assert without["compressed"] == {"share": 0.0, "why": "it was asked for", "gain": 0.0, "hit_rate": 0.0}


def test_slots_and_copies_together_are_the_memory(tmp_path: Path) -> None:
    study = make_study(loop(tmp_path / "trace"), toy(codec=HALF), storage=Storage("planes", "0.4"))
    budget = Memory("50%").budget(study.geometry)
    simulator = study.simulate(SYSTEMS["lru"], budget)
    tier = simulator.coded
    assert tier is not None and tier.tier.slots_per_class == [int(0.4 * 576) // 24]
    slots = sum(simulator.scheduler.budget.pool_slots()) * 48
    assert 576 - 48 < slots + 0.4 * 576 <= 576


@pytest.mark.parametrize("system", ["lru", "lfu", "on-demand", "oracle", "belady"])
def test_what_is_kept_does_not_depend_on_how_it_is_stored(system: str, tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "trace", random_passes(1, LAYERS, 60, prompt=3), LAYERS)
    hardware = only_loading(INFINITE, CodecCosts(0.5, float("inf"), 3))
    plain, coded = (one(trace, hardware, storage, "40%", system) for storage in (Storage(), PLANES))
    assert {**plain, "bytes_read": 0, "compressed": 0} == {**coded, "bytes_read": 0, "compressed": 0}
    assert coded["bytes_read"] * 2 == coded["bytes_loaded"]


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("compressed", ["0", "0.3", "0.6", "auto"])
@pytest.mark.parametrize("disk", [0.02e9, 0.5e9, 50e9])
def test_no_system_beats_the_floor(disk: float, compressed: str, segments: int, tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "trace", random_passes(2, LAYERS, 50), LAYERS)
    study = make_study(
        trace, toy(link=Link(disk, 0, 0), codec=HALF), segments=segments, storage=Storage("planes", compressed)
    )
    rows = results(study, ["lru", "lfu", "modelled-lookahead", "moepic:prediction=random"], "60%")
    for row in rows.values():
        assert row["floor_tpot_s"] and row["tpot_s"] >= row["floor_tpot_s"] * (1 - 1e-9), row["system"]
    assert any(row["tpot_s"] > rows["resident"]["tpot_s"] for row in rows.values())


def test_the_share_that_pays_is_chosen_from_the_profile(tmp_path: Path) -> None:
    trace = loop(tmp_path / "trace")
    slow = toy(codec=HALF, link=Link(0.02e9, 0, 0))
    study = make_study(trace, slow, storage=Storage("planes", "auto"))
    row = results(study, ["lru"], "40%")["lru"]
    memory = Memory("40%").budget(study.geometry).memory_nbytes
    expected = choose_share(1152, memory, least_nbytes(study.geometry), 0.02e9, HALF)
    assert row["compressed"]["share"] == expected.share > 0.3 and row["compressed"]["why"] == expected.why
    assert row["tpot_s"] < one(trace, slow, PLANES, "40%")["tpot_s"]
    fast = one(trace, toy(codec=HALF), Storage("planes", "auto"), "40%")
    assert fast["compressed"]["share"] == 0 and "would not save 3%" in fast["compressed"]["why"]


def test_the_training_part_says_how_experts_recur(tmp_path: Path) -> None:
    """Of two requests each; all go round and round through all experts, or stay with one set that is kept."""
    shares = []
    for moves in (True, False):
        at = [2 * (i % 4) if moves else 0 for i in range(24)]
        passes = [(r, False, [[[e, e + 1]] * 3]) for r in range(4) for e in at]
        trace = make_trace(tmp_path / f"trace{moves}", passes, LAYERS, num_requests=4)
        study = make_study(
            trace,
            toy(codec=HALF, link=Link(0.02e9, 0, 0)),
            selection=Selection(split=(2, 2)),
            storage=Storage("planes", "auto"),
        )
        shares.append(results(study, ["lru"], "60%")["lru"]["compressed"]["share"])
    assert shares[0] > 0.4 and shares[1] == 0


def test_bounds_are_those_without_copies(tmp_path: Path) -> None:
    trace = loop(tmp_path / "trace")
    rows = [
        results(make_study(trace, toy(codec=HALF), storage=Storage("planes", share)), ["lru"], "60%")
        for share in ("0", "0.5")
    ]
    for name in ("belady", "belady-global", "oracle", "resident"):
        assert rows[0][name]["tpot_s"] == rows[1][name]["tpot_s"] and rows[1][name]["compressed"] is None
    assert rows[0]["lru"]["bytes_read"] > rows[1]["lru"]["bytes_read"] > 0


def test_behind_a_host_tier_the_share_is_of_its_memory(tmp_path: Path) -> None:
    trace = loop(tmp_path / "trace")
    hosted = toy(codec=HALF, disk=Link(0.1e9, 0, 0), host_memory_nbytes=600)
    rows = [one(trace, hosted, Storage("planes", share), "30%") for share in ("0", "0.97")]
    assert rows[0]["memory_bytes"] == rows[1]["memory_bytes"] and rows[0]["hit_rate"] == rows[1]["hit_rate"]
    assert rows[1]["bytes_read"] == 24 * 24 < rows[0]["bytes_read"], "582 bytes hold all experts compressed"


BAD = [
    (Storage("zip"), {}, "codec='zip': unknown; accepted: none, planes"),
    (Storage("none", "30%"), {}, "compressed='30%': only with codec='planes'; accepted: 0"),
    (Storage("none", "auto"), {}, "compressed='auto': only with codec='planes'"),
    (Storage("planes", "100%"), {}, "compressed='100%': accepted are a share of the memory"),
    (Storage("planes", "much"), {}, "compressed='much': accepted are"),
    (PLANES, {"disk": INFINITE}, "codec='planes': on hardware 'toy' all experts lie decoded in host memory; accepted"),
]  # fmt: skip


@pytest.mark.parametrize(("storage", "changes", "message"), BAD, ids=[case[2][:30] for case in BAD])
def test_what_cannot_be_is_refused(storage: Storage, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        make_study(loop(tmp_path / "trace"), toy(**changes), storage=storage)
    assert str(error.value).startswith(message)


def test_a_share_that_leaves_less_than_the_ring_is_refused_before_anything_runs(tmp_path: Path) -> None:
    study = make_study(loop(tmp_path / "trace"), toy(codec=HALF), storage=Storage("planes", "80%"))
    with pytest.raises(BudgetError, match=r"compressed='80%': 276 of 345 bytes stay compressed; memory=69 .*ring"):
        next(study.results(["lru"], [Memory("30%")]))


def test_a_trace_without_sizes_has_nothing_to_compress(tmp_path: Path) -> None:
    trace = loop(tmp_path / "trace")
    study = make_study(trace)
    with pytest.raises(ConfigError, match="codec='planes': the trace does not know its experts' sizes"):
        replace(study, layers=None, storage=PLANES)


def test_a_profile_that_says_nothing_takes_the_stated_costs(tmp_path: Path) -> None:
    assert PLANES.costs(toy()) == CodecCosts() and PLANES.costs(toy(codec=HALF)) == HALF
    row = one(loop(tmp_path / "trace"), toy(), PLANES, "40%")
    assert row["bytes_read"] == 24 * 6 * 33, "0.68 of 48, rounded up"
