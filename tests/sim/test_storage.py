"""Whole runs with compressed experts on disk: what can be worked out without running them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from expertly.sim.memory import Memory

from expertly.core.costs import CodecCosts, Link
from expertly.core.errors import ConfigError
from expertly.scheduler.presets import SYSTEMS
from expertly.sim.hardware import Hardware
from tests.sim.drive import INFINITE, make_study, make_trace, random_passes, results, sized, toy

LAYERS = sized(3, 8, 2)  # experts of 48 bytes, 1152 in all
HALF = CodecCosts(0.5, 0.5e9, 2)  # an expert is read in 48 ns and decoded in 96, by one of two threads
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


@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_bound_by_decoding_takes_the_bytes_over_the_rate_of_all_threads(threads: int, tmp_path: Path) -> None:
    trace, hardware = loop(tmp_path / "trace"), only_loading(INFINITE, CodecCosts(0.5, 0.5e9, threads))
    row = one(trace, hardware, PLANES, "40%")
    assert row["tpot_s"] * 1e9 == pytest.approx(6 * 48 / (0.5 * threads))


def test_on_one_processor_computing_and_decoding_take_their_sum(tmp_path: Path) -> None:
    trace = loop(tmp_path / "trace")
    study = make_study(trace, toy(link=INFINITE, codec=CodecCosts(0.5, 0.5e9, 1, threads_beside=0)), codec=PLANES)
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


@pytest.mark.parametrize("system", ["lru", "lfu", "on-demand", "oracle", "belady"])
def test_what_is_kept_does_not_depend_on_how_it_is_stored(system: str, tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "trace", random_passes(1, LAYERS, 60, prompt=3), LAYERS)
    hardware = only_loading(INFINITE, CodecCosts(0.5, float("inf"), 3))
    plain, coded = (one(trace, hardware, codec, "40%", system) for codec in ("none", PLANES))
    assert {**plain, "bytes_read": 0} == {**coded, "bytes_read": 0}
    assert coded["bytes_read"] * 2 == coded["bytes_loaded"]


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("disk", [0.02e9, 0.5e9, 50e9])
def test_no_system_beats_the_floor(disk: float, segments: int, tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "trace", random_passes(2, LAYERS, 50), LAYERS)
    study = make_study(trace, toy(link=Link(disk, 0, 0), codec=HALF), segments=segments, codec=PLANES)
    rows = results(study, ["lru", "lfu", "modelled-lookahead", "moepic:prediction=random"], "60%")
    for row in rows.values():
        assert row["floor_tpot_s"] and row["tpot_s"] >= row["floor_tpot_s"] * (1 - 1e-9), row["system"]
    assert any(row["tpot_s"] > rows["resident"]["tpot_s"] for row in rows.values())


BAD = [
    ("zip", {}, "codec='zip': unknown; accepted: none, planes"),
    (PLANES, {"disk": INFINITE}, "codec='planes': on hardware 'toy' all experts lie decoded in host memory; accepted"),
]  # fmt: skip


@pytest.mark.parametrize(("storage", "changes", "message"), BAD, ids=[case[2][:30] for case in BAD])
def test_what_cannot_be_is_refused(codec: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        make_study(loop(tmp_path / "trace"), toy(**changes), codec=codec)
    assert str(error.value).startswith(message)


def test_a_trace_without_sizes_has_nothing_to_compress(tmp_path: Path) -> None:
    trace = loop(tmp_path / "trace")
    study = make_study(trace)
    with pytest.raises(ConfigError, match="codec='planes': the trace does not know its experts' sizes"):
        replace(study, layers=None, codec=PLANES)


def test_a_profile_that_says_nothing_takes_the_stated_costs(tmp_path: Path) -> None:
    row = one(loop(tmp_path / "trace"), toy(), PLANES, "40%")
    assert row["bytes_read"] == 24 * 6 * 33, "0.68 of 48, rounded up"
