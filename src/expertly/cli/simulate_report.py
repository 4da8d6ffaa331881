"""What `expertly lab simulate` says: what was simulated and assumed, and a table of the results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from expertly.cli.output import printable, table
from expertly.core.units import format_nbytes, format_rate, format_seconds, format_share
from expertly.scheduler.presets import get_system

if TYPE_CHECKING:
    from collections.abc import Sequence

    from expertly.cli.simulate import SimulateOptions
    from expertly.policies.learned import LearnedFile
    from expertly.policies.predictor.learned import LearnedWeights
    from expertly.sim.study import Study


_PREDICTING = {
    "predictions right": "prediction_accuracy",
    "of needed": "recall",
    "there in time": "fetch_rate",
    "coverage": "coverage",
    "accuracy": "accuracy",
    "in time": "timeliness",
    "goodpred": "goodpred",
}


def about(
    args: SimulateOptions,
    study: Study,
    systems: Sequence[str],
    geometry_name: str | None,
    predictor: LearnedFile[LearnedWeights] | None = None,
) -> dict[str, Any]:
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
        "codec": study.codec,
        "order": args.order,
        "matcher": args.predict,
        "seed": args.seed,
        "split": None if args.split is None else _parts(args.split),
        "predictor": None if predictor is None else str(predictor.path),
        "plan": None if args.plan is None else str(args.plan),
        "arrivals": None if args.arrivals is None else str(args.arrivals),
        "notes": [*_notes(args, study, systems), *_notes_on_codec(study), *_notes_on_weights(args, study, predictor)],
    }


def _parts(split: tuple[int, int]) -> str:
    return f"{split[0]}:{split[1]}"


def _notes(args: SimulateOptions, study: Study, systems: Sequence[str]) -> list[str]:
    """What one must know to read the numbers."""
    schedule, notes = study.schedule, []
    num_test = len({span.request for span in schedule.test})
    if args.split is None:
        notes.append("caches and profiles start empty")
    else:
        num = len({span.request for span in schedule.training})
        what = f"profiles learned from {num} requests, {num_test} others are simulated; caches start empty"
        notes.append(f"split {_parts(args.split)} with seed {args.seed}: {what}")
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
    notes += _notes_on_predicting(study, systems)
    return notes


def _notes_on_codec(study: Study) -> list[str]:
    """What compressed experts are taken to save and cost."""
    costs, hardware = study.codec_costs, study.hardware
    if costs is None:
        return []
    source = f"assumed: {hardware.name} has no [codec]" if hardware.codec is None else f"{hardware.name}'s [codec]"
    return [
        f"codec {study.codec}: experts take {costs.ratio:.2f} of their size on disk, {costs.threads} threads "
        f"decode {format_rate(costs.all_nbytes_per_s)} of weights ({source})"
    ]


def _notes_on_weights(args: SimulateOptions, study: Study, predictor: LearnedFile[LearnedWeights] | None) -> list[str]:
    """What the weights of a learned predictor learned from, and whether they have seen what is simulated."""
    if predictor is None:
        return []

    told = predictor.header.about
    notes = [f"predictor: {printable(told.get('model', '?'))}, learned from {printable(told.get('source', '?'))}"]
    own = (None if args.split is None else _parts(args.split), args.seed)
    if told.get("trace") == study.trace.fingerprint and own != (told.get("split"), told.get("seed")):
        notes.append(
            "predictor: it learned from some of the requests that are simulated; accepted as a measurement: "
            f"--split {printable(told.get('split'))} --seed {printable(told.get('seed'))}"
        )
    return notes


def _notes_on_predicting(study: Study, systems: Sequence[str]) -> list[str]:
    """What predictors looked at that is not what it was in the model, and what they take."""
    asked, trace, notes = [get_system(name) for name in systems], study.trace, []
    if any(system.prediction == "modelled" for system in asked):
        notes.append("modelled-lookahead: its predictions are made from the future, with a stated accuracy")
    if "lookahead" in study.wants and trace.is_modelled("lookahead"):
        notes.append(f"lookahead: {trace.manifest.fields['lookahead'].note}")
    if "scores" in study.wants and not trace.has("probs"):
        notes.append("routing scores: the trace has the chosen experts' weights only; those of the others count as 0")
    if "embedding" in study.wants and not trace.has("embedding"):
        notes.append("the trace has no embeddings: predictors that search by them do without")
    elif "embedding" in study.wants and not trace.is_real("embedding"):
        notes.append(f"embeddings: {trace.manifest.fields['embedding'].note or 'made up'}")
    if study.layers is not None and any(system.prediction != "none" for system in asked):
        if study.matcher == "inline":
            notes.append("predicting takes no time")
        elif not all("future" in system.needs or system.prediction == "none" for system in asked):
            notes.append(f"predicting takes the time of {study.hardware.name}'s [predictor], beside the device")
    return notes


def report(facts: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """For people: a headline, a table with a row for each system and budget, notes."""
    trace, cuts = facts["trace"], sorted({row["segments"] for row in results})
    size = "sizes unknown" if trace["expert_bytes"] is None else f"{format_nbytes(trace['expert_bytes'])} of experts"
    where = "" if trace["expert_bytes"] is None else f", on {facts['hardware']['name']}"
    head = (
        f"{trace['model']}: {trace['layers']} layers of {trace['experts']} experts, top-{trace['top_k']}, {size}; "
        f"P = {', '.join(map(str, cuts))}{where}"
    )
    several = {"P": _getter("segments", str)} if len(cuts) > 1 else {}
    parts = [head, _table(results, several | _columns(results))]
    predicting = [row for row in results if _predicts(row) and row["skipped"] is None]
    if predicting:
        rates = {header: _getter(key, format_share) for header, key in _PREDICTING.items()}
        parts.append(_table(predicting, several | rates))
    several_distances = [row for row in predicting if len(row["goodpred_by_distance"] or ()) > 1]
    if several_distances:
        parts.append(_table_by_distance(several_distances))
    matching = [row for row in predicting if _columns_of_matching([row])]
    if matching:
        parts.append(_table(matching, several | _columns_of_matching(matching)))
    skipped = list(dict.fromkeys(row["skipped"] for row in results if row["skipped"]))
    return "\n\n".join([*parts, "\n".join([*facts["notes"], *skipped])])


def _predicts(row: dict[str, Any]) -> bool:
    """What the oracle foretells is always right."""
    return get_system(row["system"]).prediction not in ("none", "perfect")


def _table_by_distance(results: Sequence[dict[str, Any]]) -> str:
    """ACCURACY x FETCHRATE = GOODPRED of predictions made k layers ahead (ProMoE, section 4)."""
    rows = []
    for row in results:
        for k, accuracy in row["accuracy_by_distance"].items():
            rates = (accuracy, row["fetch_rate_by_distance"][k], row["goodpred_by_distance"][k])
            rows.append([row["memory"], row["system"], k, *map(format_share, rates)])
    return table(["memory", "system", "layers ahead", "right", "there in time", "goodpred"], rows)


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
    if any(row["segments"] > 1 for row in results):
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
    if any(row["bytes_read"] is not None for row in results):
        columns["read"] = _getter("bytes_read", lambda nbytes: "-" if nbytes is None else format_nbytes(nbytes))
    if any(row["latency_s"] for row in results):
        columns["latency p50"] = lambda row: format_seconds((row["latency_s"] or {}).get("p50"))
        columns["p99"] = lambda row: format_seconds((row["latency_s"] or {}).get("p99"))
    return columns


def _columns_of_matching(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Those of which something is known: what came too late, and whether similar maps were right (fMoE, figure 8)."""
    columns: dict[str, Any] = {}
    if any(row["gate"] for row in rows):
        columns["gate"] = _getter("gate", lambda gate: "-" if gate is None else gate["state"])
    for header, key in (("late", "predictions_late"), ("dropped", "contexts_dropped")):
        if any(row[key] for row in rows):
            columns[header] = _getter(key, str)
    for search in ("semantic", "trajectory"):
        key = f"similarity_correlation_{search}"
        if any(row[key] is not None for row in rows):
            columns[f"r {search}"] = _getter(key, lambda r: "-" if r is None else f"{r:.2f}")
    return columns


def _getter(key: str, write: Any) -> Any:
    return lambda row: write(row[key])


def _of_floor(row: dict[str, Any]) -> str:
    return f"{row['tpot_s'] / row['floor_tpot_s']:.2f}x" if row["floor_tpot_s"] and row["tpot_s"] is not None else "-"
