"""What `expertly simulate` says: what was simulated and assumed, and a table of the results."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from expertly.cli.output import format_nbytes, format_seconds, format_share, table
from expertly.systems import SYSTEMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from expertly.sim.study import Study


def about(args: argparse.Namespace, study: Study, systems: Sequence[str], geometry_name: str | None) -> dict[str, Any]:
    """Everything but the results."""
    manifest = study.trace.manifest
    return {
        "trace": {
            "path": str(args.trace),
            "model": manifest.model,
            "layers": len(manifest.layers),
            "experts": manifest.layers[0].num_experts,
            "top_k": manifest.layers[0].top_k,
            "geometry": geometry_name,
            "expert_bytes": None if study.layers is None else study.geometry.nbytes,
            "complete": study.trace.is_complete,
        },
        "hardware": study.hardware.as_dict(),
        "order": args.order,
        "seed": args.seed,
        "split": args.split,
        "arrivals": None if args.arrivals is None else str(args.arrivals),
        "notes": _notes(args, study, systems),
    }


def _notes(args: argparse.Namespace, study: Study, systems: Sequence[str]) -> list[str]:
    """What one must know to read the numbers."""
    schedule, notes = study.schedule, []
    num_test = len({span.request for span in schedule.test})
    if args.split is None:
        notes.append("caches and profiles start empty")
    else:
        num = len({span.request for span in schedule.training})
        what = f"profiles learned from {num} requests, {num_test} others are simulated; caches start empty"
        notes.append(f"split {args.split} with seed {args.seed}: {what}")
    if study.layers is None:
        notes.append("the trace does not know its experts' sizes: rates only; give --geometry for bytes and times")
        notes.append("rates of systems that load ahead (oracle, too) are those of a link that takes no time")
    elif study.dense is None:
        notes.append("the weights outside the experts are unknown: their time is only the profile's fixed part")
    if not study.trace.is_complete:
        notes.append("the recording was cut off; what there is of it is simulated")
    if args.arrivals is not None:
        notes.append(f"{num_test} requests arrive and queue, one is served at a time")
    if schedule.num_cut:
        notes.append(f"{schedule.num_cut} of them are shorter than their arrivals say: the trace holds no more of them")
    if any("modelled" in SYSTEMS[name].prediction for name in systems):
        notes.append("modelled-lookahead: its predictions are made from the future, with a stated accuracy")
    return notes


def report(facts: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """For people: a headline, a table with a row for each system and budget, notes."""
    trace, num_segments = facts["trace"], results[0]["segments"]
    size = "sizes unknown" if trace["expert_bytes"] is None else f"{format_nbytes(trace['expert_bytes'])} of experts"
    head = (
        f"{trace['model']}: {trace['layers']} layers of {trace['experts']} experts, top-{trace['top_k']}, {size}; "
        f"P = {num_segments}" + ("" if trace["expert_bytes"] is None else f", on {facts['hardware']['name']}")
    )
    parts = [head, _table(results, _columns(results))]
    predicting = [row for row in results if _predicts(row) and row["skipped"] is None]
    if predicting:
        shares = {"coverage": "coverage", "accuracy": "accuracy", "in time": "timeliness", "goodpred": "goodpred"}
        shares = {"predictions right": "prediction_accuracy", "there in time": "fetch_rate", **shares}
        parts.append(_table(predicting, {header: _getter(key, format_share) for header, key in shares.items()}))
    skipped = list(dict.fromkeys(row["skipped"] for row in results if row["skipped"]))
    return "\n\n".join([*parts, "\n".join([*facts["notes"], *skipped])])


def _predicts(row: dict[str, Any]) -> bool:
    """What the oracle foretells is always right."""
    return SYSTEMS[row["system"]].prediction not in ("none", "perfect")


def _table(results: Sequence[dict[str, Any]], columns: dict[str, Any]) -> str:
    """A row for each result; `columns`: header -> the cell of a row. A gap between budgets."""
    rows: list[list[str]] = []
    memory = None
    for row in results:
        is_first = row["memory"] != memory
        memory = row["memory"]
        if is_first and rows and len(results) > 3:
            rows.append([""] * (len(columns) + 2))
        rows.append([memory if is_first else "", row["system"], *(cell(row) for cell in columns.values())])
    return table(["memory", "system", *columns], rows)


def _columns(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Those of which something is known."""
    shares = {"hit rate": "hit_rate"}
    if results[0]["segments"] > 1:
        shares["partial"] = "partial_hit_rate"
    if any(row["stall_share"] is not None for row in results):
        shares["stall"] = "stall_share"
    columns: dict[str, Any] = {header: _getter(key, format_share) for header, key in shares.items()}
    for header, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")):
        if any(row[key] is not None for row in results):
            columns[header] = _getter(key, format_seconds)
    if any(row["floor_tpot_s"] for row in results):
        columns["of floor"] = _of_floor
    if any(row["bytes_loaded"] is not None for row in results):
        columns["loaded"] = _getter("bytes_loaded", lambda nbytes: "-" if nbytes is None else format_nbytes(nbytes))
    if any(row["latency_s"] for row in results):
        columns["latency p50"] = lambda row: format_seconds((row["latency_s"] or {}).get("p50"))
        columns["p99"] = lambda row: format_seconds((row["latency_s"] or {}).get("p99"))
    return columns


def _getter(key: str, write: Any) -> Any:
    return lambda row: write(row[key])


def _of_floor(row: dict[str, Any]) -> str:
    return f"{row['tpot_s'] / row['floor_tpot_s']:.2f}x" if row["floor_tpot_s"] and row["tpot_s"] is not None else "-"
