"""The tables of `run --stats`: what a system hit, missed, loaded and predicted, by layer and phase."""

from __future__ import annotations

from typing import Any

from expertly.cli.device_table import device_table
from expertly.cli.output import table
from expertly.core.units import format_nbytes, format_seconds, format_share


def report(result: dict[str, Any]) -> str:
    """Of `run --json`, with its layers."""
    parts = [_stats_table(result), _storage_line(result), _kernels_line(result["kernels"])]
    if len(result["devices"]) > 1:
        parts.append(device_table(result["devices"]))
    if result["prediction"] is not None:
        parts.append(_prediction_table(result))
    if result["reuse"] is not None:
        parts.append(_reuse_line(result["reuse"]))
    if result["allocation"] is not None:
        parts.append(_allocation_line(result["allocation"]))
    return "\n\n".join(parts)


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


_OF_DISTANCE = {
    "accuracy_by_distance": "needed",
    "fetch_rate_by_distance": "there in time",
    "goodpred_by_distance": "GOODPRED",
}


def _prediction_table(result: dict[str, Any]) -> str:
    """The same by phase, and what the predictor says of itself."""
    prediction, phases = result["prediction"], [result["phases"][name] for name in ("prefill", "decode")]
    rows = []
    for key, label in _OF_PHASE.items():
        shown = [str(one[key]) if isinstance(one[key], int) else format_share(one[key]) for one in phases]
        rows.append((label, *shown))
    for key, label in _OF_DISTANCE.items():
        of_distance = [one[key] or {} for one in phases]
        for distance in sorted({distance for one in of_distance for distance in one}, key=int):
            shares = [format_share(one.get(distance)) for one in of_distance]
            rows.append((f"{label}, predicted {distance} ahead", *shares))
    facts = {
        "matcher": prediction["matcher"],
        "late": prediction["predictions_late"],
        "contexts dropped": prediction["contexts_dropped"],
        "collecting": format_seconds(prediction["collect_s"]),
        **{name.replace("_", " "): _fact(value) for name, value in prediction["predictor"].items()},
    }
    if prediction["gate"] is not None:
        facts["gate"] = prediction["gate"]["says"]
    if prediction["maps_file"] is not None:
        facts["maps file"] = f"{prediction['maps_file']} ({prediction['maps_read']} maps at the start)"
    line = " | ".join(f"{name} {value}" for name, value in facts.items())
    return f"{table(('prediction', 'prefill', 'decode'), rows)}\n[{line}]"


def _reuse_line(reuse: dict[str, Any]) -> str:
    """What the eviction began with, and from how much it has learned by now."""
    problem = [] if reuse["problem"] is None else [reuse["problem"]]
    return "[" + " | ".join([f"reuse: {reuse['says']}", f"{reuse['tokens']} tokens by now", *problem]) + "]"


def _fact(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _storage_line(result: dict[str, Any]) -> str:
    """How experts are stored, why, and what reading and decoding took."""
    codec = result["codec"]
    parts = [f"codec {codec['name']}: {codec['why']}"]
    if codec["name"] != "none":
        decoded = format_nbytes(result["bytes_decoded"])
        parts += [
            f"stored in {format_share(codec['ratio'])} of the bytes",
            f"decoded {decoded} in {format_seconds(result['decode_s'])} of processor time",
        ]
    if result["compute_threads"] is not None:
        threads = result["compute_threads"]
        number, passes = threads["beside_decoders"], threads["passes_with_fewer"]
        parts.append(f"threads that compute beside decoders: {number}, in {passes} passes")
    return "[" + " | ".join([*parts, f"read {format_nbytes(result['bytes_disk'])}"]) + "]"


def _kernels_line(kernels: dict[str, Any]) -> str:
    """What multiplied the experts, why, and how often."""
    counts = f"{kernels['native']} experts or parts by them, {kernels['torch']} by torch"
    return f"[kernels {kernels['name']}: {kernels['why']} | {counts}]"


def _allocation_line(allocation: dict[str, Any]) -> str:
    """The experts that each layer keeps, and what the allocation says of itself."""
    experts = " ".join(f"{num:g}" for num in allocation["experts"])
    told = [f"{name} {value}" for name, value in allocation.items() if name not in ("experts", "recall")]
    return f"[experts kept by layer {experts} | allocation {' | '.join(told).removeprefix('name ')}]"


def _stats_table(result: dict[str, Any]) -> str:
    headers = ("layer", "phase", "hits", "partial", "misses", "hit rate", "loaded", "stall", "compute")
    sources = [(str(layer["layer"]), layer) for layer in result["layers"]] + [("all", result["phases"])]
    rows = []
    for name, phases in sources:
        for phase in ("prefill", "decode"):
            one = phases[phase]
            counts = [str(one[key]) for key in ("hits", "partial_hits", "misses")]
            times = [format_seconds(one[key]) for key in ("stall_s", "compute_s")]
            rows.append(
                (name, phase, *counts, format_share(one["hit_rate"]), format_nbytes(one["bytes_loaded"]), *times)
            )
    return table(headers, rows)
