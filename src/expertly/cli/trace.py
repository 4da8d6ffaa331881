"""`expertly trace`: record, import, make up and look at what a model routes."""

from __future__ import annotations

import argparse
from typing import Any

from expertly.cli.groups import add_group, run_group

TRACE_COMMANDS = ("record", "info", "import", "synth", "replay")


def add_parser(subparsers: Any) -> None:
    add_group(subparsers, "trace", TRACE_COMMANDS, "record, import and look at routing traces", __doc__)


def run(args: argparse.Namespace) -> int:
    return run_group(args, "trace")
