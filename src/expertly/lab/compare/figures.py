"""The figures of each system under each budget, in the same terms for engine and simulator, and their summary in words:
which system is fastest, and how far it is from the baseline and from the best possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from expertly.core.units import format_nbytes, format_range, format_ratio, format_seconds, format_share
from expertly.lab.compare.engine import ComparedRuns
from expertly.lab.compare.settings import ComparisonSettings
from expertly.scheduler.counters import PhaseCounters
from expertly.scheduler.presets import BOUNDS
from expertly.sim.metrics import percentile

TIMES = ("ttft_s", "tpot_s", "latency_s")

RATES = ("hit_rate", "partial_hit_rate", "coverage", "accuracy", "timeliness")


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Median and quartiles of the known values; None where there are none."""
    rising = sorted(value for value in values if value is not None)
    if not rising:
        return None
    low, high = percentile(rising, 25), percentile(rising, 75)
    assert low is not None and high is not None
    return {"median": median(rising), "q1": low, "q3": high}


def spread_of(value: Any) -> dict[str, float] | None:
    """Median and quartiles of a figure; those of a single value, as a simulation gives, are that value."""
    if value is None:
        return None
    return value if isinstance(value, dict) else {"median": value, "q1": value, "q3": value}


def rows_of(
    settings: ComparisonSettings, runs: ComparedRuns | None, simulated: Mapping[tuple[str, str, int], dict[str, Any]]
) -> list[dict[str, Any]]:
    """A row for each budget and system; the bounds (BOUNDS) come after the systems."""
    rows = []
    for memory in settings.memories:
        of_memory = [_row(settings, memory, name, runs or ComparedRuns(), simulated) for name in settings.systems]
        bounds = [name for name in BOUNDS if name not in settings.systems]
        of_memory += [_bound_row(memory, name, simulated) for name in bounds]
        rows += [row for row in of_memory if row["engine"] is not None or row["simulated"] is not None]
    return rows


def _row(
    settings: ComparisonSettings,
    memory: str,
    name: str,
    runs: ComparedRuns,
    simulated: Mapping[tuple[str, str, int], dict[str, Any]],
) -> dict[str, Any]:
    played = runs.played.get((memory, name), [])
    engine = engine_figures(played) if any(played) else None
    if engine is not None and name != settings.baseline:
        engine["tpot_to_baseline"] = ratio_to(played, runs.played.get((memory, settings.baseline), []))
    found = next((row for key, row in simulated.items() if key[:2] == (memory, name)), None)
    figures = None if found is None else simulated_figures(found)
    baseline = next((row for key, row in simulated.items() if key[:2] == (memory, settings.baseline)), None)
    if figures is not None and baseline is not None and name != settings.baseline:
        figures["tpot_to_baseline"] = _quotient(figures["tpot_s"], simulated_figures(baseline)["tpot_s"])
    about = _facts(memory, name, found or runs.loaded.get((memory, name)), runs.has_failed(memory, name))
    return about | {"engine": engine, "simulated": figures}


def _bound_row(memory: str, name: str, simulated: Mapping[tuple[str, str, int], dict[str, Any]]) -> dict[str, Any]:
    """A bound's best row over all P: the fastest for `oracle` and `resident`, else the one with the fewest bytes."""
    found = [row for key, row in simulated.items() if key[:2] == (memory, name)]
    by = "tpot_s" if name in ("oracle", "resident") else "bytes_loaded"
    best = min(found, key=lambda row: (row[by] is None, row[by] or 0, row["segments"]), default=None)
    figures = None if best is None else simulated_figures(best)
    return _facts(memory, name, best, is_bound=True) | {"engine": None, "simulated": figures}


def _facts(
    memory: str, name: str, ran: Mapping[str, Any] | None, has_failed: bool = False, is_bound: bool = False
) -> dict[str, Any]:
    """What a row says beside its figures. `has_failed`: on the engine, under this budget."""
    size, segments = (None if ran is None else ran.get(key) for key in ("memory_bytes", "segments"))
    about = {"memory": memory, "memory_bytes": size, "system": name, "segments": segments}
    return about | {"is_bound": is_bound, "has_failed": has_failed}


def engine_figures(rounds: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Medians and quartiles of times over requests and rounds, and sums of counters. `latencies_s`: each request's
    median over the rounds, rising.
    """
    played = [one for requests in rounds for one in requests]
    decode, prefill = (_sums(one[phase] for one in played) for phase in ("decode", "prefill"))
    num_steps = sum(one["num_steps"] for one in played)
    by_request: dict[int, list[float]] = {}
    for one in played:
        by_request.setdefault(one["request"], []).append(one["latency_s"])
    counters = PhaseCounters()
    for name, value in decode.items():
        setattr(counters, name, value)
    rates = counters.rates()  # the shares of docs/conventions.md
    return {
        **{name: spread(one[name] for one in played) for name in TIMES},
        "latencies_s": sorted(map(median, by_request.values())),
        **{name: rates[name] for name in RATES},
        "stall_s": _quotient(decode["stall_ns"] / 1e9, num_steps),
        "bytes_loaded": _quotient(decode["loaded_nbytes"] + prefill["loaded_nbytes"], num_steps),
        "num_played": len(played),
    }


def simulated_figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """The same figures from a row of Study.results: single values, as a simulation repeats exactly."""
    times = row["times_by_request"] or []
    middle = {name: spread(one[name] for one in times) for name in TIMES}
    return {
        **{name: None if one is None else one["median"] for name, one in middle.items()},
        "latencies_s": sorted(one["latency_s"] for one in times),
        **{name: row[name] for name in RATES},
        "stall_s": _quotient(row["decode_stall_s"], row["decode_iterations"]),
        "bytes_loaded": _quotient(row["bytes_loaded"], row["decode_iterations"]),
        "floor_tpot_s": row["floor_tpot_s"],
    }


def ratio_to(
    rounds: Sequence[Sequence[dict[str, Any]]], beside: Sequence[Sequence[dict[str, Any]]]
) -> dict[str, float] | None:
    """The spread of TPOT relative to another system's, by pairs of the same request in the same round."""
    ratios = []
    for requests, others in zip(rounds, beside, strict=False):
        of_others = {one["request"]: one["tpot_s"] for one in others}
        ratios += [_quotient(one["tpot_s"], of_others.get(one["request"])) for one in requests]
    return spread(ratios)


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for name, value in one.items():
            total[name] = total.get(name, 0) + value
    return total


def _quotient(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


HARDLY = 0.99
"""A system whose time is above this share of the baseline's has no lead."""


def headline(rows: Sequence[dict[str, Any]], memories: Sequence[str], baseline: str) -> list[str]:
    """A few sentences for each budget."""
    return [_of_memory([row for row in rows if row["memory"] == memory], memory, baseline) for memory in memories]


def failures_in_words(results: Mapping[str, Any]) -> list[str]:
    """Which systems failed under which budget, why, and how much was measured before."""
    said = []
    for one in results["failures"]:
        sentence = f"{one['system']} ({one['where']}, {one['memory']}): {one['cause']}"
        if one["measured"]:
            of_all = results["settings"]["rounds"] * results["source"]["requests"]
            sentence += f"; {one['measured']} of {of_all} requests were measured before"
        said.append(sentence)
    return said


def best_row(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], str] | None:
    """The row of the fastest system under one budget, by the engine where it ran, else by the simulator; without times
    the one with the most hits. And which of the two measured it: "engine" or "simulated". A system that failed is never
    the best.
    """
    systems = _came_through(rows)
    for where in ("engine", "simulated"):
        if timed := _rising(systems, where):
            return timed[0], where
    hitting = [row for row in systems if row["simulated"] is not None and row["simulated"]["hit_rate"] is not None]
    return (max(hitting, key=lambda row: float(row["simulated"]["hit_rate"])), "simulated") if hitting else None


def _rising(rows: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """The systems with times, the fastest first: by their times relative to the baseline's for the same requests, so
    that other load on the machine cancels out; without a baseline, by their times.
    """
    timed = [row for row in _came_through(rows) if row[where] is not None and row[where]["tpot_s"] is not None]
    if sum(row[where].get("tpot_to_baseline") is None for row in timed) > 1:
        return sorted(timed, key=lambda row: _median(row[where]["tpot_s"]))
    return sorted(timed, key=lambda row: _median(row[where].get("tpot_to_baseline") or 1.0))


def _came_through(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if not (row["is_bound"] or row["has_failed"])]


def _median(value: Any) -> float:
    return float(value["median"] if isinstance(value, dict) else value)


def _of_memory(rows: Sequence[dict[str, Any]], memory: str, baseline: str) -> str:
    failed = [row["system"] for row in rows if row["has_failed"]]
    return _outcome(rows, memory, baseline) + (f" {', '.join(failed)} did not come through." if failed else "")


def _outcome(rows: Sequence[dict[str, Any]], memory: str, baseline: str) -> str:
    found = best_row(rows)
    if found is None:
        return f"{_budget(memory, rows)}: no system came through."
    best, where = found
    if best[where]["tpot_s"] is None:
        return _by_hits(rows, best, memory, baseline)
    said = [_verdict(rows, best, where, memory, baseline)]
    oracle = _bound(rows, "oracle")
    if best["simulated"] is not None and oracle is not None and best["simulated"]["tpot_s"] and oracle["tpot_s"]:
        ratio = best["simulated"]["tpot_s"] / oracle["tpot_s"]
        said.append(
            f"Best possible: in the simulator {best['system']} takes {format_seconds(best['simulated']['tpot_s'])} and "
            f"oracle, which knows the future, {format_seconds(oracle['tpot_s'])} ({format_ratio(ratio)})."
        )
    fewest = _bound(rows, "belady-global")
    if best["simulated"] is not None and fewest is not None and fewest["bytes_loaded"] is not None:
        said.append(
            f"{best['system']} loads {format_nbytes(best['simulated']['bytes_loaded'])} for each token of an answer "
            f"there, the least possible is {format_nbytes(fewest['bytes_loaded'])} (belady-global)."
        )
    return " ".join(said)


def _verdict(rows: Sequence[dict[str, Any]], best: dict[str, Any], where: str, memory: str, baseline: str) -> str:
    """Which system is fastest. A lead counts only where the upper quartile shows it, too."""
    tpot = format_seconds(_median(best[where]["tpot_s"]))
    place = "on the engine" if where == "engine" else "in the simulator"
    if best["system"] == baseline:
        said = f"{_budget(memory, rows)}: {baseline} is fastest {place}, {tpot} a token"
        second = _rising(rows, where)[1:2]
        return said + "".join(f"; next is {row['system']}{_ratio(row[where], baseline)}" for row in second) + "."
    ratio = spread_of(best[where].get("tpot_to_baseline"))
    if ratio is not None and ratio["q3"] > HARDLY:
        return (
            f"{_budget(memory, rows)}: no system is clearly faster than {baseline} {place}; {best['system']} comes "
            f"first, {tpot} a token{_ratio(best[where], baseline)}."
        )
    return (
        f"{_budget(memory, rows)}: {best['system']} is fastest {place}, {tpot} a token{_ratio(best[where], baseline)}."
    )


def _ratio(figures: dict[str, Any], baseline: str) -> str:
    ratio = spread_of(figures.get("tpot_to_baseline"))
    if ratio is None:
        return ""
    has_spread = ratio["q1"] < ratio["q3"]
    quartiles = f"; quartiles {format_range(format_ratio, ratio['q1'], ratio['q3'])}" if has_spread else ""
    return f", {format_ratio(ratio['median'])} the time of {baseline}{quartiles}"


def _by_hits(rows: Sequence[dict[str, Any]], best: dict[str, Any], memory: str, baseline: str) -> str:
    said = f"{_budget(memory, rows)}: {best['system']} has the most hits, {format_share(best['simulated']['hit_rate'])}"
    beside = next((row for row in rows if row["system"] == baseline), None)
    if beside is not None and beside["simulated"] is not None and beside is not best:
        said += f"; {baseline} has {format_share(beside['simulated']['hit_rate'])}"
    bound = _bound(rows, "belady-global")
    if bound is not None:
        said += f", the best possible without prefetch is {format_share(bound['hit_rate'])} (belady-global)"
    return said + "."


def _budget(memory: str, rows: Sequence[dict[str, Any]]) -> str:
    nbytes = next((row["memory_bytes"] for row in rows if row["memory_bytes"] and row["system"] != "resident"), None)
    share = f"{memory} of the experts" if memory.endswith("%") else memory
    return f"With {share}" + (f" ({format_nbytes(nbytes)})" if nbytes and memory.endswith("%") else "")


def _bound(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = next((row["simulated"] for row in rows if row["system"] == name), None)
    return found
