"""`expertly maps trim`: fewer maps, or activation matrices, in a file; the most redundant ones go."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from expertly.cli.arguments import positive_int
from expertly.cli.maps_summary import read_stores, write_file
from expertly.cli.output import add_json_flag


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("trim", help="keep fewer maps", description=__doc__)
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="a file of maps or matrices")
    add("--capacity", type=positive_int, required=True, metavar="N", help="maps at most, from now on")
    add("--out", type=Path, metavar="OUT", help="write them here (default: to FILE)")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    file = read_stores(args.file)
    store = file.learned.merged([file.learned], args.capacity)
    write_file(args.out or args.file, store, file.header.identity, file.header.about, args.json)
    return 0
