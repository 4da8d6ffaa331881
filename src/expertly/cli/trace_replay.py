"""`expertly trace replay`: feeds an engine's recorded observations to a new control plane, compares its decisions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from expertly.cli.output import add_json_flag, print_json
from expertly.core.errors import TraceError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("replay", help="check recorded decisions", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="written by `expertly trace record --decisions FILE`")
    parser.add_argument(
        "--allow-imports",
        action="store_true",
        help="import the modules that the file names parts of its system by (MODULE.NAME), which runs their code",
    )
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 2 where a decision comes out otherwise."""
    from expertly.scheduler.decisions import replay_file

    path: Path = args.file
    header, replayed = replay_file(path, may_import=args.allow_imports)
    if replayed.difference is not None:
        line, recorded, now = replayed.difference
        raise TraceError(f"{path}, line {line}: recorded {recorded:.200}, replayed {now:.200}")
    num_iterations = replayed.num_layers // len(header["layers"])
    result = {
        "path": str(path),
        "system": header["system"],
        "segments": header["segments"],
        "iterations": num_iterations,
        "layers": replayed.num_layers,
        "calls": replayed.num_calls,
        "bytes": replayed.nbytes,
        "identical": True,
    }
    if args.json:
        print_json(result)
        return 0
    what = f"{num_iterations} iterations, {replayed.num_layers} layers, {replayed.num_calls} calls"
    print(f"system {header['system']}, P = {header['segments']}: {what}: all decisions identical")
    return 0
