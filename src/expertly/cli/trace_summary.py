"""What `trace import` and `trace synth` say when they are done, and `trace info` says first."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.output import print_json, table
from expertly.core.units import format_nbytes

if TYPE_CHECKING:
    from expertly.trace.reader import Trace


def report_trace(folder: Path, is_json: bool, more: dict[str, Any] | None = None) -> None:
    """Open the trace that was just written, and print what it is; `more` goes into the JSON object."""
    from expertly.trace.reader import Trace

    trace = Trace.open(folder)
    if is_json:
        print_json({**trace_facts(trace), **(more or {})})
        return
    print(headline(trace))


def trace_facts(trace: Trace) -> dict[str, Any]:
    """What the manifest and the requests say, for --json."""
    manifest = trace.manifest
    categories = Counter(request.category for request in trace.requests if request.category is not None)
    return {
        "trace": str(trace.folder),
        "model": manifest.model,
        "created": manifest.created,
        "command": manifest.command,
        "complete": trace.is_complete,
        "scoring": manifest.scoring,
        "num_layers": len(manifest.layers),
        "num_experts": [layer.num_experts for layer in manifest.layers],
        "top_k": [layer.top_k for layer in manifest.layers],
        "expert_bytes": [_expert_nbytes(trace, index) for index in range(len(manifest.layers))],
        "requests": len(trace.requests),
        "categories": dict(sorted(categories.items())),
        "rows": trace.num_rows,
        "iterations": trace.num_iterations,
        "bytes": sum(path.stat().st_size for path in trace.folder.iterdir() if path.is_file()),
        "fields": {
            name: {
                "dtype": field.dtype,
                "shape": list(field.shape),
                "real": field.is_real,
                "stored": field.is_stored,
                "note": field.note,
            }
            for name, field in manifest.fields.items()
        },
    }


def headline(trace: Trace) -> str:
    """One line."""
    facts = trace_facts(trace)
    parts = [
        facts["model"],
        f"{facts['num_layers']} layers of {_span(facts['num_experts'])} experts, top-{_span(facts['top_k'])}",
        f"{facts['requests']} requests",
        f"{facts['iterations']} iterations",
        f"{facts['rows']} tokens",
        format_nbytes(facts["bytes"]),
        "complete" if facts["complete"] else "partial: the recording did not end",
        facts["trace"],
    ]
    return "[" + " | ".join(parts) + "]"


def fields_table(trace: Trace) -> str:
    rows = []
    for name, field in trace.manifest.fields.items():
        shape = " x ".join(map(str, field.shape)) or "-"
        rows.append((name, field.dtype, shape, "yes" if field.is_real else "no", field.note))
    widest = max(len(row[-1]) for row in rows)  # the note is text: to the left, unlike the other columns
    return table(
        ("field", "dtype", "a row", "real", "note".ljust(widest)), [(*r[:-1], r[-1].ljust(widest)) for r in rows]
    )


def _expert_nbytes(trace: Trace, index: int) -> int | None:
    geometry = trace.manifest.layers[index].geometry()
    return None if geometry is None else geometry.expert_nbytes


def _span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"
