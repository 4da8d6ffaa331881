"""`expertly maps`: files of expert maps, by which fmoe predicts: made of traces, looked at, merged, cut."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

MAPS_COMMANDS = ("build", "info", "merge", "trim", "export", "size")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("maps", help="files of expert maps, by which fmoe predicts", description=__doc__)
    commands = parser.add_subparsers(dest="maps_command", metavar="COMMAND", required=True)
    for name in MAPS_COMMANDS:
        importlib.import_module(f"expertly.cli.maps_{name}").add_parser(commands)


def run(args: argparse.Namespace) -> int:
    status: int = importlib.import_module(f"expertly.cli.maps_{args.maps_command}").run(args)
    return status
