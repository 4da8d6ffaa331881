"""`expertly maps merge`: one file of the maps of several, of one model; the most redundant ones go."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from expertly.cli.arguments import positive_int
from expertly.cli.maps_summary import write_maps
from expertly.cli.output import add_json_flag
from expertly.core.errors import StoreError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("merge", help="make one maps file of several", description=__doc__)
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="the file to write; it may be one of those merged")
    add("files", type=Path, nargs="+", metavar="FILE", help="maps files of the same model, older ones first")
    add("--capacity", type=positive_int, metavar="N", help="maps at most (default: that of the largest)")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from expertly.maps.file import MapsFile
    from expertly.maps.merge import merged

    first = MapsFile.read(args.files[0])
    identity, shape = first.header.identity, first.header.shape
    files = [first, *(MapsFile.read(path, identity, shape) for path in args.files[1:])]
    sizes = [None if file.store.embeddings is None else file.store.embeddings.shape[1] for file in files]
    known = next((size for size in sizes if size is not None), None)
    for file, size in zip(files, sizes, strict=True):
        if size not in (None, known):
            raise StoreError(f"{file.path}: tensor 'embeddings': {size} numbers each; those merged before have {known}")
    capacity = args.capacity or max(file.store.capacity for file in files)
    about = {**first.header.about, "source": "merged from " + ", ".join(str(file.path) for file in files)}
    write_maps(args.out, merged([file.store for file in files], capacity), identity, about, args.json)
    return 0
