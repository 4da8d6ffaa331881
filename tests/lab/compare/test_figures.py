"""Medians, quartiles and ratios of what was played, and the sentence that comes of them."""

from __future__ import annotations

from typing import Any

import pytest

from expertly.core.errors import ConfigError
from expertly.core.units import format_range, format_seconds, format_share
from expertly.lab.compare.engine import ComparedRuns, RunFailure
from expertly.lab.compare.figures import RATES, best_row, engine_figures, headline, ratio_to, rows_of, spread
from expertly.lab.compare.settings import ComparisonSettings, check_memories, check_systems
from expertly.lab.plots import round_ticks
from expertly.scheduler.presets import BOUNDS

COUNTS = {"hits": 6, "misses": 2, "loaded_nbytes": 300, "stall_ns": 4_000_000}


def played(request: int, tpot_s: float, num_steps: int = 4) -> dict[str, Any]:
    return {
        "request": request,
        "ttft_s": 0.5,
        "tpot_s": tpot_s,
        "latency_s": 0.5 + num_steps * tpot_s,
        "num_steps": num_steps,
        "prefill": {**COUNTS, "loaded_nbytes": 100, "stall_ns": 9},
        "decode": COUNTS,
    }


def rounds(*times: list[float]) -> list[list[dict[str, Any]]]:
    return [[played(number, tpot_s) for number, tpot_s in enumerate(one)] for one in times]


def test_spread_is_median_and_quartiles_of_what_is_known() -> None:
    assert spread([4.0, None, 1.0, 2.0, 3.0]) == {"median": 2.5, "q1": 1.0, "q3": 3.0}
    assert spread([None]) is None


def test_figures_are_medians_over_requests_and_rounds_and_means_of_what_is_counted() -> None:
    figures = engine_figures(rounds([0.1, 0.2], [0.3, 0.2]))
    assert figures["tpot_s"] == {"median": 0.2, "q1": 0.1, "q3": 0.2}
    assert figures["hit_rate"] == 0.75
    assert figures["stall_s"] == pytest.approx(4 * 0.004 / 16), "decode's alone, for each of 16 steps"
    assert figures["bytes_loaded"] == pytest.approx(4 * (300 + 100) / 16), "and what the prompts load"
    assert figures["latencies_s"] == pytest.approx([0.5 + 4 * 0.2, 0.5 + 4 * 0.2]), "each request's median"


def test_ratios_pair_the_same_request_of_the_same_round() -> None:
    """The machine is twice as slow in the second round: medians of times would say 1.5."""
    ours, beside = rounds([0.1, 0.2], [0.2, 0.4]), rounds([0.2, 0.4], [0.4, 0.8])
    assert ratio_to(ours, beside) == {"median": 0.5, "q1": 0.5, "q3": 0.5}
    assert ratio_to(ours[:1], [[played(1, 0.1)]]) == {"median": 2.0, "q1": 2.0, "q3": 2.0}, "only what both ran"


def simulated(tpot_s: float | None, nbytes: float = 1 << 20, hit_rate: float = 0.5) -> dict[str, Any]:
    return {"tpot_s": tpot_s, "bytes_loaded": nbytes, "hit_rate": hit_rate}


def row(system: str, engine: dict[str, Any] | None, figures: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    row = {"memory": "25%", "memory_bytes": 3 << 20, "system": system, "segments": 1, "is_bound": False}
    return row | {"has_failed": False, "engine": engine, "simulated": figures} | more


def measured(tpot_s: float, ratio: tuple[float, float, float] | None = None) -> dict[str, Any]:
    spread = {"median": tpot_s, "q1": tpot_s, "q3": tpot_s}
    if ratio is None:
        return {"tpot_s": spread}
    return {"tpot_s": spread, "tpot_to_baseline": dict(zip(("q1", "median", "q3"), ratio, strict=True))}


def test_the_headline_says_who_is_fastest_and_how_far_from_baseline_and_bounds() -> None:
    rows = [
        row("lru", measured(0.010), simulated(0.011)),
        row("lcp", measured(0.008, (0.75, 0.8, 0.85)), simulated(0.009, 2 << 20)),
        row("oracle", None, simulated(0.006), is_bound=True),
        row("belady-global", None, simulated(0.007), is_bound=True),
    ]
    (said,) = headline(rows, ["25%"], "lru")
    assert said == (
        "With 25% of the experts (3 MiB): lcp is fastest on the engine, 8.00 ms a token, 0.80x the time of lru; "
        "quartiles 0.75 to 0.85x. Best possible: in the simulator lcp takes 9.00 ms and oracle, which knows the "
        "future, 6.00 ms (1.50x). lcp loads 2 MiB for each token of an answer there, the least possible is 1 MiB "
        "(belady-global)."
    )


def test_a_lead_within_the_spread_is_no_lead() -> None:
    rows = [row("lru", measured(0.010), None), row("lcp", measured(0.009, (0.8, 0.95, 1.02)), None)]
    assert "no system is clearly faster than lru" in headline(rows, ["25%"], "lru")[0]
    slower = [row("lru", measured(0.010), None), row("lcp", measured(0.009, (1.1, 1.2, 1.3)), None)]
    assert "lru is fastest on the engine, 10.0 ms a token; next is lcp, 1.20x" in headline(slower, ["25%"], "lru")[0]


def test_who_failed_is_not_the_best_however_fast_until_then() -> None:
    rows = [
        row("lru", measured(0.010), simulated(0.010)),
        row("lcp", measured(0.005, (0.5, 0.5, 0.5)), simulated(0.005), has_failed=True),
    ]
    (said,) = headline(rows, ["25%"], "lru")
    assert "lru is fastest on the engine" in said and said.endswith("lcp did not come through.")
    assert headline(rows[1:], ["25%"], "lru") == [
        "With 25% of the experts (3 MiB): no system came through. lcp did not come through."
    ]


def test_what_ran_at_the_same_time_decides_not_the_times() -> None:
    """lcp's median is higher as it ran when the machine was slow; against lru then it was faster."""
    rows = [row("lru", measured(0.010), None), row("lcp", measured(0.012, (0.7, 0.8, 0.9)), None)]
    found = best_row(rows)
    assert found is not None and found[0]["system"] == "lcp" and found[1] == "engine"


def test_without_times_hits_decide() -> None:
    rows = [
        row("lru", None, simulated(None, hit_rate=0.4)),
        row("lfu", None, simulated(None, hit_rate=0.6)),
        row("belady-global", None, simulated(None, hit_rate=0.9), is_bound=True),
    ]
    (said,) = headline(rows, ["25%"], "lru")
    assert "lfu has the most hits, 60.0%; lru has 40.0%" in said and "90.0% (belady-global)" in said
    assert headline([], ["25%"], "lru") == ["With 25% of the experts: no system came through."]


def test_a_system_that_failed_on_the_engine_has_no_engine_figures() -> None:
    runs = ComparedRuns(played={("25%", "lru"): rounds([0.1]), ("25%", "lcp"): [[]]})
    rows = rows_of(ComparisonSettings(("lru", "lcp"), ("25%",)), runs, {})
    assert [one["system"] for one in rows] == ["lru"]


def test_a_system_that_failed_later_has_what_was_measured() -> None:
    runs = ComparedRuns(played={("25%", "lru"): rounds([0.1], [0.2]), ("25%", "lcp"): [*rounds([0.3]), []]})
    runs.failures.append(RunFailure("engine", "25%", "lcp", "torn"))
    rows = {one["system"]: one for one in rows_of(ComparisonSettings(("lru", "lcp"), ("25%",)), runs, {})}
    assert rows["lcp"]["has_failed"] and not rows["lru"]["has_failed"]
    assert rows["lcp"]["engine"]["num_played"] == 1
    assert rows["lcp"]["engine"]["tpot_to_baseline"]["median"] == pytest.approx(3), "beside what ran then"


def test_bounds_are_of_the_parts_with_which_they_are_best() -> None:
    """Fewest bytes of what bounds bytes, least time of what bounds time."""

    def run(segments: int, nbytes: int, tpot_s: float) -> dict[str, Any]:
        figures = {"segments": segments, "bytes_loaded": nbytes, "tpot_s": tpot_s, "memory_bytes": 9}
        counts = {"decode_stall_s": 0.0, "decode_iterations": 1, "floor_tpot_s": tpot_s, "times_by_request": []}
        return figures | counts | dict.fromkeys(RATES, 0.5)

    of_one_part, of_four = run(1, 300, 0.01), run(4, 200, 0.02)
    found = {("25%", name, one["segments"]): one for name in BOUNDS for one in (of_one_part, of_four)}
    rows = {one["system"]: one["segments"] for one in rows_of(ComparisonSettings(("lru",), ("25%",)), None, found)}
    assert rows == {"belady": 4, "belady-global": 4, "oracle": 1, "resident": 1}


@pytest.mark.parametrize(
    ("high", "base", "last", "step"),
    [
        (0.083, 1000, 0.1, 0.02),
        (7, 1000, 8, 2),
        (5.5 * 1024**2, 1024, 6 * 1024**2, 2 * 1024**2),
        (4.9 * 1024**2, 1024, 5 * 1024**2, 1024**2),
    ],
)
def test_ticks_are_round(high: float, base: int, last: float, step: float) -> None:
    ticks = round_ticks(high, base=base)
    assert ticks[0] == 0 and ticks[-1] == pytest.approx(last) and ticks[1] == pytest.approx(step)


def test_a_range_names_its_unit_once() -> None:
    assert format_range(format_seconds, 0.0398, 0.0791) == "39.8 to 79.1 ms"
    assert format_range(format_seconds, 0.5, 1.5) == "500 ms to 1.50 s"
    assert format_range(format_share, 0.5, 0.75) == "50.0 to 75.0%"


@pytest.mark.parametrize(
    ("check", "given", "problem"),
    [
        (check_systems, ["nosuch"], "system='nosuch': unknown"),
        (check_systems, ["lru", "oracle"], "system='oracle': needs to know the demands to come"),
        (check_memories, ["auto"], "memory='auto': budgets are compared"),
        (check_memories, ["-1"], "memory='-1'"),
    ],
)
def test_what_cannot_be_compared_is_refused(check: Any, given: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check(given)
    assert problem in str(raised.value)
