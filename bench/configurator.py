"""What MoEpic's configurator costs and how good it is, without a model, on one core.

    python bench/configurator.py [--tokens 400] [--cases 100]

All times are of the processor. `statistics_us`: mean of what one token adds to the statistics of a layer, in the order
in which a decode step visits them (bound at E = 256, K = 8: 30 us; every 64th token counts what 64 have shown, hence
`p50_us` and `p99_us`); `without_order_us`: of a token without a prediction; `rates_ms`: reading them. In a scheduler
(bound: 30 us): what a layer takes in one that gathers (`with_us`), beyond one that does not and decides the same.
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
from dataclasses import replace
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when NumPy is imported

import numpy as np
import numpy.typing as npt
from report import print_report

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Prediction, RouterRan
from expertly.policies.allocation.moepic import LayerRates, LayerStatistics, Timing, configure
from expertly.policies.allocation.moepic.configurator import Forecaster
from expertly.scheduler.budget import split_budget
from expertly.scheduler.presets import get_system
from expertly.scheduler.scheduler import Scheduler

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
    needed, predicted = routing(dice, tokens, experts, top_k, float(dice.choice([0.0, 0.3, 1.0, 2.0, 5.0])))
    for token in range(tokens):
        layer.observe(needed[token : token + 1], predicted[token : token + 1])
    return layer.rates()


def shape_of(layers: int, experts: int, top_k: int, segments: int) -> Geometry:
    return Geometry(tuple(LayerGeometry(experts, top_k, 16, 16 * segments, 3, 2) for _ in range(layers)), segments)


def statistics_cost(layers: int, experts: int, top_k: int, tokens: int) -> dict[str, Any]:
    dice = np.random.default_rng(0)
    routed = [routing(dice, WARM_UP + tokens, experts, top_k, 1.0) for _ in range(layers)]
    row: dict[str, Any] = {"what": "statistics", "layers": layers, "experts": experts, "top_k": top_k}
    needed = [rows.tolist() for rows, _ in routed]
    orders = [np.argsort(-scores, axis=1, kind="stable").tolist() for _, scores in routed]
    for name, has_order in (("statistics_us", True), ("without_order_us", False)):
        gatherers = [LayerStatistics(experts, early=layer) for layer in range(layers)]
        times = []
        for token in range(WARM_UP + tokens):
            for layer, gatherer in enumerate(gatherers):
                experts_of, order = needed[layer][token], orders[layer][token] if has_order else None
                start = time.thread_time_ns()
                gatherer.note(experts_of, order)
                if token >= WARM_UP:
                    times.append((time.thread_time_ns() - start) / 1e3)
        row[name] = statistics.mean(times)
        if has_order:
            row["p50_us"], row["p99_us"] = statistics.median(times), statistics.quantiles(times, n=100)[-1]
            start = time.thread_time_ns()
            gatherers[0].rates()
            row["rates_ms"] = (time.thread_time_ns() - start) / 1e6
    return row | {"within_bound": row["statistics_us"] <= BOUND_US}


def scheduler_cost(layers: int, experts: int, top_k: int, tokens: int) -> dict[str, Any]:
    """What gathering adds in a scheduler that predicts, loads, evicts and computes: of two that decide alike, one
    gathers; each token runs in both, first in one, then in the other.
    """
    dice = np.random.default_rng(2)
    shape = shape_of(layers, experts, top_k, 4)
    routed = [routing(dice, WARM_UP + tokens, experts, top_k, 1.0) for _ in range(layers)]
    needed = [rows.tolist() for rows, _ in routed]
    orders = [np.argsort(-scores, axis=1, kind="stable").tolist() for _, scores in routed]
    scores = np.linspace(1.0, 0.0, experts).tolist()
    ones, decode = [1] * top_k, [True] * top_k
    schedulers = []
    for system in (get_system("moepic"), replace(get_system("moepic"), allocation="split")):
        schedulers.append(system.scheduler(shape, system.budget(shape, split_budget(shape, shape.nbytes // 4))))
    assert schedulers[0].allocation.is_online and not schedulers[1].allocation.is_online

    def run(control: Scheduler, token: int) -> int:
        start = time.thread_time_ns()
        for layer in range(layers):
            router = RouterRan(layer, needed[layer][token], ones, decode, 1)
            step = control.begin_layer(router)
            following = (layer + 1) % layers
            coming = token + (layer + 1 == layers)
            if coming < WARM_UP + tokens:
                control.predict(Prediction(following, orders[following][coming], scores, 1))
            waiting = [*step.ready, *step.loads]
            for span in step.loads:
                control.loaded(span)
            while waiting:
                more = control.computed(waiting.pop())
                if more is not None:
                    for span in more.loads:
                        control.loaded(span)
                    waiting += more.loads
            control.end_layer()
        return time.thread_time_ns() - start

    spent: tuple[list[int], list[int]] = ([], [])
    for token in range(WARM_UP + tokens):
        for number in (0, 1) if token % 2 else (1, 0):
            spent[number].append(run(schedulers[number], token))
    with_us, without_us = (statistics.mean(times[WARM_UP:]) / 1e3 / layers for times in spent)
    row: dict[str, Any] = {"what": "statistics in a scheduler", "layers": layers, "experts": experts, "top_k": top_k}
    row |= {"with_us": with_us, "without_us": without_us, "statistics_us": with_us - without_us}
    return row | {"within_bound": row["statistics_us"] <= BOUND_US}


def configuration_cost(
    layers: int, experts: int, top_k: int, segments: int, share: float, load_ns: int, span_ns: int = 0
) -> dict[str, Any]:
    """One attention and one MoE module of 100 us each: `load_ns` says how slow the link is."""
    dice = np.random.default_rng(1)
    rates = [gathered(dice, 300, experts, top_k) for _ in range(layers)]
    shape = shape_of(layers, experts, top_k, segments)
    timing = Timing.of(shape, 100_000, 100_000, load_ns, 200_000, span_ns, span_ns)
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
        "span_us": span_ns / 1e3,
        "configure_s": statistics.median(times),
        "moves": found.num_moves,
        "layers_split": sum(0 < one.kept_segments < segments for one in found.plan.layers),
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


def small_case(seed: int, span_ns: int) -> dict[str, float]:
    """Exposed nanoseconds of the start, of equal budgets, of the configurator and at best."""
    dice = np.random.default_rng(seed)
    layers, experts, segments = 3, int(dice.integers(4, 7)), int(dice.choice([1, 2, 4]))
    top_k = int(dice.integers(1, 3))
    rates = [gathered(dice, 200, experts, top_k) for _ in range(layers)]
    shape = shape_of(layers, experts, top_k, segments)
    load_ns = 100_000
    attention_ns, moe_ns, head_ns = (int(load_ns * dice.uniform(0.1, 1.0)) for _ in range(3))
    timing = Timing.of(shape, attention_ns, moe_ns, load_ns, head_ns, span_ns)
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


def gaps(cases: int, span_ns: int) -> dict[str, Any]:
    """Over the first so many seeds whose least is above 0: where nothing need be waited for, no share can be said."""
    waits: list[dict[str, float]] = []
    missed = seed = 0
    while len(waits) < cases:
        case = small_case(seed, span_ns)
        if case["least"] > 0:
            waits.append(case)
        else:
            missed += case["found"] > 0
        seed += 1
    row: dict[str, Any] = {"what": "gap", "layers": 3, "cases": cases, "span_us": span_ns / 1e3}
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
    rows += [scheduler_cost(26, 32, 4, args.tokens), scheduler_cost(26, 256, 8, args.tokens)]
    rows += [configuration_cost(26, 64, 6, 4, 0.25, 300_000)]
    rows += [configuration_cost(61, 256, 8, 16, share, 300_000) for share in (0.1, 0.25, 0.5)]
    rows += [configuration_cost(61, 256, 8, 16, 0.25, load_ns) for load_ns in (30_000, 1_000_000)]
    rows += [configuration_cost(61, 256, 8, 16, share, 300_000, 10_000) for share in (0.1, 0.25, 0.5)]
    rows += [gaps(args.cases, span_ns) for span_ns in (0, 15_000)]
    print_report("configurator", rows, vars(args))


if __name__ == "__main__":
    main()
