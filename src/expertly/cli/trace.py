"""`expertly trace`: record, import, make up and look at what a model routes."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

TRACE_COMMANDS = ("record", "info", "import", "synth", "replay")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("trace", help="record, import and look at routing traces", description=__doc__)
    commands = parser.add_subparsers(dest="trace_command", metavar="COMMAND", required=True)
    for name in TRACE_COMMANDS:
        importlib.import_module(f"expertly.cli.trace_{name}").add_parser(commands)


def run(args: argparse.Namespace) -> int:
    status: int = importlib.import_module(f"expertly.cli.trace_{args.trace_command}").run(args)
    return status
