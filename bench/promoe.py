"""ProMoE against what it was compared with, on one trace.

    python bench/promoe.py TRACE [--study accuracy] [--distances 1,2,4,8] [--hidden 96] [--seed 0] [--out FILE]

The trace must be full (`expertly lab trace record --full`). 70 % of the requests are learned from, the rest judges.

accuracy  the share of the experts named that decode needed, by layer and distance: learned, lookahead, token id (the
          figures 8 and 9); its last rows are means, with the number of layers in which the learned one is at least as
          good as each of the others, and in which lookahead is worse than the token id
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import print_report

from expertly.cli.arguments import distances
from expertly.lab.study import study
from expertly.lab.train import TrainOptions
from expertly.trace.reader import Trace

SPLIT = (7, 3)
BOUND_AT = (2, 4, 8)
"""Distances at which the learned predictor must be as good as both others, on average."""


def accuracy(trace: Trace, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    found = study(trace, SPLIT, TrainOptions(args.distances, args.hidden, seed=args.seed)).as_dict()
    for row in found["accuracy"]:
        yield {"study": "accuracy", **row}
    for distance, row in found["mean"].items():
        is_best = row["learned"] >= max(row[name] or 0.0 for name in ("lookahead", "token_id"))
        bound = {"bound_holds": is_best} if int(distance) in BOUND_AT else {}
        yield {"study": "accuracy", "distance": int(distance), "layer": "mean", **row, **bound}


STUDIES = {"accuracy": accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--study", default=",".join(STUDIES))
    parser.add_argument("--distances", type=distances, default="1,2,4,8")
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    args = parser.parse_args()
    trace = Trace.open(args.trace)
    rows: list[dict[str, Any]] = []
    for name in args.study.split(","):
        if name not in STUDIES:
            parser.error(f"--study {name!r}: accepted: {', '.join(STUDIES)}")
        rows += STUDIES[name](trace, args)
    settings = {key: str(value) for key, value in vars(args).items() if key != "out"}
    print_report("promoe", rows, settings, args.out)


if __name__ == "__main__":
    main()
