"""The figures of each system under each budget, alike for engine and simulator, and their summary in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from expertly.core.units import format_nbytes, format_range, format_ratio, format_seconds
from expertly.scheduler.systems import BASE_SYSTEM
from expertly_lab.baselines.systems import BOUNDS

if TYPE_CHECKING:
    from expertly.bench import BenchRow

Simulations = Mapping[tuple[str, str, int], Mapping[str, Any]]
"""Rows of Study.results, by budget, system and P."""

PREFETCHING = ("coverage", "accuracy", "timeliness")


def rows_of(
    systems: Sequence[str], memories: Sequence[str], runs: Sequence[BenchRow], simulated: Simulations
) -> list[dict[str, Any]]:
    """A row for each budget and system; the bounds (BOUNDS) come after the systems."""
    rows = []
    measured = {(row.memory, row.system): row for row in runs}
    for memory in memories:
        base = _simulation(simulated, memory, BASE_SYSTEM)
        for name in dict.fromkeys((*systems, *BOUNDS)):
            is_bound = name not in systems
            run, simulation = measured.get((memory, name)), _simulation(simulated, memory, name)
            has_failed = run is not None and run.reason is not None
            facts = {
                "memory": memory,
                "memory_bytes": simulation["memory_bytes"] if simulation else run and run.memory_bytes,
                "system": name,
                "segments": simulation and simulation["segments"],
                "is_bound": is_bound,
                "has_failed": has_failed,
                "engine": None if run is None or has_failed else _engine(run),
                "simulated": None if simulation is None else _simulated(simulation, None if is_bound else base),
            }
            if has_failed or facts["engine"] or facts["simulated"]:
                rows.append(facts)
    return rows


def _simulation(simulated: Simulations, memory: str, name: str) -> Mapping[str, Any] | None:
    """A system's row; of a bound the best over all P: the fastest, or the one with the fewest bytes."""
    by = "tpot_s" if name in ("oracle", "resident") else "bytes_loaded"
    rows = [row for key, row in simulated.items() if key[:2] == (memory, name)]
    return min(rows, key=lambda row: (row[by] is None, row[by] or 0, row["segments"]), default=None)


def _engine(run: BenchRow) -> dict[str, Any]:
    ratio = {"median": run.ratio, "low": run.ratio_low, "high": run.ratio_high}
    return {
        "tpot_s": run.tpot_s,
        "ttft_s": run.ttft_s,
        "hit_rate": run.hit_rate,
        "bytes_loaded": run.bytes_per_token,
        "time_to_base": None if run.ratio is None or run.system == BASE_SYSTEM else ratio,
    }


def _simulated(row: Mapping[str, Any], base: Mapping[str, Any] | None) -> dict[str, Any]:
    """The same figures from a row of Study.results, which repeats exactly."""
    loaded, ratio = row["phases"]["decode"]["bytes_loaded"], None
    if base is not None and base is not row and row["times_by_request"]:
        ratio = _seconds(row) / _seconds(base)
    return {
        **{name: _median(row["times_by_request"] or [], name) for name in ("tpot_s", "ttft_s")},
        **{name: row[name] for name in ("hit_rate", *PREFETCHING)},
        "bytes_loaded": loaded / row["decode_iterations"] if row["decode_iterations"] else None,
        "time_to_base": None if ratio is None else {"median": ratio, "low": ratio, "high": ratio},
    }


def _median(times: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [time[name] for time in times if time[name] is not None]
    return median(known) if known else None


def _seconds(row: Mapping[str, Any]) -> float:
    return float(sum(time["latency_s"] for time in row["times_by_request"]))


# -- in words ----------------------------------------------------------------------------------------------------------


HARDLY = 0.99
"""A system whose time is above this share of BASE_SYSTEM's in any round has no lead."""


def headline(rows: Sequence[dict[str, Any]], memories: Sequence[str]) -> list[str]:
    """A few sentences for each budget."""
    said = []
    for memory in memories:
        of_memory = [row for row in rows if row["memory"] == memory]
        failed = [row["system"] for row in of_memory if row["has_failed"]]
        said.append(_outcome(of_memory, memory) + (f" {', '.join(failed)} did not come through." if failed else ""))
    return said


def failures_in_words(results: Mapping[str, Any]) -> list[str]:
    """Which systems failed under which budget, and why."""
    return [f"{row['system']} ({row['where']}, {row['memory']}): {row['cause']}" for row in results["failures"]]


def by_time(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one budget whose systems the engine ran, the fastest first: by their times relative to BASE_SYSTEM's
    in the same rounds, so that other load on the machine cancels out. A system that failed is none of them.
    """
    timed = [row for row in rows if row["engine"] is not None and row["engine"]["tpot_s"] is not None]
    return sorted(timed, key=lambda row: (row["engine"]["time_to_base"] or {"median": 1.0})["median"])


def _outcome(rows: Sequence[dict[str, Any]], memory: str) -> str:
    timed = by_time(rows)
    if not timed:
        return f"{_budget(memory, rows)}: no system came through."
    said, best = [_verdict(timed, memory)], timed[0]
    bounds = {row["system"]: row["simulated"] for row in rows if row["is_bound"]}
    oracle, fewest, simulated = bounds.get("oracle"), bounds.get("belady-global"), best["simulated"]
    if simulated is not None and oracle is not None and simulated["tpot_s"] and oracle["tpot_s"]:
        said.append(
            f"Best possible: in the simulator {best['system']} takes {format_seconds(simulated['tpot_s'])} and oracle, "
            f"which knows the future, {format_seconds(oracle['tpot_s'])} "
            f"({format_ratio(simulated['tpot_s'] / oracle['tpot_s'])})."
        )
    if simulated is not None and fewest is not None and fewest["bytes_loaded"] is not None:
        said.append(
            f"{best['system']} loads {format_nbytes(simulated['bytes_loaded'])} for each token of an answer there, the "
            f"least possible is {format_nbytes(fewest['bytes_loaded'])} (belady-global)."
        )
    return " ".join(said)


def _verdict(timed: Sequence[dict[str, Any]], memory: str) -> str:
    """Which system is fastest. A lead counts only where every round shows it."""
    best, name = timed[0]["engine"], timed[0]["system"]
    budget, ratio, tpot = _budget(memory, timed), best["time_to_base"], f"{format_seconds(best['tpot_s'])} a token"
    if ratio is None:
        second = "".join(f"; next is {row['system']}{_ratio(row['engine'])}" for row in timed[1:2])
        return f"{budget}: {name} is fastest on the engine, {tpot}{second}."
    if ratio["high"] > HARDLY:
        said = f"no system is clearly faster than {BASE_SYSTEM} on the engine; {name} comes first"
        return f"{budget}: {said}, {tpot}{_ratio(best)}."
    return f"{budget}: {name} is fastest on the engine, {tpot}{_ratio(best)}."


def _ratio(figures: dict[str, Any]) -> str:
    ratio = figures["time_to_base"]
    if ratio is None:
        return ""
    rounds = f"; {format_range(format_ratio, ratio['low'], ratio['high'])} by round"
    return f", {format_ratio(ratio['median'])} the time of {BASE_SYSTEM}" + rounds * (ratio["low"] < ratio["high"])


def _budget(memory: str, rows: Sequence[dict[str, Any]]) -> str:
    nbytes = next((row["memory_bytes"] for row in rows if row["memory_bytes"] and row["system"] != "resident"), None)
    share = f"{memory} of the experts" if memory.endswith("%") else memory
    return f"With {share}" + (f" ({format_nbytes(nbytes)})" if nbytes and memory.endswith("%") else "")
