"""What `expertly tune` prints: the choice, what it gained, and how it was found."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.output import table
from expertly.core.units import format_nbytes, format_seconds, format_share

if TYPE_CHECKING:
    from expertly.cli.tune import TuneOptions
    from expertly.lab.tune.search import Candidate, Scored
    from expertly.lab.tune.tune import Tuned
    from expertly.lab.tune.verdict import Calibration, Turns

SHOWN = 12
"""Of the simulator's ranking."""


def result_of(args: TuneOptions, tuned: Tuned, path: Path | None) -> dict[str, Any]:
    """For --json."""
    workload, verdict = tuned.seen.workload, tuned.verdict
    rows = {name: _rows(turns, tuned) for name, turns in (("heat", verdict.heat), ("final", verdict.final))}
    return {
        "model": args.model or "demo",
        "dtype": tuned.store.manifest.dtype,
        "memory": args.memory,
        "memory_bytes": tuned.choice.memory_nbytes,
        "memory_reason": tuned.seen.memory_reason,
        "expert_bytes": tuned.store.experts_nbytes,
        "system": tuned.choice.system,
        "base_system": tuned.base.system.name,
        "default_system": tuned.default.system.name,
        "why": verdict.why,
        "is_verified": verdict.is_verified,
        "choice": tuned.choice.as_dict(),
        "gains": {gain.over: asdict(gain) for gain in tuned.gains},
        "saved": None if path is None else str(path),
        "verification": rows,
        "failed": {one.label: reason for one, reason in (tuned.calibration.failed | verdict.failed).items()},
        "calibration": {f"{part}={name}": found for (part, name), found in tuned.calibration.overheads_s.items()},
        "search": {
            "tried": tuned.found.num_scored,
            "is_whole": tuned.found.is_whole,
            "ranking": [_ranked(one, tuned.calibration) for one in tuned.found.ranking],
        },
        "workload": {
            "requests": workload.num_requests,
            "left_out": workload.num_left_out,
            "tried_on": len(workload.requests),
            "tokens": workload.trace.num_rows,
            "absent": workload.absent,
        },
        "times": tuned.seen.times,
        "hardware": tuned.seen.hardware.as_dict(),
        "seconds": tuned.seconds | {"total": sum(tuned.seconds.values())},
    }


def _ranked(one: Scored, calibration: Calibration) -> dict[str, Any]:
    """What was simulated, what of it was measured to be beyond that, and of what nobody knows."""
    return {
        "system": one.candidate.label,
        "seconds": one.seconds,
        "requests": one.num_requests,
        "budget_bytes": one.candidate.budget_nbytes,
        "overhead_s": calibration.overhead_s(one.candidate),
        "unmeasured": [f"{part}={name}" for part, name in calibration.unmeasured(one.candidate)],
    }


def _rows(turns: Turns | None, tuned: Tuned) -> list[dict[str, Any]] | None:
    """Of each that ran, beside what nothing may be slower than."""
    if turns is None:
        return None

    def row(candidate: Candidate) -> dict[str, Any]:
        gain = turns.gain(candidate, tuned.base)
        of_request = {"ttft_s": turns.ttft_s(candidate), "tpot_s": turns.tpot_s(candidate)}
        return {"system": candidate.label, **of_request, **asdict(gain)}

    return [row(candidate) for candidate in turns.played]


def report(result: dict[str, Any]) -> str:
    """For people."""
    share = format_share(result["memory_bytes"] / result["expert_bytes"])
    lines = [
        f"{result['model']} in {format_nbytes(result['memory_bytes'])} ({share} of the experts): "
        f"{result['choice']['system']}, P = {result['choice']['segments']}",
        result["why"],
    ]
    for over, gain in result["gains"].items():
        lines.append(
            f"against {over}: {gain['ratio']:.3f}x the time of a request ({gain['low']:.3f} to {gain['high']:.3f} over "
            f"{gain['num_turns']} turns), {gain['tpot_ratio']:.3f}x the time per token"
        )
    for name, what in (("heat", "on the engine, the best few"), ("final", "on the engine, once more")):
        rows = result["verification"][name]
        if rows:
            lines += ["", _verification(what, rows)]
    for system, reason in result["failed"].items():
        lines.append(f"left out: {system}: {reason}")
    if overheads := result["calibration"]:
        said = ", ".join(f"{kind} {1e3 * seconds:+.2f} ms" for kind, seconds in overheads.items())
        lines += ["", f"measured beyond the simulated, of a step, against {result['base_system']}: {said}"]
    search, workload, seconds = result["search"], result["workload"], result["seconds"]
    if search["ranking"]:
        headers = (f"simulated, best of {search['tried']}", "seconds", "of requests", "beyond it, a step")
        ranking = search["ranking"][:SHOWN]
        rows = [[one["system"], f"{one['seconds']:.3f}", str(one["requests"]), _beyond(one)] for one in ranking]
        lines += ["", table(headers, rows)]
        if unknown := dict.fromkeys(kind for one in ranking for kind in one["unmeasured"]):
            lines.append(f"not measured on the engine before the search, and simulated alone: {', '.join(unknown)}")
    if not search["is_whole"]:
        lines.append("time was up before all that could be tried was")
    lines += [
        "",
        f"{workload['requests']} requests recorded, {workload['tokens']} tokens; tried on {workload['tried_on']}",
        f"simulated with {result['times']}",
        ", ".join(f"{name} {format_seconds(spent)}" for name, spent in seconds.items()),
    ]
    return "\n".join(lines)


def _beyond(one: dict[str, Any]) -> str:
    return "not measured" if one["unmeasured"] else f"{1e3 * one['overhead_s']:+.2f} ms"


def _verification(what: str, rows: list[dict[str, Any]]) -> str:
    headers = (what, "TTFT", "TPOT", "time", "95% low", "high", "TPOT ratio", "turns")
    cells = [
        [
            row["system"],
            format_seconds(row["ttft_s"]),
            format_seconds(row["tpot_s"]),
            f"{row['ratio']:.3f}x",
            f"{row['low']:.3f}",
            f"{row['high']:.3f}",
            f"{row['tpot_ratio']:.3f}x",
            str(row["num_turns"]),
        ]
        for row in rows
    ]
    return table(headers, cells)
