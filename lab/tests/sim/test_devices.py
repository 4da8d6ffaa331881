"""Several devices, over which experts are dealt out: they load and compute side by side, and decide nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertly_lab.sim.study import Study
from lab.tests.sim.drive import make_study, make_trace, random_trace, results, sized, with_bounds

EXPERT_NS, LOAD_NS, LATENCY_NS = 48, 96, 7  # of drive.toy
FIXED_NS = 1000 + 100  # a pass of one layer


def one_pass(folder: Path, num_devices: int, chosen: list[int]) -> Study:
    trace = make_trace(folder, [(0, False, [[chosen]])], sized(1, 8, len(chosen)))
    return make_study(trace, num_devices=num_devices)


@pytest.mark.parametrize(
    ("num_devices", "chosen", "num_longest"),
    [(1, [0, 1, 2, 3], 4), (2, [0, 1, 2, 3], 2), (2, [0, 2, 4, 1], 3), (4, [0, 1, 2, 3], 1), (8, [0, 1, 2, 3], 1)],
)
def test_experts_of_a_layer_take_the_time_of_the_longest_device(
    tmp_path: Path, num_devices: int, chosen: list[int], num_longest: int
) -> None:
    row = results(one_pass(tmp_path, num_devices, chosen), ["resident"], "100%")["resident"]
    assert row["tpot_s"] * 1e9 == pytest.approx(FIXED_NS + num_longest * EXPERT_NS)
    assert row["decode_stall_s"] == 0


@pytest.mark.parametrize(("num_devices", "num_queued"), [(1, 4), (2, 2), (4, 1)])
def test_experts_of_a_layer_are_loaded_side_by_side(tmp_path: Path, num_devices: int, num_queued: int) -> None:
    row = results(one_pass(tmp_path, num_devices, [0, 1, 2, 3]), ["on-demand"], "60%")["on-demand"]
    assert row["tpot_s"] * 1e9 == pytest.approx(FIXED_NS + LATENCY_NS + num_queued * LOAD_NS + EXPERT_NS)
    # Each but the last of a link is computed while the next is loaded.
    assert row["decode_stall_s"] * 1e9 == pytest.approx(LATENCY_NS + LOAD_NS + (num_queued - 1) * (LOAD_NS - EXPERT_NS))


def test_a_load_that_takes_no_longer_than_what_is_computed_beside_it_is_no_stall(tmp_path: Path) -> None:
    layers = sized(1, 8, 4)
    trace = make_trace(tmp_path, [(0, False, [[[0, 2, 4, 6]]]), (0, False, [[[0, 2, 4, 1]]])], layers)
    row = results(make_study(trace, num_devices=2), ["lru"], "100%")["lru"]
    first_ns = LATENCY_NS + LOAD_NS + 3 * (LOAD_NS - EXPERT_NS)  # four of one device
    assert row["decode_stall_s"] * 1e9 == pytest.approx(first_ns), "then three are computed while one is loaded"


def test_one_device_is_the_machine_without_devices_and_more_decide_the_same(tmp_path: Path) -> None:
    layers = sized(4, 8, 2)
    trace = random_trace(tmp_path, layers, 0, 60, prompt=5)
    rows = {num: results(make_study(trace, num_devices=num), ["lru", "lcp"], "40%") for num in (1, 2, 6)}
    assert rows[1] == results(make_study(trace), ["lru", "lcp"], "40%")
    for system in ("lru", "lcp"):
        decided = ["hit_rate", "bytes_loaded", "hit_rate_by_request", "phases"]
        alone, *more = ([rows[num][system][name] for name in decided] for num in (1, 2, 6))
        assert more == [alone, alone]
        assert rows[6][system]["tpot_s"] < rows[2][system]["tpot_s"] < rows[1][system]["tpot_s"]
        assert rows[6][system]["stall_share"] < rows[1][system]["stall_share"]


@pytest.mark.parametrize("num_devices", [1, 3])
def test_no_system_is_below_the_floor(tmp_path: Path, num_devices: int) -> None:
    trace = random_trace(tmp_path, sized(4, 8, 2), 1, 40, num_requests=2)
    for row in with_bounds(make_study(trace, num_devices=num_devices), ["lru"], "40%").values():
        assert row["tpot_s"] >= row["floor_tpot_s"] * (1 - 1e-9), row["system"]
