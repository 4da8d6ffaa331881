"""What the control plane costs a layer, without any tensor: E = 64, K = 8, P = 4, 26 layers, one core.

    python bench/control_plane.py [--tokens 400]

Bounds (medians): 25 us a layer when all is resident, 100 us with misses. `misses` is the mean number of missing experts
of a layer that had any. `all miss`: every expert asked for is absent, so all 8 are loaded and 8 others evicted for them
(two in `static`, which pins the rest; none where the budget is staging slots alone).
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from common import options, print_report

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import RouterRan
from expertly.scheduler.budget import split_budget
from expertly.scheduler.scheduler import Scheduler
from expertly.scheduler.systems import SYSTEMS

LAYERS, EXPERTS, TOP_K, SEGMENTS = 26, 64, 8, 4


def routing(num_tokens: int) -> list[list[list[int]]]:
    """[token][layer][K]: Zipf popularity a layer, and half of a token's experts stay for the next one."""
    dice = random.Random(0)
    popular = [dice.sample(range(EXPERTS), EXPERTS) for _ in range(LAYERS)]
    weights = [1 / (1 + rank) for rank in range(EXPERTS)]
    tokens: list[list[list[int]]] = []
    for token in range(num_tokens):
        layers = []
        for layer in range(LAYERS):
            chosen = dice.sample(tokens[-1][layer], TOP_K // 2) if token else []
            while len(chosen) < TOP_K:
                expert = dice.choices(popular[layer], weights)[0]
                if expert not in chosen:
                    chosen.append(expert)
            layers.append(chosen)
        tokens.append(layers)
    return tokens


def absent(control: Scheduler, layer: int, wanted: list[int]) -> list[int]:
    """K experts of a layer that are not resident, `wanted` first."""
    first = control.geometry.first_ids[layer]
    order = [*wanted, *(e for e in range(EXPERTS) if e not in wanted)]
    return [e for e in order if not control.cache.num_resident(first + e)][:TOP_K]


def run(system: str, share: float, tokens: list[list[list[int]]], all_miss: bool = False) -> dict[str, Any]:
    """Median microseconds of a layer, with and without misses."""
    shape = Geometry(tuple(LayerGeometry(EXPERTS, TOP_K, 64, 64, 3, 2) for _ in range(LAYERS)), SEGMENTS)
    parts = SYSTEMS[system]
    budget = split_budget(shape, int(shape.nbytes * share))
    control = parts.scheduler(shape, budget)
    hit_us, miss_us, misses = [], [], []
    ones, decode = [1] * TOP_K, [True] * TOP_K
    for number, layers in enumerate(tokens):
        for layer, experts in enumerate(layers):
            router = RouterRan(layer, absent(control, layer, experts) if all_miss else experts, ones, decode, 1)
            start = time.perf_counter_ns()
            plan = control.begin_layer(router)
            if plan.ready:
                control.computed(plan.ready)
            loading = list(plan.loads)
            while loading:
                span = loading.pop()
                spans = control.loaded(span)
                if spans:
                    loading += control.computed(spans)
            control.end_layer()
            elapsed = (time.perf_counter_ns() - start) / 1e3
            if number < len(tokens) // 2:
                continue  # fills the cache
            if plan.loads:
                miss_us.append(elapsed)
                misses.append(len({span.expert for span in plan.loads}))
            else:
                hit_us.append(elapsed)
    return {
        "system": system,
        "memory": f"{share:.3g} of all",
        "routing": "all miss" if all_miss else "zipf",
        "hit_us": statistics.median(hit_us) if hit_us else None,
        "miss_us": statistics.median(miss_us) if miss_us else None,
        "misses": statistics.mean(misses) if misses else None,
    }


def main() -> None:
    args = options(__doc__, tokens=400)
    tokens = routing(args.tokens)
    rows = [run("lru", 1.0, tokens)]
    for all_miss in (False, True):
        for system in ("on-demand", "lru", "lfu", "lcp", "random", "static", "expertly"):
            rows.append(run(system, 0.25, tokens, all_miss))
    rows.append(run("lru", TOP_K / (EXPERTS * LAYERS), tokens, all_miss=True) | {"memory": "staging slots"})
    print_report("control_plane", rows, vars(args))


if __name__ == "__main__":
    main()
