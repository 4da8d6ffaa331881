"""`expertly systems`: the presets and the parts they are made of."""

from __future__ import annotations

import argparse
from typing import Any

from expertly.cli.output import add_json_flag, print_json, table
from expertly.systems import SYSTEMS

PARTS = ("eviction", "scope", "allocation", "prediction", "transfer")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("systems", help="list the systems and their parts", description=__doc__)
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    fields = ("name", *PARTS, "summary")
    systems = [{name: getattr(system, name) for name in fields} for system in SYSTEMS.values()]
    if args.json:
        print_json({"systems": systems})
        return 0
    print(table(("system", *PARTS), [[system[name] for name in fields[:-1]] for system in systems]))
    print()
    for system in systems:
        print(f"{system['name']}: {system['summary']}")
    return 0
