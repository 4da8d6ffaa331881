"""What matching expert maps costs, on one core: 26 layers, E = 64, K = 8, H = 2048, distance 3, a full store.

    python bench/matcher.py [--capacity 1000 32000] [--tokens 48] [--prefill 512]

Bounds (medians): `layer_us`, all that a router's scores of one decode row cause (search over the layers so far, best
match, selection, prediction): 60 us a layer at 1000 maps, 800 us at 32000. `begin_us`, the semantic search and its
predictions: 600 us at 1000. `add_us`: the update of the store after a decode iteration. `prefill_*`: the same of a pass
of many rows. `other_layer_us`: of layers that have no layer to predict ahead. `copy_us`: what NumPy takes to copy one
layer's maps, for scale: a search reads them once. Medians over the tokens after the 24th.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when NumPy is imported

import numpy as np
from common import print_report

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import RouterRan
from expertly.core.observation import Began, Floats, History, Routed
from expertly.policies.predictor.fmoe import FMoE, FMoEOptions
from expertly.policies.predictor.fmoe.store import MapStore

LAYERS, EXPERTS, TOP_K, HIDDEN, DISTANCE = 26, 64, 8, 2048, 3
WARM_UP = 24
BOUNDS_US = {1000: {"layer_us": 60.0, "begin_us": 600.0}, 32000: {"layer_us": 800.0}}


def routing(dice: np.random.Generator, num_rows: int) -> tuple[Floats, Floats]:
    """Scores [T, L, E], peaked as softmax routers' are, and embeddings [T, H]."""
    logits = 2 * dice.standard_normal((num_rows, LAYERS, EXPERTS), np.float32)
    scores = np.exp(logits)
    scores /= scores.sum(axis=2, keepdims=True)
    return scores.astype(np.float16).astype(np.float32), dice.standard_normal((num_rows, HIDDEN), np.float32)


def top(scores: Floats) -> np.ndarray:
    return np.argsort(-scores, axis=-1)[..., :TOP_K]


def clocked(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def one_pass(fmoe: FMoE, requests: np.ndarray, scores: Floats, embedding: Floats) -> dict[str, list[float]]:
    """Microseconds of a pass, by part."""
    num_rows = len(requests)
    began = Began(requests, np.full(num_rows, num_rows > 1), embedding)
    times: dict[str, list[float]] = {"begin_us": [clocked(lambda: list(fmoe.begin_iteration(began)))]}
    chosen = top(scores)
    for layer in range(LAYERS):
        router = RouterRan(layer, [0], [1], [True], num_rows)
        routed = Routed(router, chosen[:, layer], np.ascontiguousarray(scores[:, layer]))
        part = "layer_us" if layer + DISTANCE < LAYERS else "other_layer_us"
        times.setdefault(part, []).append(clocked(lambda routed=routed: list(fmoe.router_ran(routed))))
    times["add_us"] = [clocked(lambda: fmoe.end_iteration(True))]
    return times


def filled(capacity: int, dice: np.random.Generator) -> tuple[FMoE, float]:
    """A predictor whose store is full, and the seconds that filling took."""
    shape = Geometry(tuple(LayerGeometry(EXPERTS, TOP_K, HIDDEN, 64, 3, 2) for _ in range(LAYERS)))
    fmoe = FMoE(shape, DISTANCE, FMoEOptions(capacity=capacity))
    seconds = 0.0
    for first in range(0, capacity, 500):
        count = min(500, capacity - first)
        scores, embedding = routing(dice, count)
        requests = (first + np.arange(count)) // 20
        history = History(requests, np.zeros(count, np.bool_), top(scores), scores, embedding)
        seconds += clocked(lambda history=history: fmoe.learn(history)) / 1e6
    return fmoe, seconds


def run(capacity: int, num_tokens: int, num_prefill: int) -> dict[str, Any]:
    dice = np.random.default_rng(0)
    fmoe, fill_s = filled(capacity, dice)
    row: dict[str, Any] = {"capacity": capacity, "fill_s": fill_s}
    times: dict[str, list[float]] = {}
    request = np.array([1 << 20])
    for token in range(WARM_UP + num_tokens):
        for part, values in one_pass(fmoe, request, *routing(dice, 1)).items():
            if token >= WARM_UP:
                times.setdefault(part, []).extend(values)
    row |= {part: statistics.median(values) for part, values in times.items()}
    maps, into = fmoe.learned.maps, np.empty_like(fmoe.learned.maps[0])
    copies = [clocked(lambda layer=layer: np.copyto(into, maps[layer])) for _ in range(5) for layer in range(LAYERS)]
    row["copy_us"] = statistics.median(copies)
    prefill: dict[str, list[float]] = {}
    for number in range(3):
        requests = np.full(num_prefill, (1 << 21) + number)
        for part, values in one_pass(fmoe, requests, *routing(dice, num_prefill)).items():
            prefill.setdefault(f"prefill_{part}", []).extend(values)
    row |= {part: statistics.median(values) for part, values in prefill.items()}
    bounds = BOUNDS_US.get(capacity, {})
    row["within_bounds"] = all(row[part] <= bound for part, bound in bounds.items()) if bounds else None
    row["maps_bytes"], row["embeddings_bytes"] = MapStore.nbytes_of(fmoe.learned.shape, capacity, HIDDEN)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, nargs="+", default=[1000, 8000, 32000])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prefill", type=int, default=512)
    args = parser.parse_args()
    rows = [run(capacity, args.tokens, args.prefill) for capacity in args.capacity]
    print_report("matcher", rows, vars(args))


if __name__ == "__main__":
    main()
