"""`expertly lab trace import`: a trace of routing that somebody else recorded."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from expertly.cli.trace_summary import report_trace
from expertly.options import REQUIRED, argument, json_flag, option

DEFAULT_FORMAT = "npz"


@dataclass(frozen=True, kw_only=True)
class TraceImportOptions:
    file: Path = argument(REQUIRED, "the recorded routing", metavar="FILE", type=Path)
    out: Path = argument(REQUIRED, "where the trace goes: a new or an empty folder", metavar="OUT", type=Path)
    format: str = option("npz", "of FILE", metavar="NAME")
    geometry: str | None = option(None, "what the model's experts look like: a name or a TOML file", metavar="NAME")
    num_experts: int | None = option(None, "a layer", metavar="N", type=int, least=1)
    model: str | None = option(None, "what to call the model", metavar="NAME")
    json: bool = json_flag()


def run(args: TraceImportOptions) -> int:
    from expertly.sim.hardware import read_geometry
    from expertly.trace.importers import find_importer
    from expertly.trace.importers.base import ImportOptions
    from expertly.trace.schema import TraceLayer

    importer = find_importer(args.format)
    geometry = None if args.geometry is None else read_geometry(args.geometry)
    options = ImportOptions(
        model=args.model or (geometry.name if geometry is not None else args.file.stem),
        layers=None if geometry is None else tuple(TraceLayer.of(layer) for layer in geometry.layers),
        dense=None if geometry is None else geometry.dense,
        num_experts=args.num_experts,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=shlex.join(["expertly", *sys.argv[1:]]),
    )
    importer(args.file, args.out, options)
    report_trace(args.out, is_json=args.json)
    return 0
