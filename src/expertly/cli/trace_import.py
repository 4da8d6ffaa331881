"""`expertly trace import`: a trace of routing that somebody else recorded."""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from expertly.cli.arguments import positive_int
from expertly.cli.output import add_json_flag
from expertly.cli.trace_summary import report_trace

DEFAULT_FORMAT = "npz"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("import", help="make a trace of recorded routing", description=__doc__)
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="the recorded routing")
    add("out", type=Path, metavar="OUT", help="where the trace goes: a new or an empty folder")
    add("--format", default=DEFAULT_FORMAT, metavar="NAME", help=f"of FILE (default: {DEFAULT_FORMAT})")
    add("--geometry", metavar="NAME", help="what the model's experts look like: a name or a TOML file")
    add("--num-experts", type=positive_int, metavar="N", help="a layer (default: the geometry's, else guessed)")
    add("--model", metavar="NAME", help="what to call the model (default: the geometry's or the file's name)")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
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
