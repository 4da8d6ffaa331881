"""The figures of engine and simulator, and the sentences that come of them."""

from __future__ import annotations

from typing import Any

import pytest

from expertly.bench import BenchRow
from expertly_lab.baselines.systems import BOUNDS
from expertly_lab.compare.comparison import check_systems
from expertly_lab.compare.figures import PREFETCHING, by_time, headline, rows_of

ASKED = ("lru", "lcp"), ("25%",)


def run(segments: int = 1, nbytes: int = 300, tpot_s: float = 0.01) -> dict[str, Any]:
    """A row of Study.results."""
    times = [{"ttft_s": 0.5, "tpot_s": tpot_s, "latency_s": 0.5 + 4 * tpot_s}]
    figures = {
        "segments": segments,
        "bytes_loaded": nbytes,
        "tpot_s": tpot_s,
        "memory_bytes": 9,
        "times_by_request": times,
    }
    phases = {"phases": {"decode": {"bytes_loaded": nbytes}}, "decode_iterations": 4}
    return figures | phases | dict.fromkeys(("hit_rate", *PREFETCHING), 0.5)


def test_engine_and_simulator_have_the_same_figures() -> None:
    measured = [BenchRow("25%", 9, "lru", 0.02, 0.6, 9.0, 0.5, 75.0, 1.0, 1.0, 1.0)]
    measured.append(BenchRow("25%", 9, "lcp", 0.01, 0.6, 9.0, 0.5, 50.0, 0.5, 0.4, 0.6))
    result = {("25%", "lru", 1): run(tpot_s=0.02), ("25%", "lcp", 1): run(nbytes=200)}
    lru, lcp = rows_of(*ASKED, measured, result)
    for place in ("engine", "simulated"):
        assert (lru[place]["bytes_loaded"], lcp[place]["bytes_loaded"]) == (75, 50), "a step"
        assert (lru[place]["tpot_s"], lcp[place]["tpot_s"], lru[place]["hit_rate"]) == (0.02, 0.01, 0.5)
        assert lru[place]["time_to_base"] is None, "it is the base"
    assert lcp["engine"]["time_to_base"] == {"median": 0.5, "low": 0.4, "high": 0.6}
    assert lcp["simulated"]["time_to_base"]["median"] == pytest.approx(0.54 / 0.58)


def test_a_system_that_failed_has_no_engine_figures() -> None:
    (row,) = rows_of(*ASKED, [BenchRow("25%", 9, "lcp", reason="torn")], {})
    assert row["has_failed"] and row["engine"] is row["simulated"] is None


def test_bounds_are_of_the_parts_with_which_they_are_best() -> None:
    """Fewest bytes of what bounds bytes, least time of what bounds time."""
    both = (run(1, 300, 0.01), run(4, 200, 0.02))
    result = {("25%", name, each["segments"]): each for name in BOUNDS for each in both}
    rows = {each["system"]: each["segments"] for each in rows_of(*ASKED, [], result)}
    assert rows == {"belady": 4, "belady-global": 4, "oracle": 1, "resident": 1}


def figures(tpot_s: float | None, nbytes: float = 1 << 20, hit_rate: float = 0.5, ratio: Any = None) -> dict[str, Any]:
    ratio = None if ratio is None else dict(zip(("low", "median", "high"), ratio, strict=True))
    return {"tpot_s": tpot_s, "bytes_loaded": nbytes, "hit_rate": hit_rate, "time_to_base": ratio}


def row(system: str, engine: dict[str, Any] | None, simulated: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    row = {"memory": "25%", "memory_bytes": 3 << 20, "system": system, "segments": 1, "is_bound": False}
    return row | {"has_failed": False, "engine": engine, "simulated": simulated} | more


def test_the_headline_says_who_is_fastest_and_how_far_from_base_and_bounds() -> None:
    rows = [
        row("lru", figures(0.010), figures(0.011)),
        row("lcp", figures(0.008, ratio=(0.75, 0.8, 0.85)), figures(0.009, 2 << 20, ratio=(0.8, 0.8, 0.8))),
        row("oracle", None, figures(0.006), is_bound=True),
        row("belady-global", None, figures(0.007), is_bound=True),
    ]
    (said,) = headline(rows, ["25%"])
    assert said == (
        "With 25% of the experts (3 MiB): lcp is fastest on the engine, 8.00 ms a token, 0.80x the time of lru; "
        "0.75 to 0.85x by round. Best possible: in the simulator lcp takes 9.00 ms and oracle, which knows the "
        "future, 6.00 ms (1.50x). lcp loads 2 MiB for each token of an answer there, the least possible is 1 MiB "
        "(belady-global)."
    )


def test_a_lead_that_a_round_does_not_show_is_no_lead() -> None:
    rows = [row("lru", figures(0.010), None), row("lcp", figures(0.009, ratio=(0.8, 0.95, 1.02)), None)]
    assert "no system is clearly faster than lru" in headline(rows, ["25%"])[0]
    slower = [row("lru", figures(0.010), None), row("lcp", figures(0.009, ratio=(1.1, 1.2, 1.3)), None)]
    assert "lru is fastest on the engine, 10.0 ms a token; next is lcp, 1.20x" in headline(slower, ["25%"])[0]


def test_who_failed_is_not_the_best_however_fast_until_then() -> None:
    rows = [
        row("lru", figures(0.010), figures(0.010)),
        row("lcp", None, figures(0.005, ratio=(0.5, 0.5, 0.5)), has_failed=True),
    ]
    (said,) = headline(rows, ["25%"])
    assert "lru is fastest on the engine" in said and said.endswith("lcp did not come through.")
    assert headline(rows[1:], ["25%"]) == [
        "With 25% of the experts (3 MiB): no system came through. lcp did not come through."
    ]


def test_what_ran_in_the_same_round_decides_not_the_times() -> None:
    """lcp's median is higher as it ran when the machine was slow; against lru then it was faster."""
    rows = [row("lru", figures(0.010), None), row("lcp", figures(0.012, ratio=(0.7, 0.8, 0.9)), None)]
    assert by_time(rows)[0]["system"] == "lcp"


def test_the_base_always_runs() -> None:
    assert check_systems(["lfu", "lfu"]) == ("lru", "lfu") and check_systems(["lfu", "lru"]) == ("lfu", "lru")
