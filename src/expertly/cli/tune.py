"""`expertly tune`: choose the fastest system for a model here, and remember it."""

from __future__ import annotations

import io
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.inputs import check_writable
from expertly.cli.output import Column, figures_table, message, print_json, progress_bar, reserved_stdout, show, typed
from expertly.core.errors import ConfigError
from expertly.core.files import disk_errors, write_atomic
from expertly.core.units import format_nbytes, format_range, format_ratio, format_seconds, format_share
from expertly.data import demo_prompts
from expertly.lab.prompts import read_prompts
from expertly.lab.tune.settings import TuneOptions
from expertly.options import check_one_memory

if TYPE_CHECKING:
    from expertly.lab.tune.search import Candidate, Scored
    from expertly.lab.tune.tune import Tuned
    from expertly.lab.tune.verdict import Calibration, Turns
    from expertly.sim.hardware import Hardware

SHOWN = 12
"""Rows of the simulator's ranking that the report shows."""


def run(args: TuneOptions) -> int:
    begin = time.monotonic()
    check_one_memory(args.memory, args.total_memory)
    prompts = read_prompts(str(demo_prompts()) if args.prompts is None else args.prompts, args.requests)
    if args.prompts is None:
        message(f"expertly: no --prompts: tuned for {len(prompts)} texts that ship, not for yours")
    check_writable(args.out)
    with reserved_stdout() as stdout:
        from expertly.lab.tune.tune import save, tune

        with progress_bar("turns") as progress:
            how: dict[str, Any] = {"begin": begin, "progress": progress, "command": typed()}
            tuned = tune(args, prompts, measured_machine, loading=progress.in_bytes, **how)
        path = save(tuned)
        result = result_of(args, tuned, path)
        if args.out is not None:
            text = io.StringIO()
            print_json(result, text)
            with disk_errors(args.out, "writing the result", ConfigError, ""):
                write_atomic(args.out, text.getvalue().encode())
        show(result, args.json, lambda: report(result), stdout)
    if path is None:
        message(f"expertly: nothing saved: {tuned.verdict.why}; give it more time (--time-limit)")
    else:
        message(f"expertly: saved in {path}; --system auto uses it from now on")
    return 0


def measured_machine() -> Hardware:
    """This machine as `expertly doctor --hardware-out` measures it, in less time."""
    from expertly.hardware.machine import Effort, examine, is_disturbed
    from expertly.hardware.simulated import machine_hardware
    from expertly.store.cache import cache_folder

    effort = Effort(scratch_nbytes=256 << 20, write_s=2.0, reads_s=3.0, each_s=0.2, device_s=1.0, wait_s=3.0)
    profile, problems = examine(cache_folder(), effort)
    if is_disturbed(problems):  # the search begins with it; what is kept is measured side by side
        message(f"expertly: {problems[-1].text}")
    return machine_hardware(profile)


def result_of(args: TuneOptions, tuned: Tuned, path: Path | None) -> dict[str, Any]:
    workload, verdict = tuned.seen.workload, tuned.verdict
    rows = {name: _rows(turns, tuned) for name, turns in (("heat", verdict.heat), ("final", verdict.final))}
    return {
        "model": args.model or "demo",
        "dtype": tuned.store.manifest.told_as,
        "memory": args.memory,
        "total_memory": args.total_memory,
        "memory_bytes": tuned.choice.memory_nbytes,
        "memory_reason": tuned.seen.memory_reason,
        "expert_bytes": tuned.store.experts_nbytes,
        "system": tuned.choice.system,
        "base_system": tuned.base.system.name,
        "default_system": tuned.default.system.name,
        "why": verdict.why,
        "is_verified": verdict.is_verified,
        "choice": tuned.choice.as_dict(),
        "gains": {gain.over: asdict(gain) for gain in tuned.choice.gains},
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
    """A candidate's simulated time, its measured overhead, and the parts whose overhead was not measured."""
    return {
        "system": one.candidate.label,
        "seconds": one.seconds,
        "requests": one.num_requests,
        "overhead_s": calibration.overhead_s(one.candidate),
        "unmeasured": [f"{part}={name}" for part, name in calibration.unmeasured(one.candidate)],
    }


def _rows(turns: Turns | None, tuned: Tuned) -> list[dict[str, Any]] | None:
    """The engine's figures of each candidate that ran, relative to the base system."""
    if turns is None:
        return None

    def row(candidate: Candidate) -> dict[str, Any]:
        gain = turns.gain(candidate, tuned.base)
        of_request = {"ttft_s": turns.ttft_s(candidate), "tpot_s": turns.tpot_s(candidate)}
        return {"system": candidate.label, **of_request, **asdict(gain)}

    return [row(candidate) for candidate in turns.played]


def report(result: dict[str, Any]) -> str:
    share = format_share(result["memory_bytes"] / result["expert_bytes"])
    lines = [
        f"{result['model']} in {format_nbytes(result['memory_bytes'])} ({share} of the experts): "
        f"{result['choice']['system']}, P = {result['choice']['segments']}",
        result["why"],
    ]
    for over, gain in result["gains"].items():
        lines.append(
            f"against {over}: {_ratio(gain['ratio'])} the time of a request "
            f"({format_range(_ratio, gain['low'], gain['high'])} over {gain['num_turns']} turns), "
            f"{_ratio(gain['tpot_ratio'])} the time per token"
        )
    for name, what in (("heat", "on the engine, the best few:"), ("final", "on the engine, once more:")):
        rows = result["verification"][name]
        if rows:
            lines += ["", what, figures_table(rows, _VERIFIED)]
    for system, reason in result["failed"].items():
        lines.append(f"left out: {system}: {reason}")
    if overheads := result["calibration"]:
        said = ", ".join(f"{kind} {_change(seconds)}" for kind, seconds in overheads.items())
        lines += ["", f"measured beyond the simulated, of a step, against {result['base_system']}: {said}"]
    search, workload, seconds = result["search"], result["workload"], result["seconds"]
    if search["ranking"]:
        ranking = [
            one | {"beyond": "not measured" if one["unmeasured"] else _change(one["overhead_s"])}
            for one in search["ranking"][:SHOWN]
        ]
        columns: dict[str, Column] = {
            "system": ("system", str),
            "time": ("seconds", format_seconds),
            "of requests": ("requests", str),
            "beyond it, a step": ("beyond", str),
        }
        lines += ["", f"simulated, the best of {search['tried']}:", figures_table(ranking, columns)]
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


def _change(seconds: float) -> str:
    return f"+{format_seconds(seconds)}" if seconds > 0 else format_seconds(seconds)


_ratio = partial(format_ratio, places=3)


_VERIFIED: dict[str, Column] = {
    "system": ("system", str),
    "TTFT": ("ttft_s", format_seconds),
    "TPOT": ("tpot_s", format_seconds),
    "time": ("ratio", _ratio),
    "95% low": ("low", _ratio),
    "high": ("high", _ratio),
    "TPOT ratio": ("tpot_ratio", _ratio),
    "turns": ("num_turns", str),
}
