"""What MoEpic's configurator costs and how good it is, without a model, on one core.

    python bench/configurator.py [--tokens 400] [--cases 100]

All times are of the processor. `statistics_us`: mean of what one token adds to the statistics of a layer, in the order
in which a decode step visits them (bound at E = 256, K = 8: 30 us; every 32nd token counts what 32 have shown, hence
`p50_us` and `p99_us`); `without_scores_us`: of a token without predicted scores; `rates_ms`: reading them.
`configure_s`: one configuration, from rates to plan (bound at L = 61, E = 256, P = 16: 2 s). `gap`: exposed time above
the least over all allocations, found by trying them all, of seeded small cases (bound: a median of 5 %), and that of
equal budgets with the best splits (`uniform`) and with half of each expert (`start`). All of planted routing: Zipf
popularity, tokens that keep some of the last one's experts, and predicted scores that are the true ones with noise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when NumPy is imported

import numpy as np
import numpy.typing as npt
from report import print_report

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.policies.moepic.configurator import configure
from expertly.policies.moepic.forecast import Forecaster
from expertly.policies.moepic.statistics import LayerRates, LayerStatistics
from expertly.policies.moepic.timing import Timing

WARM_UP = 50
BOUND_US, BOUND_S, BOUND_GAP = 30.0, 2.0, 0.05

Numbers = npt.NDArray[Any]


def routing(dice: np.random.Generator, tokens: int, experts: int, top_k: int, noise: float) -> tuple[Numbers, Numbers]:
    """Needed experts [T, K] and predicted scores [T, E] of one layer."""
    popularity = -dice.uniform(0.3, 1.5) * np.log(1.0 + dice.permutation(experts))
    needed = np.empty((tokens, top_k), np.int64)
    predicted = np.empty((tokens, experts), np.float32)
    own = dice.gumbel(size=experts)
    for token in range(tokens):
        own = np.where(dice.random(experts) < 0.3, dice.gumbel(size=experts), own)
        logits = popularity + own
        needed[token] = np.argsort(-logits, kind="stable")[:top_k]
        scores = np.exp(logits + noise * dice.standard_normal(experts))
        predicted[token] = scores / scores.sum()
    return needed, predicted


def gathered(dice: np.random.Generator, tokens: int, experts: int, top_k: int) -> LayerRates:
    """The rates of a layer whose predictions are somewhere between perfect and useless."""
    layer = LayerStatistics(experts)
    layer.learn(*routing(dice, tokens, experts, top_k, float(dice.choice([0.0, 0.3, 1.0, 2.0, 5.0]))))
    return layer.rates()


def shape_of(layers: int, experts: int, top_k: int, segments: int) -> Geometry:
    return Geometry(tuple(LayerGeometry(experts, top_k, 16, 16 * segments, 3, 2) for _ in range(layers)), segments)


def statistics_cost(layers: int, experts: int, top_k: int, tokens: int) -> dict[str, Any]:
    dice = np.random.default_rng(0)
    routed = [routing(dice, WARM_UP + tokens, experts, top_k, 1.0) for _ in range(layers)]
    row: dict[str, Any] = {"what": "statistics", "layers": layers, "experts": experts, "top_k": top_k}
    for name, has_scores in (("statistics_us", True), ("without_scores_us", False)):
        gatherers = [LayerStatistics(experts) for _ in range(layers)]
        times = []
        for token in range(WARM_UP + tokens):
            for layer, (needed, predicted) in zip(gatherers, routed, strict=True):
                experts_of, scores = needed[token : token + 1], predicted[token : token + 1] if has_scores else None
                start = time.thread_time_ns()
                layer.observe(experts_of, scores)
                if token >= WARM_UP:
                    times.append((time.thread_time_ns() - start) / 1e3)
        row[name] = statistics.mean(times)
        if has_scores:
            row["p50_us"], row["p99_us"] = statistics.median(times), statistics.quantiles(times, n=100)[-1]
            start = time.thread_time_ns()
            gatherers[0].rates()
            row["rates_ms"] = (time.thread_time_ns() - start) / 1e6
    return row | {"within_bound": row["statistics_us"] <= BOUND_US}


def configuration_cost(
    layers: int, experts: int, top_k: int, segments: int, share: float, load_ns: int
) -> dict[str, Any]:
    """One attention and one MoE module of 100 us each: `load_ns` says how slow the link is."""
    dice = np.random.default_rng(1)
    rates = [gathered(dice, 300, experts, top_k) for _ in range(layers)]
    shape = shape_of(layers, experts, top_k, segments)
    timing = Timing.of(shape, attention_ns=100_000, moe_ns=100_000, load_ns=load_ns, head_ns=200_000)
    kept = int(share * layers * experts * segments)
    times = []
    for _ in range(3):
        start = time.thread_time()
        found = configure(shape, [kept], rates, timing)
        times.append(time.thread_time() - start)
    return {
        "what": "configure",
        "layers": layers,
        "experts": experts,
        "top_k": top_k,
        "segments": segments,
        "kept": f"{share:.3g} of all",
        "load_us": load_ns / 1e3,
        "configure_s": statistics.median(times),
        "moves": found.num_moves,
        "start_ms": sum(found.start_exposed_ns) / 1e6,
        "uniform_ms": sum(found.uniform_exposed_ns) / 1e6,
        "exposed_ms": sum(found.exposed_ns) / 1e6,
        "within_bound": statistics.median(times) <= BOUND_S,
    }


def allocations(layers: int, total: int, most: int) -> Iterator[tuple[int, ...]]:
    """All budgets from 1 to `most` segments a layer that sum to at most `total`."""
    if not layers:
        yield ()
        return
    for first in range(1, min(most, total - layers + 1) + 1):
        for rest in allocations(layers - 1, total - first, most):
            yield (first, *rest)


def small_case(seed: int) -> dict[str, float]:
    """Exposed nanoseconds of the start, of equal budgets, of the configurator and at best."""
    dice = np.random.default_rng(seed)
    layers, experts, segments = 3, int(dice.integers(4, 7)), int(dice.choice([1, 2, 4]))
    top_k = int(dice.integers(1, 3))
    rates = [gathered(dice, 200, experts, top_k) for _ in range(layers)]
    shape = shape_of(layers, experts, top_k, segments)
    load_ns = 100_000
    attention_ns, moe_ns, head_ns = (int(load_ns * dice.uniform(0.1, 1.0)) for _ in range(3))
    timing = Timing.of(shape, attention_ns, moe_ns, load_ns, head_ns)
    kept = int(dice.integers(layers, layers * experts * segments // 2 + 1))
    found = configure(shape, [kept], rates, timing)
    forecaster, near, least = Forecaster(shape, rates, timing), None, float("inf")
    for budgets in allocations(layers, kept, experts * segments):
        near = forecaster.forecast(budgets, near)
        least = min(least, near.total_ns)
    return {
        "start": sum(found.start_exposed_ns),
        "uniform": sum(found.uniform_exposed_ns),
        "found": sum(found.exposed_ns),
        "least": least,
    }


def gaps(cases: int) -> dict[str, Any]:
    """Over the first so many seeds whose least is above 0: where nothing need be waited for, no share can be said."""
    waits: list[dict[str, float]] = []
    missed = seed = 0
    while len(waits) < cases:
        case = small_case(seed)
        if case["least"] > 0:
            waits.append(case)
        else:
            missed += case["found"] > 0
        seed += 1
    row: dict[str, Any] = {"what": "gap", "layers": 3, "cases": cases}
    for name in ("found", "uniform", "start"):
        over = sorted(case[name] / case["least"] - 1 for case in waits)
        row[f"{name}_median"], row[f"{name}_p95"] = statistics.median(over), over[int(0.95 * len(over))]
        row[f"{name}_max"] = over[-1]
    row["found_is_least"] = sum(case["found"] <= case["least"] * (1 + 1e-9) for case in waits)
    row["cases_least_0"], row["of_them_found_above_0"] = seed - cases, missed
    return row | {"within_bound": row["found_median"] <= BOUND_GAP}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--cases", type=int, default=100)
    args = parser.parse_args()
    rows = [statistics_cost(26, 64, 6, args.tokens), statistics_cost(61, 256, 8, args.tokens)]
    rows += [configuration_cost(26, 64, 6, 4, 0.25, 300_000)]
    rows += [configuration_cost(61, 256, 8, 16, share, 300_000) for share in (0.1, 0.25, 0.5)]
    rows += [configuration_cost(61, 256, 8, 16, 0.25, load_ns) for load_ns in (30_000, 1_000_000)]
    rows += [gaps(args.cases)]
    print_report("configurator", rows, vars(args))


if __name__ == "__main__":
    main()
