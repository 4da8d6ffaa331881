"""What each of several devices did, as a table."""

from __future__ import annotations

from typing import Any

from expertly.cli.output import table
from expertly.core.units import format_nbytes, format_seconds, format_share


def device_table(devices: list[dict[str, Any]]) -> str:
    """A row a device and phase; under it what the machine's memory nodes did not allow."""
    headers = ("device", "experts", "memory", "phase", "hits", "partial", "misses", "hit rate", "loaded", "stall")
    rows = []
    for one in devices:
        for phase in ("prefill", "decode"):
            counted = one[phase]
            rows.append(
                (
                    one["device"],
                    str(one["experts"]),
                    format_nbytes(one["memory_bytes"]),
                    phase,
                    *(str(counted[name]) for name in ("hits", "partial_hits", "misses")),
                    format_share(counted["hit_rate"]),
                    format_nbytes(counted["bytes_loaded"]),
                    format_seconds(counted["stall_s"]),
                )
            )
    nodes = [f"[{one['device']}: memory node {_node(one['numa'])}]" for one in devices if one["numa"] is not None]
    return "\n".join([table(headers, rows), *nodes])


def _node(numa: dict[str, Any]) -> str:
    problem = numa["problem"]
    return f"{numa['node']}, {format_nbytes(numa['bound_bytes'])} bound" + (f"; {problem}" if problem else "")
