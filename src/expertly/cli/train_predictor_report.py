"""What `expertly lab train` says: how often the predictors are right, by layer and distance."""

from __future__ import annotations

from typing import Any

from expertly.cli.output import printable, table
from expertly.core.units import format_nbytes, format_seconds, format_share


def report(result: dict[str, Any]) -> str:
    requests, tokens = result["requests"], result["tokens"]
    parts = [
        printable(result["model"]),
        f"{result['networks']} networks of {result['parameters']} numbers at most",
        f"distances {', '.join(map(str, result['distances']))}",
        format_nbytes(result["bytes"]),
        result["out"],
    ]
    memory, scratch = format_nbytes(result["peak_rss_bytes"]), format_nbytes(result["scratch_bytes"])
    learned = (
        f"split {result['split']} with seed {result['seed']}: learned from {tokens['training']} tokens of "
        f"{requests['training']} requests, stopped by {requests['stopping']} others; "
        f"{format_seconds(result['seconds'])} on {result['device']}, {memory} of memory and {scratch} of scratch file"
    )
    title = (
        f"share of the experts named that {tokens['test']} tokens of the {requests['test']} requests kept back needed, "
        "by layers ahead\n(token id: whatever the distance; *: lookahead is below it)"
    )
    return "\n\n".join(("[" + " | ".join(parts) + "]\n" + learned, title + "\n" + accuracy_table(result)))


def accuracy_table(result: dict[str, Any]) -> str:
    """A row for each layer, those of every distance side by side."""
    distances = result["distances"]
    cells: dict[int, dict[int, dict[str, Any]]] = {}
    for one in result["accuracy"]:
        cells.setdefault(one["layer"], {})[one["distance"]] = one
    headers = ["layer", "token id", *(f"{name} {one}" for one in distances for name in ("learned", "lookahead"))]
    rows = []
    for layer, found in sorted(cells.items()):
        row = [str(layer), format_share(next(iter(found.values()))["token_id"])]
        for distance in distances:
            row += _pair(found[distance])
        rows.append(row)
    if rows:
        means = result["mean"]
        last = ["mean", format_share(next(iter(means.values()))["token_id"])]
        for distance in distances:
            last += _pair(means[str(distance)])
        rows.append(last)
    return table(headers, rows)


def _pair(found: dict[str, Any]) -> list[str]:
    lookahead, token_id = found["lookahead"], found["token_id"]
    is_below = lookahead is not None and token_id is not None and lookahead < token_id
    return [format_share(found["learned"]), format_share(lookahead) + ("*" if is_below else "")]
