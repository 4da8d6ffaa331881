"""What matching activation matrices costs, on one core: 26 layers, E = 64, K = 6, full collections (MoE-Infinity, B.1).

    python bench/matrices.py [--capacity 120 1000 10000] [--tokens 48] [--matches 4] [--prefill 512]

Bounds (medians): `query_us`, one layer's increment and the nearest matrix of a decode iteration, the query of B.1: 21
us with 1000 matrices and 226 with 10000, as there. `query_m_us`: the same with the m nearest. `layer_us`: all that a
router's choice causes, prediction and outlook with it; `add_us`: the end of a request, whose matrix replaces the
nearest; `prefill_layer_us`: a layer of a prompt of many rows. Medians over the tokens after the 8th.
"""

from __future__ import annotations

import argparse
import os
import statistics
from copy import deepcopy
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when NumPy is imported

import numpy as np
from report import print_report

from expertly.core.messages import RouterRan
from expertly.core.observation import Began, Routed
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.eam import EAM, EAMOptions
from expertly.policies.predictor.eam.matrices import Matrices
from expertly.reproduce.moe_infinity.query import BOUNDS_US, LAYERS, SHAPE, WARM_UP, choices, clocked, full, query


def one_pass(eam: EAM, request: int, dice: np.random.Generator, num_rows: int) -> list[float]:
    """Microseconds of each layer of a pass."""
    list(eam.begin_iteration(Began(np.full(num_rows, request), np.full(num_rows, num_rows > 1))))
    chosen, times = choices(dice, num_rows), []
    for layer in range(LAYERS):
        routed = Routed(RouterRan(layer, [0], [1], [True], num_rows), np.ascontiguousarray(chosen[:, layer]))
        times.append(clocked(lambda routed=routed: list(eam.router_ran(routed))))
    eam.end_iteration(True)
    return times


def run(capacity: int, num_tokens: int, matches: int, num_prefill: int) -> dict[str, Any]:
    dice = np.random.default_rng(0)
    collection = full(capacity, dice)
    row: dict[str, Any] = {"capacity": capacity, "query_us": query(collection, dice, num_tokens, 1)}
    row["query_m_us"] = query(collection, dice, num_tokens, matches)
    eam = EAM(SHAPE, 1, EAMOptions(capacity=capacity, matches=matches))
    known = Matrices(ModelShape.of(SHAPE), capacity)
    known.prefill, known.decode = deepcopy(collection), collection
    eam.adopt(known)
    layers = [spent for token in range(WARM_UP + num_tokens) for spent in one_pass(eam, 1, dice, 1)]
    row["layer_us"] = statistics.median(layers[WARM_UP * LAYERS :])
    row["add_us"] = statistics.median(clocked(eam.finish) for _ in range(9) if one_pass(eam, 2, dice, 1))
    prefill = [spent for request in range(3) for spent in one_pass(eam, 3 + request, dice, num_prefill)]
    row["prefill_layer_us"] = statistics.median(prefill)
    bound = BOUNDS_US.get(capacity)
    row |= {"bound_us": bound, "within_bound": None if bound is None else row["query_us"] <= bound}
    row["matrices_bytes"] = collection.matrices.nbytes + collection.columns.nbytes
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, nargs="+", default=[120, 1000, 10000])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--matches", type=int, default=4)
    parser.add_argument("--prefill", type=int, default=512)
    args = parser.parse_args()
    rows = [run(capacity, args.tokens, args.matches, args.prefill) for capacity in args.capacity]
    print_report("matrices", rows, vars(args))


if __name__ == "__main__":
    main()
