"""The tables of `run --stats`: what a system hit, missed, loaded and predicted, by layer, device and phase.

Columns of predictions are called as in --json, which has more (docs/conventions.md).
"""

from __future__ import annotations

from typing import Any

from expertly.cli.output import Column, figures_table, in_brackets
from expertly.core.units import format_nbytes, format_seconds, format_share

PHASES = ("prefill", "decode")

_COUNTED: dict[str, Column] = {
    "phase": ("phase", str),
    "hits": ("hits", str),
    "partial": ("partial_hits", str),
    "misses": ("misses", str),
    "hit rate": ("hit_rate", format_share),
    "loaded": ("bytes_loaded", format_nbytes),
    "stall": ("stall_s", format_seconds),
}
_OF_LAYER: dict[str, Column] = {"layer": ("layer", str), **_COUNTED, "compute": ("compute_s", format_seconds)}
_OF_DEVICE: dict[str, Column] = {
    "device": ("device", str),
    "experts": ("experts", str),
    "memory": ("memory_bytes", format_nbytes),
    **_COUNTED,
}
_PREDICTED: dict[str, Column] = {
    "phase": ("phase", str),
    **{name: (name, str) for name in ("predicted", "prefetched")},
    **{
        name: (name, format_share)
        for name in ("prediction_accuracy", "fetch_rate", "goodpred", "recall", "accuracy", "timeliness", "coverage")
    },
}


def report(result: dict[str, Any]) -> str:
    """The text of `run --stats`, from what `run --json --stats` prints."""
    phases, kernels = result["phases"], result["kernels"]
    ran = [f"{kernels['native']} experts or parts by them, {kernels['torch']} by torch"]
    ran += [f"{kernels['programs']} layers of a token in one call each"] if kernels["programs"] else []
    ran += [f"no program for {kernels['stopped']}"] if kernels["stopped"] else []
    parts = [
        figures_table(_by_phase([*result["layers"], phases | {"layer": "all"}]), _OF_LAYER),
        in_brackets(
            f"kernels {kernels['name']}: {kernels['why']}", *ran, f"read {format_nbytes(result['bytes_disk'])}"
        ),
    ]
    if len(result["devices"]) > 1:
        parts += [figures_table(_by_phase(result["devices"]), _OF_DEVICE), *map(_worker, result["devices"][1:])]
    problems = {device["host_memory"] for device in result["devices"]} - {None, "registered"}
    parts += [in_brackets(f"host memory: {problem}") for problem in sorted(problems)]
    if (prediction := result["prediction"]) is not None:
        parts += [figures_table(_by_phase([phases]), _PREDICTED), _predictor(prediction)]
    if (reuse := result["reuse"]) is not None:
        problem = [] if reuse["problem"] is None else [reuse["problem"]]
        parts.append(in_brackets(f"reuse: {reuse['says']}", f"{reuse['tokens']} tokens by now", *problem))
    if (allocation := result["allocation"]) is not None:
        experts = " ".join(f"{num:g}" for num in allocation["experts"])
        figures = [f"{name} {value}" for name, value in allocation.items() if name not in ("name", "experts", "recall")]
        parts.append(in_brackets(f"experts kept by layer {experts}", f"allocation {allocation['name']}", *figures))
    return "\n\n".join(parts)


def phase_table(phases: dict[str, Any]) -> str:
    return figures_table(_by_phase([phases]), _COUNTED)


def _by_phase(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row[phase], **row, "phase": phase} for row in rows for phase in PHASES]


def _worker(device: dict[str, Any]) -> str:
    """The way to a worker."""
    worker = device["worker"]
    times = f"{format_seconds(worker['call_s'])}, of which {format_seconds(worker['link_s'])} on the way"
    calls = f"worker {device['device']}: {worker['calls']} calls in {times}"
    moved = f"{format_nbytes(worker['bytes_sent'])} sent, {format_nbytes(worker['bytes_received'])} received"
    problem = [] if worker["alive"] else [f"dropped: {worker['problem']}"]
    return in_brackets(calls, moved, f"{worker['drops']} drops", *problem)


def _predictor(prediction: dict[str, Any]) -> str:
    """The predictor's own figures, and where it keeps what it learns."""
    figures = prediction["predictor"].items()
    facts = [f"{name} {'-' if value is None else f'{value:.4g}'}" for name, value in figures]
    if prediction["maps_file"] is not None:
        facts.append(f"learned {prediction['maps_file']} ({prediction['maps_read']} maps at the start)")
    return in_brackets(*facts)
