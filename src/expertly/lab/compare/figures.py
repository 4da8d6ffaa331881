"""The figures of each system under each budget, engine and simulator in the same terms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from expertly.lab.compare.engine_runs import ComparedRuns
from expertly.lab.compare.settings import BOUNDS, ComparisonSettings
from expertly.scheduler.counters import PhaseCounters
from expertly.sim.metrics import percentile

TIMES = ("ttft_s", "tpot_s", "latency_s")

RATES = ("hit_rate", "partial_hit_rate", "coverage", "accuracy", "timeliness")


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Median and quartiles of what is known; None of nothing."""
    rising = sorted(value for value in values if value is not None)
    if not rising:
        return None
    low, high = percentile(rising, 25), percentile(rising, 75)
    assert low is not None and high is not None
    return {"median": median(rising), "q1": low, "q3": high}


def rows_of(
    settings: ComparisonSettings, runs: ComparedRuns | None, simulated: Mapping[tuple[str, str, int], dict[str, Any]]
) -> list[dict[str, Any]]:
    """A row for each budget and system, those of BOUNDS behind the systems asked for."""
    rows = []
    for memory in settings.memories:
        of_memory = [_row(settings, memory, name, runs, simulated) for name in settings.systems]
        bounds = [name for name in BOUNDS if name not in settings.systems]
        of_memory += [_bound(memory, name, simulated) for name in bounds]
        rows += [row for row in of_memory if row["engine"] is not None or row["simulated"] is not None]
    return rows


def _row(
    settings: ComparisonSettings,
    memory: str,
    name: str,
    runs: ComparedRuns | None,
    simulated: Mapping[tuple[str, str, int], dict[str, Any]],
) -> dict[str, Any]:
    played = None if runs is None else runs.played.get((memory, name))
    engine = None if not played or not any(played) else engine_figures(played)
    if engine is not None and name != settings.baseline:
        assert runs is not None
        beside = runs.played.get((memory, settings.baseline), [])
        engine["tpot_to_baseline"] = ratio_to(played or [], beside)
    found = next((row for key, row in simulated.items() if key[:2] == (memory, name)), None)
    figures = None if found is None else simulated_figures(found)
    baseline = next((row for key, row in simulated.items() if key[:2] == (memory, settings.baseline)), None)
    if figures is not None and baseline is not None and name != settings.baseline:
        figures["tpot_to_baseline"] = _quotient(figures["tpot_s"], simulated_figures(baseline)["tpot_s"])
    loaded = None if runs is None else runs.loaded.get((memory, name))
    facts = found or loaded or {}
    return {
        "memory": memory,
        "memory_bytes": facts.get("memory_bytes"),
        "system": name,
        "segments": facts.get("segments"),
        "is_bound": False,
        "has_failed": runs is not None and runs.has_failed(memory, name),  # on the engine, under this budget
        "engine": engine,
        "simulated": figures,
    }


def _bound(memory: str, name: str, simulated: Mapping[tuple[str, str, int], dict[str, Any]]) -> dict[str, Any]:
    """Of all P: the one with the fewest bytes; of the oracle, which is to be fast, the fastest."""
    found = [row for key, row in simulated.items() if key[:2] == (memory, name)]
    by = "tpot_s" if name in ("oracle", "resident") else "bytes_loaded"
    best = min(found, key=lambda row: (row[by] is None, row[by] or 0, row["segments"]), default=None)
    return {
        "memory": memory,
        "memory_bytes": None if best is None else best["memory_bytes"],
        "system": name,
        "segments": None if best is None else best["segments"],
        "is_bound": True,
        "has_failed": False,
        "engine": None,
        "simulated": None if best is None else simulated_figures(best),
    }


def engine_figures(rounds: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Medians and quartiles over requests and rounds of times, sums of what is counted. `latencies_s`: of each request,
    the median of its rounds, rising.
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
    """The same of a row of Study.results, which repeats itself exactly: one value instead of a spread."""
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
    """Spread of the ratios of TPOT to another system's, each of the same request in the same round."""
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
