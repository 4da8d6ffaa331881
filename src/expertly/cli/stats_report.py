"""The tables of `run --stats`: what a system hit, missed, loaded and predicted, by layer, device and phase.

--json has more: predictions also by their distance.
"""

from __future__ import annotations

from typing import Any

from expertly.cli.output import Column, figures_table, in_brackets, table
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
_OF_DEVICE: dict[str, Column] = {
    "device": ("device", str),
    "experts": ("experts", str),
    "memory": ("memory_bytes", format_nbytes),
}
_OF_PHASE = {
    "predicted": "experts predicted",
    "prediction_accuracy": "of these, needed",
    "fetch_rate": "of these, there in time",
    "goodpred": "the product of both (GOODPRED)",
    "recall": "needed experts that it named",
    "prefetched": "experts loaded ahead",
    "accuracy": "of these, needed",
    "timeliness": "of these, in time",
    "coverage": "misses that it spared",
}


def report(result: dict[str, Any]) -> str:
    """The text of `run --stats`, from what `run --json --stats` prints."""
    layers = [*result["layers"], result["phases"] | {"layer": "all"}]
    columns: dict[str, Column] = {"layer": ("layer", str), **_COUNTED, "compute": ("compute_s", format_seconds)}
    parts = [figures_table(_by_phase(layers), columns), _storage(result), _kernels(result["kernels"])]
    if len(result["devices"]) > 1:
        parts.append(device_table(result["devices"]))
    pinned = {one["host_memory"] for one in result["devices"]} - {None, "registered"}
    parts += [in_brackets(f"host memory: {problem}") for problem in sorted(pinned)]
    if num := sum(result["phases"][name]["computed_on_host"] for name in PHASES):
        parts.append(in_brackets(f"{num} of the misses were computed by the processor, from host memory"))
    if result["prediction"] is not None:
        parts.append(_prediction(result["prediction"], [result["phases"][name] for name in PHASES]))
    if (reuse := result["reuse"]) is not None:
        problem = [] if reuse["problem"] is None else [reuse["problem"]]
        parts.append(in_brackets(f"reuse: {reuse['says']}", f"{reuse['tokens']} tokens by now", *problem))
    if result["allocation"] is not None:
        parts.append(_allocation(result["allocation"]))
    return "\n\n".join(parts)


def phase_table(phases: dict[str, Any]) -> str:
    return figures_table([{"phase": name, **one} for name, one in phases.items()], _COUNTED)


def device_table(devices: list[dict[str, Any]]) -> str:
    """A row for each phase of the device and of each worker; below, the way to each worker."""
    workers = []
    for one in devices:
        if (worker := one["worker"]) is not None:
            sent, received = format_nbytes(worker["bytes_sent"]), format_nbytes(worker["bytes_received"])
            times = f"{format_seconds(worker['call_s'])}, of which {format_seconds(worker['link_s'])} on the way"
            state = [] if worker["alive"] else [f"dropped: {worker['problem']}"]
            told = f"worker {one['device']}: {worker['calls']} calls in {times}"
            workers.append(in_brackets(told, f"{sent} sent, {received} received", f"{worker['drops']} drops", *state))
    return "\n".join([figures_table(_by_phase(devices), _OF_DEVICE | _COUNTED), *workers])


def _by_phase(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row[phase], **row, "phase": phase} for row in rows for phase in PHASES]


def _prediction(prediction: dict[str, Any], phases: list[dict[str, Any]]) -> str:
    """How well predictions did, by phase, and the predictor's own figures."""
    rows = []
    for key, label in _OF_PHASE.items():
        shown = [str(one[key]) if isinstance(one[key], int) else format_share(one[key]) for one in phases]
        rows.append((label, *shown))
    facts = {
        **{
            name.replace("_", " "): "-" if value is None else f"{value:.4g}"
            for name, value in prediction["predictor"].items()
        },
    }
    if prediction["maps_file"] is not None:
        facts["learned"] = f"{prediction['maps_file']} ({prediction['maps_read']} maps at the start)"
    line = in_brackets(*(f"{name} {value}" for name, value in facts.items()))
    return f"{table(('prediction', *PHASES), rows)}\n{line}"


def _storage(result: dict[str, Any]) -> str:
    parts = []
    if (rounding := result["rounding"]) is not None:
        parts.append(f"experts rounded to {rounding['to']}")
    if len(formats := result["dense"]["formats"]) > 1:
        parts.append("dense part " + ", ".join(f"{format_nbytes(size)} in {name}" for name, size in formats.items()))
    return in_brackets(*parts, f"read {format_nbytes(result['bytes_disk'])}")


def _kernels(kernels: dict[str, Any]) -> str:
    counts = f"{kernels['native']} experts or parts by them, {kernels['torch']} by torch"
    return in_brackets(f"kernels {kernels['name']}: {kernels['why']}", counts)


def _allocation(allocation: dict[str, Any]) -> str:
    """How many experts each layer keeps, and the allocation's own figures."""
    experts = " ".join(f"{num:g}" for num in allocation["experts"])
    told = [f"{name} {value}" for name, value in allocation.items() if name not in ("experts", "recall")]
    return in_brackets(f"experts kept by layer {experts}", f"allocation {' | '.join(told).removeprefix('name ')}")
