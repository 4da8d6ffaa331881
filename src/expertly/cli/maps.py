"""`expertly maps`: files of expert maps, by which fmoe predicts, and of activation matrices, by which moe-infinity
does: made of traces, looked at, merged, cut. Files of what expertly learned of reuse can be looked at.
"""

from __future__ import annotations

import argparse
from typing import Any

from expertly.cli.groups import add_group, run_group

MAPS_COMMANDS = ("build", "info", "merge", "trim", "export", "size")


def add_parser(subparsers: Any) -> None:
    add_group(subparsers, "maps", MAPS_COMMANDS, "files of what fmoe and moe-infinity predict by", __doc__)


def run(args: argparse.Namespace) -> int:
    return run_group(args, "maps")
