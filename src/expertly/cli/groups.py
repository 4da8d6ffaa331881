"""Commands that are a group of commands: `expertly trace info` is the module expertly.cli.trace_info."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any


def add_group(subparsers: Any, name: str, commands: Sequence[str], summary: str, description: str | None) -> None:
    """The group `name` and the arguments of each of its commands."""
    parser = subparsers.add_parser(name, help=summary, description=description)
    group = parser.add_subparsers(dest=f"{name}_command", metavar="COMMAND", required=True)
    for command in commands:
        importlib.import_module(f"expertly.cli.{name}_{command}").add_parser(group)


def run_group(args: argparse.Namespace, name: str) -> int:
    """Run the one that was asked for."""
    status: int = importlib.import_module(f"expertly.cli.{name}_{getattr(args, f'{name}_command')}").run(args)
    return status
