"""The outcome in words: which system is best under each budget, and how far from the baseline and the best possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from expertly.core.units import format_nbytes, format_seconds, format_share

HARDLY = 0.99
"""Of the baseline's time: what is not below it is no lead."""


def headline(rows: Sequence[dict[str, Any]], memories: Sequence[str], baseline: str) -> list[str]:
    """A sentence or a few for each budget."""
    return [_of_memory([row for row in rows if row["memory"] == memory], memory, baseline) for memory in memories]


def failures_in_words(results: Mapping[str, Any]) -> list[str]:
    """Which systems did not come through under which budget, why, and how much of them was measured."""
    said = []
    for one in results["failures"]:
        sentence = f"{one['system']} ({one['where']}, {one['memory']}): {one['cause']}"
        if one["measured"]:
            of_all = results["settings"]["rounds"] * results["source"]["requests"]
            sentence += f"; {one['measured']} of {of_all} requests were measured before"
        said.append(sentence)
    return said


def best_row(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], str] | None:
    """Of one budget: the system with the least time a token, by the engine where it ran; without times, with the most
    hits. And where that was measured: "engine" or "simulated". Who failed, however fast until then, is not the best.
    """
    systems = _came_through(rows)
    for where in ("engine", "simulated"):
        if timed := _rising(systems, where):
            return timed[0], where
    hitting = [row for row in systems if row["simulated"] is not None and row["simulated"]["hit_rate"] is not None]
    return (max(hitting, key=lambda row: float(row["simulated"]["hit_rate"])), "simulated") if hitting else None


def _rising(rows: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """The systems that were timed, by their time against the baseline's for the same requests: what else the machine
    did then slowed both down. Without a baseline by their times.
    """
    timed = [row for row in _came_through(rows) if row[where] is not None and row[where]["tpot_s"] is not None]
    ratios = [row[where].get("tpot_to_baseline") for row in timed]
    if sum(ratio is None for ratio in ratios) > 1:
        return sorted(timed, key=lambda row: tpot_of(row[where]))
    known = [1.0 if ratio is None else ratio["median"] if isinstance(ratio, dict) else ratio for ratio in ratios]
    return [timed[index] for index in sorted(range(len(timed)), key=lambda index: known[index])]


def _came_through(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if not (row["is_bound"] or row["has_failed"])]


def tpot_of(figures: dict[str, Any]) -> float:
    """The median time a token."""
    tpot = figures["tpot_s"]
    return float(tpot["median"] if isinstance(tpot, dict) else tpot)


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
            f"oracle, which knows the future, {format_seconds(oracle['tpot_s'])} ({ratio:.2f}x)."
        )
    fewest = _bound(rows, "belady-global")
    if best["simulated"] is not None and fewest is not None and fewest["bytes_loaded"] is not None:
        said.append(
            f"{best['system']} loads {format_nbytes(best['simulated']['bytes_loaded'])} for each token of an answer "
            f"there, the least possible is {format_nbytes(fewest['bytes_loaded'])} (belady-global)."
        )
    return " ".join(said)


def _verdict(rows: Sequence[dict[str, Any]], best: dict[str, Any], where: str, memory: str, baseline: str) -> str:
    """Who is fastest; a lead that the upper quartile does not bear out is none."""
    tpot = format_seconds(tpot_of(best[where]))
    place = "on the engine" if where == "engine" else "in the simulator"
    if best["system"] == baseline:
        said = f"{_budget(memory, rows)}: {baseline} is fastest {place}, {tpot} a token"
        second = _rising(rows, where)[1:2]
        return said + "".join(f"; next is {row['system']}{_ratio(row[where], baseline)}" for row in second) + "."
    ratio = best[where].get("tpot_to_baseline")
    if ratio is not None and (ratio["q3"] if isinstance(ratio, dict) else ratio) > HARDLY:
        return (
            f"{_budget(memory, rows)}: no system is clearly faster than {baseline} {place}; {best['system']} comes "
            f"first, {tpot} a token{_ratio(best[where], baseline)}."
        )
    return (
        f"{_budget(memory, rows)}: {best['system']} is fastest {place}, {tpot} a token{_ratio(best[where], baseline)}."
    )


def _ratio(figures: dict[str, Any], baseline: str) -> str:
    ratio = figures.get("tpot_to_baseline")
    if ratio is None:
        return ""
    if isinstance(ratio, dict):
        quartiles = f"; quartiles {ratio['q1']:.2f} to {ratio['q3']:.2f}"
        return f", {ratio['median']:.2f}x the time of {baseline}{quartiles}"
    return f", {ratio:.2f}x the time of {baseline}"


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
