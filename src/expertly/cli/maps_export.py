"""`expertly maps export`: the maps, or activation matrices, as plain NumPy arrays, for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from expertly.cli.maps_summary import read_stores
from expertly.cli.output import add_json_flag, format_nbytes, message, print_json
from expertly.core.errors import ConfigError, StoreError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("export", help="write what a file holds as NumPy arrays", description=__doc__)
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="a file of maps or matrices")
    add(
        "out",
        type=Path,
        metavar="OUT",
        help="an .npz: maps [L, C, E], chosen [C, L, K], requests, born, embeddings; or "
        "prefill, decode [C, L, E], prefill_born, decode_born",
    )
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    import numpy as np

    from expertly.core.files import disk_errors, replacing

    if args.out.suffix != ".npz":
        raise ConfigError(f"out={str(args.out)!r}: must end in .npz")
    file = read_stores(args.file)
    shape = file.header.shape
    arrays: dict[str, Any] = {
        **(file.learned.state() or {}),
        "num_experts": np.array(shape.num_experts),
        "top_k": np.array(shape.top_k),
        "identity": np.array(file.header.identity),
    }
    with disk_errors(args.out.parent, f"writing {args.out.name}", StoreError, ""), replacing(args.out) as out:
        np.savez(out, **arrays)
    nbytes = args.out.stat().st_size
    if args.json:
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        print_json({"file": str(args.file), "out": str(args.out), "bytes": nbytes, "arrays": shapes})
    else:
        what = f"{file.learned.num_learned} {file.learned.kind}"
        message(f"expertly: {args.out}: {what}, {format_nbytes(nbytes)}")
    return 0
