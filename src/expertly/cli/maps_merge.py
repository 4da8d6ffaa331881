"""`expertly maps merge`: one file of the maps or activation matrices of several, of one model; redundant ones go."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import positive_int
from expertly.cli.maps_summary import read_stores, write_file
from expertly.cli.output import add_json_flag
from expertly.core.errors import StoreError

if TYPE_CHECKING:
    from expertly.policies.learned import LearnedFile


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("merge", help="make one file of several", description=__doc__)
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="the file to write; it may be one of those merged")
    add("files", type=Path, nargs="+", metavar="FILE", help="files of one kind and model, older ones first")
    add("--capacity", type=positive_int, metavar="N", help="maps at most (default: that of the largest)")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    first = read_stores(args.files[0])
    files = [first, *(read_stores(path, first) for path in args.files[1:])]
    _check_embeddings(files)
    capacity = args.capacity or max(file.learned.capacity for file in files)
    sources = ", ".join(str(file.path) for file in files)
    about = {**first.header.about, "source": f"merged from {sources}"}
    write_file(
        args.out,
        first.learned.merged([file.learned for file in files], capacity),
        first.header.identity,
        about,
        args.json,
    )
    return 0


def _check_embeddings(files: Sequence[LearnedFile[Any]]) -> None:
    """Raises StoreError where two files have embeddings of different sizes."""
    from expertly.policies.predictor.fmoe.store import MapStore

    known = None
    for file in files:
        if isinstance(file.learned, MapStore) and file.learned.embeddings is not None:
            size = file.learned.embeddings.shape[1]
            if known not in (None, size):
                raise StoreError(
                    f"{file.path}: tensor 'embeddings': {size} numbers each; those merged before have {known}"
                )
            known = size
