"""The tables of `run --stats`: what a system hit, missed, loaded and predicted, by layer, device and phase.

Columns of predictions are called as in --json, which has more (docs/conventions.md).
"""

from __future__ import annotations

from typing import Any

from expertly.cli.output import Column, figures_table, in_brackets
from expertly.core.units import format_nbytes, format_seconds, format_share

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
_SHARES = ("prediction_accuracy", "fetch_rate", "goodpred", "recall", "accuracy", "timeliness", "coverage")
_PREDICTED: dict[str, Column] = {
    **{name: (name, str) for name in ("phase", "predicted", "prefetched")},
    **{name: (name, format_share) for name in _SHARES},
}


def report(result: dict[str, Any]) -> str:
    """The text of `run --stats`, from what `run --json --stats` prints."""
    phases, kernels = result["phases"], result["kernels"]
    ran = [f"{kernels['native']} experts or parts by them, {kernels['torch']} by torch"]
    ran += [f"{kernels['programs']} layers of a token in one call each"] if kernels["programs"] else []
    ran += [f"no program for {kernels['stopped']}"] if kernels["stopped"] else []
    ran += [f"read {format_nbytes(result['bytes_disk'])}"]
    parts = [
        _by_phase([*result["layers"], phases | {"layer": "all"}], _OF_LAYER),
        in_brackets(f"kernels {kernels['name']}: {kernels['why']}", *ran),
    ]
    if len(result["devices"]) > 1:
        parts += [_by_phase(result["devices"], _OF_DEVICE), *map(_worker, result["devices"][1:])]
    problems = {device["host_memory"] for device in result["devices"]} - {None, "registered"}
    parts += [in_brackets(f"host memory: {problem}") for problem in sorted(problems)]
    if (prediction := result["prediction"]) is not None:
        facts = [f"{name} {'-' if num is None else f'{num:.4g}'}" for name, num in prediction["predictor"].items()]
        parts += [_by_phase([phases], _PREDICTED), in_brackets(*facts)]
    if (allocation := result["allocation"]) is not None:
        experts = " ".join(f"{num:g}" for num in allocation["experts"])
        parts.append(in_brackets(f"experts kept by layer {experts}", f"allocation {allocation['name']}"))
    return "\n\n".join(parts)


def phase_table(phases: dict[str, Any]) -> str:
    return _by_phase([phases], _COUNTED)


def _by_phase(rows: list[dict[str, Any]], columns: dict[str, Column]) -> str:
    phases = ("prefill", "decode")
    return figures_table([{**row[phase], **row, "phase": phase} for row in rows for phase in phases], columns)


def _worker(device: dict[str, Any]) -> str:
    """The way to a worker."""
    worker = device["worker"]
    times = f"{format_seconds(worker['call_s'])}, of which {format_seconds(worker['link_s'])} on the way"
    moved = f"{format_nbytes(worker['bytes_sent'])} sent, {format_nbytes(worker['bytes_received'])} received"
    lost = [] if worker["alive"] else [f"lost: {worker['problem']}"]
    return in_brackets(f"worker {device['device']}: {worker['calls']} calls in {times}", moved, *lost)
